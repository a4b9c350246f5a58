#!/usr/bin/env python3
"""Attention's backward on the CPU beside PyTorch's scaled_dot_product_attention backward: same shapes, same threads, turn by turn.

usage: bench/attn_backward_vs_torch.py OUT.json   (a Python with torch; first: cargo build --release -p suanpan-attn --example backward_vs)
Writes input for `cargo xtask record`. Environment: BACKWARD_BIN, THREADS (2), LENGTHS (1024,2048,4096,8192), DIMS (64,128),
DTYPES (f32,bf16), MASKS (full,causal), HEADS (8), ROUNDS (7).
Shared machines change speed over seconds: both sides run in turn within each round, and minimum and median over rounds are compared.
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
BIN = os.environ.get("BACKWARD_BIN", str(ROOT / "target/release/examples/backward_vs"))
THREADS = int(os.environ.get("THREADS", "2"))
HEADS = int(os.environ.get("HEADS", "8"))
ROUNDS = int(os.environ.get("ROUNDS", "7"))
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def words(name, default):
    return os.environ.get(name, default).split(",")


def median(values):
    return sorted(values)[len(values) // 2]


class Ours:
    """One shape in its own process, which sleeps between turns."""

    def __init__(self, dtype, d, length, mask):
        command = [BIN, dtype, str(d), str(length), mask, str(HEADS), str(HEADS), str(THREADS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.shape = json.loads(self.process.stdout.readline())

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Torch:
    def __init__(self, dtype, d, length, mask):
        leaf = lambda: torch.randn(1, HEADS, length, d).to(TYPES[dtype]).requires_grad_()
        self.inputs = (leaf(), leaf(), leaf())
        self.out = F.scaled_dot_product_attention(*self.inputs, is_causal=mask == "causal")
        self.gradient = torch.randn(1, HEADS, length, d).to(TYPES[dtype])
        self.kernel = self.out.grad_fn.name()

    def turn(self):
        start = time.perf_counter()
        torch.autograd.grad(self.out, self.inputs, self.gradient, retain_graph=True)
        return 1e3 * (time.perf_counter() - start)


def measure(dtype, d, length, mask):
    ours, peer = Ours(dtype, d, length, mask), Torch(dtype, d, length, mask)
    ours.turn(), peer.turn()
    runs, peer_runs = [], []
    for _ in range(ROUNDS):
        runs.append(ours.turn())
        peer_runs.append(peer.turn())
    ours.close()
    s = ours.shape
    row = dict(s, ms=median(runs), ms_min=min(runs), peer_ms=median(peer_runs), peer_ms_min=min(peer_runs), runs=runs, peer_runs=peer_runs,
               lengths={"seqlen_q": length, "seqlen_k": length}, heads=f"{s['num_q_heads']} q, {s['num_kv_heads']} kv", page_size="contiguous",
               kernel=f"cpu {s['isa']}", peer_kernel=peer.kernel)
    row["gflops"] = s["flops"] / row["ms"] / 1e6
    row["ratio"], row["ratio_min"] = row["peer_ms"] / row["ms"], row["peer_ms_min"] / row["ms_min"]
    print(f"{dtype:4s} d {d:3d} {mask:6s} {length:5d}  {row['ms']:9.2f} ms (min {row['ms_min']:9.2f}) {row['gflops']:6.1f} GFLOP/s"
          f" (max {s['flops'] / row['ms_min'] / 1e6:6.1f})  torch {row['peer_ms']:9.2f} (min {row['peer_ms_min']:9.2f})"
          f"  ratio {row['ratio']:.2f} (of minima {row['ratio_min']:.2f})", flush=True)
    return row


def main():
    torch.set_num_threads(THREADS)
    rows = [measure(dtype, int(d), int(length), mask)
            for dtype in words("DTYPES", "f32,bf16") for d in words("DIMS", "64,128")
            for mask in words("MASKS", "full,causal") for length in words("LENGTHS", "1024,2048,4096,8192")]
    conditions = {
        "device": "CPU", "clocks": "not controlled", "dropout": "none", "backend": "suanpan-attn", "cache_state": "random inputs, run before",
        "threads": THREADS, "peer": "PyTorch scaled_dot_product_attention backward", "peer_version": torch.__version__,
        "peer_capability": torch.backends.cpu.get_cpu_capability(),
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
