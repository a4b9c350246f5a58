#!/usr/bin/env python3
"""Paged decode of FlashAttention-3 on one Hopper, one graph replay at a time over rotating pages, as `suanpan-gpu-bench` times it.

usage: hopper_decode_fa3.py [decode,again]       (needs flash_attn_interface)
again: the same pages each time (`--rotate no`).
"""
import statistics
import sys

import flash_attn_interface
import torch

SHAPES = ((32, 8, 128), (16, 1, 256))
LOADS = ((1, 1024), (1, 4096), (1, 8192), (1, 131072), (16, 32768), (64, 8192), (128, 4096))
ROTATE_BYTES, REPLAYS = 400_000_000, 45  # beyond the 50 MB L2


def graph(call):
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured


def replay_us(captured):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    captured.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def timed(graphs):
    return statistics.median(replay_us(graphs[r % len(graphs)]) for r in range(REPLAYS))


def pages_of(kv_bytes, batch, length, page, rotate):
    sets = min(64, max(1, -(-ROTATE_BYTES // kv_bytes))) if rotate else 1
    pages = length // page
    table = torch.randperm(sets * batch * pages, device="cuda", dtype=torch.int32).view(sets, batch, pages)
    return table, torch.full((batch,), length, device="cuda", dtype=torch.int32)


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode(rotate):
    for q_heads, kv_heads, dim in SHAPES:
        for batch, length in LOADS if rotate else LOADS[:3]:
            for page in (16, 64):
                kv_bytes = batch * length * kv_heads * dim * 4
                table, lengths = pages_of(kv_bytes, batch, length, page, rotate)
                k, v = (normal(table.numel(), page, kv_heads, dim) for _ in range(2))
                q = normal(batch, 1, q_heads, dim)
                us = timed([graph(lambda: flash_attn_interface.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, page_table=t, causal=True)) for t in table])
                print(f"decode fa3{'' if rotate else '=again'} {q_heads}/{kv_heads} d {dim} B {batch} S {length} page {page}: {us:.2f} us "
                      f"{kv_bytes / us / 1e6:.3f} TB/s", flush=True)
                del k, v
                torch.cuda.empty_cache()


def main():
    what = sys.argv[1].split(",") if len(sys.argv) > 1 else ["decode"]
    if "decode" in what:
        decode(rotate=True)
    if "again" in what:
        decode(rotate=False)


if __name__ == "__main__":
    main()
