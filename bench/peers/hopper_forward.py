#!/usr/bin/env python3
"""Attention forward of the peers on one Hopper: FlashAttention-3 (flash_attn_interface) and cuDNN through PyTorch, as `suanpan-gpu-bench` times it.

usage: hopper_forward.py DIMS LENGTHS REPEATS PEERS       e.g. 64,128,256 2048,8192,16384,32768 10 fa3,cudnn
"""
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, COLUMNS = 32768, 2048  # tokens in all, heads x head_dim


def median_ms(call, repeats, warm=3):
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


def main():
    dims, lengths = ([int(x) for x in a.split(",")] for a in sys.argv[1:3])
    repeats, peers = int(sys.argv[3]), sys.argv[4].split(",")
    for dim in dims:
        heads = COLUMNS // dim
        for causal in (False, True):
            for length in lengths:
                batch = max(1, TOKENS // length)
                q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

                def cudnn():
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)

                def fa3():
                    import flash_attn_interface
                    return flash_attn_interface.flash_attn_func(q, k, v, causal=causal)

                for name, call in (("fa3", fa3), ("cudnn", cudnn)):
                    if name in peers:
                        ms = median_ms(call, repeats)
                        flops = 4 * batch * heads * length * length * dim * (0.5 if causal else 1)
                        print(f"forward {name} d {dim} {'causal' if causal else 'full'} S {length} B {batch} H {heads}: "
                              f"{ms * 1e3:.1f} us {flops / ms / 1e9:.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
