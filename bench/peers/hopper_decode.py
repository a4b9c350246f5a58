#!/usr/bin/env python3
"""Paged decode of a peer on one Hopper, one graph replay at a time over rotating pages, as `suanpan-gpu-bench` times it.

usage: hopper_decode.py PEER [decode,again] [CELLS]
PEER: fa3 (needs flash_attn_interface), flashinfer or flashinfer-e4m3 (needs flashinfer-python; tensor cores; builds its kernel at first use).
again: the same pages each time (`--rotate no`). CELLS: of 32/8 and 16/1, both by default.
"""
import statistics
import sys

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


def fa3(q, k, v, lengths, tables):
    import flash_attn_interface

    q = q[:, None]
    return [lambda t=t: flash_attn_interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=t, causal=True)
            for t in tables]


def flashinfer(q, k, v, lengths, tables):
    import flashinfer

    batch, pages = tables.shape[1:]
    _, page, kv_heads, dim = k.shape
    room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    starts = torch.arange(0, batch + 1, device="cuda", dtype=torch.int32) * pages
    last = torch.full((batch,), page, device="cuda", dtype=torch.int32)
    calls = []
    for t in tables:
        ids = t.reshape(-1).contiguous()
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts.clone(),
                                                          paged_kv_indices_buffer=ids.clone(), paged_kv_last_page_len_buffer=last.clone())
        w.plan(starts, ids, last, q.shape[1], kv_heads, dim, page, q_data_type=q.dtype, kv_data_type=k.dtype)
        calls.append(lambda w=w: w.run(q, (k, v)))
    return calls


def decode(peer, rotate, cells):
    make, kv_dtype = (fa3 if peer == "fa3" else flashinfer), torch.float8_e4m3fn if peer.endswith("e4m3") else torch.bfloat16
    for q_heads, kv_heads, dim in SHAPES:
        if f"{q_heads}/{kv_heads}" not in cells:
            continue
        for batch, length in LOADS if rotate else LOADS[:3]:
            for page in (16, 64):
                kv_bytes = batch * length * kv_heads * dim * 2 * kv_dtype.itemsize
                tables, lengths = pages_of(kv_bytes, batch, length, page, rotate)
                k, v = (normal(tables.numel(), page, kv_heads, dim).to(kv_dtype) for _ in range(2))
                us = timed([graph(call) for call in make(normal(batch, q_heads, dim), k, v, lengths, tables)])
                print(f"decode {peer}{'' if rotate else '=again'} {q_heads}/{kv_heads} d {dim} B {batch} S {length} page {page}: {us:.2f} us "
                      f"{kv_bytes / us / 1e6:.3f} TB/s", flush=True)
                del k, v
                torch.cuda.empty_cache()


def main():
    peer = sys.argv[1]
    what = sys.argv[2].split(",") if len(sys.argv) > 2 else ["decode"]
    cells = sys.argv[3].split(",") if len(sys.argv) > 3 else ["32/8", "16/1"]
    if "decode" in what:
        decode(peer, True, cells)
    if "again" in what:
        decode(peer, False, cells)


if __name__ == "__main__":
    main()
