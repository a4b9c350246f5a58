#!/usr/bin/env python3
"""Attention alone on the CPU: `suanpan bench attn` beside PyTorch's scaled_dot_product_attention, same shapes, same threads, same run.

usage: bench/attn_vs_torch.py OUT.json        (a Python with torch; first: cargo build --release)
Writes input for `cargo xtask record`. Environment: SUANPAN_BIN, THREADS (2), LENGTHS (8192), HEAD_DIMS (64,128), HEADS (8), DECODE_KEYS (32768; 0 = none),
REPEATS (3), ROUNDS (3).
Shared machines change speed over minutes: each round measures both sides, and the medians over rounds are compared.
"""
import json
import os
import pathlib
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = os.environ.get("SUANPAN_BIN", str(ROOT / "target/release/suanpan"))
THREADS = int(os.environ.get("THREADS", "2"))
LENGTHS = os.environ.get("LENGTHS", "8192")
HEAD_DIMS = os.environ.get("HEAD_DIMS", "64,128")
HEADS = os.environ.get("HEADS", "8")
DECODE_KEYS = os.environ.get("DECODE_KEYS", "32768")
REPEATS = int(os.environ.get("REPEATS", "3"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def median(values):
    return sorted(values)[len(values) // 2]


def median_seconds(call, repeats):
    call()
    runs = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        runs.append(time.perf_counter() - start)
    return sorted(runs)[len(runs) // 2]


def torch_ms(row):
    dtype = DTYPES[row["dtype"]]
    shape = lambda heads, length: torch.randn(1, heads, length, row["head_dim"]).to(dtype)
    q = shape(row["num_q_heads"], row["seqlen_q"])
    k, v = shape(row["num_kv_heads"], row["seqlen_k"]), shape(row["num_kv_heads"], row["seqlen_k"])
    causal = row["mask"] == "causal" and row["seqlen_q"] > 1
    gqa = row["num_q_heads"] != row["num_kv_heads"]
    with torch.no_grad():
        return 1e3 * median_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa),
                                    31 if row["phase"] == "decode" else REPEATS)


def one_round():
    """[(our row, peer ms or None)], in our order."""
    command = [BIN, "bench", "attn", "--threads", str(THREADS), "--lengths", LENGTHS, "--head-dims", HEAD_DIMS,
               "--prefill-heads", HEADS, "--decode-keys", DECODE_KEYS, "--repeats", str(REPEATS), "--json"]
    ours = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return [(row, torch_ms(row) if row["phase"] in ("prefill", "decode") else None) for row in ours]


def main():
    torch.set_num_threads(THREADS)
    rows = []
    for same in zip(*[one_round() for _ in range(ROUNDS)]):
        row, runs = same[0][0], [r["ms"] for r, _ in same]
        ms = median(runs)
        scale = row["ms"] / ms
        out = dict(row, ms=ms, gflops=row["gflops"] * scale, kv_gbytes_per_s=row["kv_gbytes_per_s"] * scale, runs=runs,
                   lengths={"seqlen_q": row["seqlen_q"], "seqlen_k": row["seqlen_k"]}, kernel=f"cpu {row['isa']}",
                   heads=f"{row['num_q_heads']} q, {row['num_kv_heads']} kv", page_size=row["page_size"] or "contiguous")
        if same[0][1] is not None:
            out["peer_runs"] = [p for _, p in same]
            out["peer_ms"] = median(out["peer_runs"])
            out["ratio"] = out["peer_ms"] / ms
        rows.append(out)
        print(f"{row['phase']:11s} {row['dtype']:5s} d {row['head_dim']:3d} {row['mask']:6s} q {row['seqlen_q']:5d} k {row['seqlen_k']:6d} "
              f"{ms:9.2f} ms {out['gflops']:7.1f} GFLOP/s {out['kv_gbytes_per_s']:6.2f} GB/s  torch {out.get('peer_ms', float('nan')):9.2f} ms  ratio {out.get('ratio', float('nan')):.2f}")
    conditions = {
        "device": "CPU", "clocks": "not controlled", "dropout": "none", "backend": "suanpan-attn", "cache_state": "random K and V, read before",
        "threads": THREADS, "peer": "PyTorch scaled_dot_product_attention", "peer_version": torch.__version__,
        "peer_capability": torch.backends.cpu.get_cpu_capability(),
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
