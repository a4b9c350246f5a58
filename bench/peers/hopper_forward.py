#!/usr/bin/env python3
"""Attention forward on one Hopper, ours beside its peers: FlashAttention-3 (flash_attn_interface), FlashAttention-4 (flash_attn.cute) and cuDNN
through PyTorch, in turn.

usage: hopper_forward.py DIMS MASKS LENGTHS REPEATS ROUNDS PEERS [OUR BENCH BINARY] [RECORD INPUT]
       e.g. 64,128,256 full,causal 2048,8192,16384,32768 10 3 fa3,cudnn ./suanpan-gpu-bench forward.json
Several groups of cells: the first three arguments as lists separated by "/".
Each round takes a cell at a time, first ours, then the peers, with a rest before each: in one long run the power limit lowers the clock for
whoever is measured at that moment (docs/cuda-attn-notes.md). A cell's figure is the median over the rounds.
With the last argument it writes what `cargo xtask record` takes. Masks as in suanpan-gpu-bench; a peer that lacks one is left out.
"""
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, COLUMNS = 32768, 2048  # tokens in all, heads x head_dim
REST_S = 0.3


def timed(call, repeats, warm):
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def median_ms(call, repeats):
    """After 0.15 s of work, as suanpan-gpu-bench: the power limit then holds the clock where it stays."""
    return timed(call, repeats, int(150 / timed(call, 3, 3)))


def number(mask, prefix):
    return int(mask[len(prefix):]) if re.fullmatch(prefix + r"\d+", mask) else None


def few_tokens(mask):
    """Query tokens a sequence of extendN (four query heads a kv head), ours laid out as planned; packN and apartN: heads packed or not, keys whole."""
    return number(mask, "extend") or number(mask, "pack") or number(mask, "apart")


def pairs_of(mask, length):
    window, chunk, few = number(mask, "window"), number(mask, "chunk"), few_tokens(mask)
    if few:
        return few * length - few * (few - 1) // 2
    if window:
        return sum(min(window, i + 1) for i in range(length))
    if chunk:
        return sum(i % chunk + 1 for i in range(length))
    return length * length * (1 if mask.endswith("full") else 0.5)


def fa3(mask, q, k, v):
    import flash_attn_interface as fa
    window, chunk, page = number(mask, "window"), number(mask, "chunk"), number(mask, "page")
    if page:
        batch, length, heads, dim = k.shape
        table = torch.randperm(batch * length // page, device="cuda", dtype=torch.int32).view(batch, -1)
        k, v = (x.reshape(-1, page, heads, x.shape[-1]) for x in (k, v))
        lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        return lambda: fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, page_table=table, causal=True, num_splits=1)
    if few_tokens(mask):  # decides on packing and splits itself
        lens = torch.full((k.shape[0],), k.shape[1], device="cuda", dtype=torch.int32)
        return lambda: fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
    if mask in ("full", "causal"):
        return lambda: fa.flash_attn_func(q, k, v, causal=mask == "causal")
    if mask.startswith(("fp8", "int8")):  # it has e4m3 only
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        return lambda: fa.flash_attn_func(q, k, v, causal=mask.endswith("causal"))
    if window:
        return lambda: fa.flash_attn_func(q, k, v, causal=True, window_size=(window - 1, 0))
    if chunk:
        return lambda: fa.flash_attn_func(q, k, v, causal=True, attention_chunk=chunk)
    if mask == "sink":
        sinks = torch.full((q.shape[2],), 0.5, device="cuda", dtype=torch.bfloat16)
        return lambda: fa.flash_attn_func(q, k, v, causal=True, sinks=sinks)
    if mask == "softcap":
        return lambda: fa.flash_attn_func(q, k, v, causal=True, softcap=30.0)
    return None


def fa4(mask, q, k, v):
    if mask not in ("full", "causal"):
        return None
    from flash_attn.cute import flash_attn_func
    return lambda: flash_attn_func(q, k, v, causal=mask == "causal")


def cudnn(mask, q, k, v):
    if mask not in ("full", "causal"):
        return None

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=mask == "causal")
    return call


