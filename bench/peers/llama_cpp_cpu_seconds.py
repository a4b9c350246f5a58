#!/usr/bin/env python3
"""What llama.cpp costs in CPU seconds on one thread: a figure that another load on the machine hardly moves.

Wall-clock rates on a busy machine say nothing: two threads that meet at a barrier wait for each other's time slices. One thread's user
time does not. Each phase is run twice with different repeats; the difference leaves loading out. The records that count are still
those of llama_cpp.sh on a quiet machine; this is the stand-in when there is none.

Usage: llama_cpp_cpu_seconds.py [out.json]    (after `llama_cpp.sh build`; BENCH_LOCK names a lock file held for each run)
"""
import fcntl
import json
import os
import pathlib
import resource
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent.parent
bench = root / ".cache/peers/llama.cpp/bin/llama-bench"
model = os.environ.get("MODEL", str(root / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))


def cpu_seconds(args, repeats):
    lock = open(os.environ["BENCH_LOCK"], "w") if "BENCH_LOCK" in os.environ else None
    if lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [bench, "-m", model, "-t", "1", "-r", str(repeats), "--no-warmup", "-o", "json", *args]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


phases = [("pp512", 512, ["-p", "512", "-n", "0"], (1, 4)), ("pp2048", 2048, ["-p", "2048", "-n", "0"], (1, 2)), ("tg64", 64, ["-p", "0", "-n", "64"], (1, 4))]
if "--long" in sys.argv:
    sys.argv.remove("--long")
    phases += [("tg64 @ 7936", 64, ["-p", "0", "-n", "64", "-d", "7936"], (1, 5))]
rows = []
for name, tokens, args, (few, many) in phases:
    for flash in ["0", "1"]:
        extra = [*args, "-fa", flash]
        seconds = (cpu_seconds(extra, many) - cpu_seconds(extra, few)) / (many - few)
        rows.append({"phase": name, "flash_attn": int(flash), "threads": 1, "cpu_seconds": seconds, "tokens_per_cpu_second": tokens / seconds})
        print(f"{name:12s} flash_attn={flash} {tokens / seconds:8.1f} tokens per CPU second", flush=True)
out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / ".cache/peers/llama_cpp_cpu_seconds.json"
out.write_text(json.dumps(rows, indent=1) + "\n")
