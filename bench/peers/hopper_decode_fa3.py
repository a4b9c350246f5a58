#!/usr/bin/env python3
"""Paged decode of FlashAttention-3 on one Hopper, one graph replay at a time over rotating pages, as `suanpan-gpu-bench` times it.

usage: hopper_decode_fa3.py       (needs flash_attn_interface)
"""
import statistics

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


def main():
    for q_heads, kv_heads, dim in SHAPES:
        for batch, length in LOADS:
            for page in (16, 64):
                kv_bytes = batch * length * kv_heads * dim * 4
                sets = min(64, max(1, -(-ROTATE_BYTES // kv_bytes)))
                pages = length // page
                shape = (sets * batch * pages, page, kv_heads, dim)
                k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                table = torch.randperm(shape[0], device="cuda", dtype=torch.int32).view(sets, batch, pages)
                q = torch.randn(batch, 1, q_heads, dim, device="cuda", dtype=torch.bfloat16)
                lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
                graphs = [graph(lambda: flash_attn_interface.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, page_table=table[i], causal=True)) for i in range(sets)]
                us = statistics.median(replay_us(graphs[r % sets]) for r in range(REPLAYS))
                print(f"decode fa3 {q_heads}/{kv_heads} d {dim} B {batch} S {length} page {page}: {us:.2f} us {kv_bytes / us / 1e6:.3f} TB/s",
                      flush=True)
                del k, v, graphs
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