def peers_round(dims, mask, lengths, repeats, peers, times):
    dim, dim_v = dims
    heads = COLUMNS // dim_v
    for length in lengths:
        batch = max(1, TOKENS // length)
        few = few_tokens(mask)
        kv_heads = heads // 4 if few else heads
        q, k, v = (torch.randn(batch, n, h, d, device="cuda", dtype=torch.bfloat16)
                   for n, h, d in ((few or length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim_v)))
        for name, make in (("fa3", fa3), ("fa4", fa4), ("cudnn", cudnn)):
            if name not in peers:
                continue
            try:
                call = make(mask, q, k, v)
                time.sleep(REST_S)
                if call:
                    times[(dims, mask, length)][name].append(median_ms(call, repeats) * 1e3)
            except Exception as e:  # a build without the feature says so when it is called
                print(f"{name} d {dims} {mask} S {length}: {type(e).__name__}: {str(e).splitlines()[0][:120]}", flush=True)


def our_round(binary, dims, mask, lengths, repeats, times):
    name = "ours"
    if "=" in binary:
        name, binary = binary.split("=")
    dim = str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}{dims[1]}"
    command = [*binary.split("+"), "--what", "forward", "--dims", dim, "--masks", mask,
               "--lens", ",".join(map(str, lengths)), "--repeats", str(repeats)]
    time.sleep(REST_S)
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        print(f"{name} d {dims} {mask}: {out.stderr.strip()[-200:]}", flush=True)
    for length, us in re.findall(r"S +(\d+) .*?: +([\d.]+) us", out.stdout):
        times[(dims, mask, int(length))][name].append(float(us))


def row_of(cell, times, versions):
    dims, mask, length = cell
    batch, heads = max(1, TOKENS // length), COLUMNS // dims[1]
    flops = 2 * batch * heads * pairs_of(mask, length) * (dims[0] + dims[1])
    tflops = {name: flops / statistics.median(us) / 1e6 for name, us in times.items() if us}
    head_dim = dims[0] if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    print(f"d {head_dim} {mask:10} S {length:6} " + " ".join(f"{n} {x:.0f}" for n, x in tflops.items()), end="")
    kernel = {"full": "forward_full", "causal": "forward_causal", "fp8full": "forward_fp8_full", "fp8causal": "forward_fp8_causal", "int8full": "forward_int8_full", "int8causal": "forward_int8_causal"}.get(mask, "forward_features")
    times = {name: us for name, us in times.items() if us}
    row = {"dtype": "e4m3, o bf16" if mask.startswith("fp8") else "int8 q and k, e4m3 v, o bf16" if mask.startswith("int8") else "bf16", "head_dim": head_dim, "heads": f"{heads} q, {heads} kv", "mask": mask, "lengths": f"{batch} x {length}", "kernel": kernel,
           "us": statistics.median(times["ours"]) if "ours" in times else None, "tflops": tflops.get("ours"), "runs_us": times.get("ours")}
    others = {n: x for n, x in tflops.items() if n in versions}
    for name in others:
        row[f"{name}_us"], row[f"{name}_tflops"] = statistics.median(times[name]), tflops[name]
    if others and "ours" in tflops:
        best = max(others, key=others.get)
        row |= {"ratio": tflops["ours"] / others[best], "peer": best, "peer_version": versions[best]}
        print(f"  ratio {row['ratio']:.3f}", end="")
    print(flush=True)
    return row


def main():
    groups = [([(192, 128) if x == "192128" else (int(x), int(x)) for x in dims.split(",")], masks.split(","), [int(x) for x in lengths.split(",")])
              for dims, masks, lengths in zip(*(a.split("/") for a in sys.argv[1:4]), strict=True)]
    repeats, rounds, peers = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6].split(",")
    ours = sys.argv[7].split(",") if len(sys.argv) > 7 else []
    versions = {"fa3": "FlashAttention-3 3.0.0.post20260810", "fa4": "FlashAttention-4 4.0.0b36", "cudnn": f"cuDNN {torch.backends.cudnn.version()} by PyTorch {torch.__version__}"}
    cells = {(d, m, s): defaultdict(list) for dims, masks, lengths in groups for d in dims for m in masks for s in lengths}
    for _ in range(rounds):
        for dims, masks, lengths in groups:
            for d, m, length in itertools.product(dims, masks, lengths):
                for binary in ours:
                    our_round(binary, d, m, [length], repeats, cells)
                peers_round(d, m, [length], repeats, peers, cells)
    rows = [row_of(cell, times, versions) for cell, times in cells.items() if times]
    if len(sys.argv) > 8:
        conditions = {
            "phase": "prefill", "device": torch.cuda.get_device_name(), "clocks": "not controlled, 700 W limit", 
            "dropout": "none", "backend": "suanpan-cuda", "cache_state": "random normal q, k, v, launches back to back after 0.3 s of rest and 0.15 s of them",
            "flops": "2 pairs heads (head_dim + head_dim_v), pairs of a causal square by half", "rounds": rounds, "launches_a_round": repeats,
        }
        with open(sys.argv[8], "w") as f:
            json.dump({"machine_name": "nvidia-h200", "conditions": conditions, "rows": [r for r in rows if r["us"]]}, f, indent=1)


if __name__ == "__main__":
    main()
