#!/usr/bin/env python3
"""`suanpan serve` from nothing: seconds from the start of the process to the first token of a short prompt, and resident memory after
a prompt of 8,121 tokens. Writes input for `cargo xtask record`.

usage: bench/serve_start.py OUT.json           Environment: SUANPAN_BIN, MODEL, PORT (8123), STARTS (3)
"""
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = os.environ.get("SUANPAN_BIN", str(ROOT / "target/release/suanpan"))
MODEL = os.environ.get("MODEL", str(ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
URL = f"http://127.0.0.1:{os.environ.get('PORT', '8123')}/v1/completions"
STARTS = int(os.environ.get("STARTS", "3"))


def post(prompt, tokens):
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def start():
    """(process, seconds to the first token)"""
    begin = time.perf_counter()
    server = subprocess.Popen([BIN, "serve", "--model", MODEL, "--port", URL.split(":")[2].split("/")[0]],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            post("Hello, my name is", 1)
            return server, time.perf_counter() - begin
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.002)


def resident(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: 1024 * int(line.split()[1]) for line in lines for key in ("VmRSS", "VmHWM") if line.startswith(key)}


def main():
    seconds = []
    for i in range(STARTS):
        server, cold = start()
        seconds.append(cold)
        if i + 1 == STARTS:
            usage = post("abacus bead rod count sum carry " * 1160, 8)["usage"]
            memory = resident(server.pid)
        server.terminate()
        server.wait()
    middle = sorted(seconds)[len(seconds) // 2]
    print(f"first token after {middle:.2f} s ({seconds}); resident {memory['VmRSS'] / 1e6:.0f} MB, peak {memory['VmHWM'] / 1e6:.0f} MB "
          f"after {usage['prompt_tokens']} tokens; books agree: {usage['ledger']['agree']}")
    conditions = {
        "device": "CPU", "clocks": "not controlled", "dtype": "as the server chooses", "heads": "9 q, 3 kv", "head_dim": 64, "mask": "causal",
        "dropout": "none", "threads": os.cpu_count(), "backend": "suanpan serve, default flags", "kernel": "as the plan chooses",
        "cache_state": "process new, model file in the page cache", "model": "SmolLM2-135M-Instruct Q4_1 GGUF",
    }
    row = {"phase": "serve start", "lengths": {"tokens": usage["prompt_tokens"]}, "first_token_s": middle, "runs": seconds,
           "resident_bytes": memory["VmRSS"], "resident_peak_bytes": memory["VmHWM"], "books_agree": usage["ledger"]["agree"]}
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"conditions": conditions, "rows": [row]}, indent=1))


if __name__ == "__main__":
    main()
