// Rows of new keys and values into the pages of a cache: keys turned by rotary embedding where asked, both rounded to the cache's type, with one
// scale a (token, head) worked out here or coarser ones that stand already. Codes and scales are those of suanpan_attn::quant, bit by bit.
// Not here: attention over them (decode_cluster.cu appends bf16 rows by itself).
#include "../common/sequences.cuh"
#include "decode_rope.cuh"
#include "decode_tile.cuh"

namespace suanpan {

struct AppendParams {
  const char* rows[2];         // k, v: [tokens, heads, D] bf16
  long long row_token_stride[2];  // bytes
  long long row_head_stride[2];
  char* pages[2];              // [pages, page_size, heads, D] of the type, the same strides for both, bytes
  long long page_stride;
  long long token_stride;
  long long head_stride;
  float* scales[2];            // or null; the same strides for both, elements
  long long scale_page_stride;
  long long scale_token_stride;  // 0: the scales are given
  long long scale_head_stride;
  const int* seqlens_k;        // [batch], the new tokens included
  const int* cu_seqlens_q;     // [batch + 1], or null: seqlen_q each
  const int* page_table;       // [batch, table_row]
  const float* cos;            // [positions, rotary / 2]
  const float* sin;
  int tokens;
  int heads;
  int batch;
  int seqlen_q;
  int page_size;
  int table_row;               // entries that a sequence has
  int num_pages;
  int rotary;                  // elements of a key that turn; 0: none
  int interleaved;
};

template <int KV> constexpr float kLargest = KV == kE4m3 ? 448.f : KV == kInt8 ? 127.f : 7.f;

// Eight numbers, already divided by their scale, as codes side by side.
template <int KV, int BITS> __device__ __forceinline__ void store_codes(char* to, const float (&x)[8]) {
  if constexpr (KV == kE4m3) {
    uint32_t w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
          : "=r"(w[i]) : "f"(x[4 * i]), "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3]));
    *(uint2*)to = uint2{w[0], w[1]};
  } else {
    constexpr int kTop = (int)kLargest<KV>;
    uint64_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int code = min(max(__float2int_rn(x[i]), -kTop), kTop);
      codes |= (uint64_t)((uint32_t)code & ((1u << BITS) - 1)) << BITS * i;
    }
    if constexpr (KV == kInt8) *(uint64_t*)to = codes;
    else *(uint32_t*)to = (uint32_t)codes;
  }
}

// D / 8 lanes a row of k or v; the rows of one token are neighbours.
template <int D, int KV> __device__ __forceinline__ void append(const AppendParams& p) {
  constexpr int kLanes = D / 8, kRowsAWarp = 32 / kLanes, kBits = KvTile<D, KV>::kRow / kLanes;
  const int lane = threadIdx.x % 32, piece = lane % kLanes;
  const long long rows = 2LL * p.tokens * p.heads, step = (long long)gridDim.x * (blockDim.x / 32) * kRowsAWarp;
  const long long first = ((long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * kRowsAWarp;
  for (long long at = first; at < rows; at += step) {  // the same for a warp
    const long long row = at + lane / kLanes;
    const int token = (int)min(row / (2 * p.heads), (long long)p.tokens - 1), rest = (int)(row % (2 * p.heads));
    const int which = rest / p.heads, head = rest % p.heads;
    int b = 0, q0 = 0, len_q = p.seqlen_q;
    if (p.cu_seqlens_q) {
      b = sequence_of(p.cu_seqlens_q, p.batch, token);
      q0 = p.cu_seqlens_q[b];
      len_q = p.cu_seqlens_q[b + 1] - q0;
    } else {
      b = token / len_q;
      q0 = b * len_q;
    }
    const int position = p.seqlens_k[b] - len_q + token - q0;
    // What lies in no page is written nowhere.
    bool live = row < rows && position >= 0 && position / p.page_size < p.table_row;
    const int id = live ? p.page_table[(long long)b * p.table_row + position / p.page_size] : 0;
    live = live && (uint32_t)id < (uint32_t)p.num_pages;
    const char* from = p.rows[which] + token * p.row_token_stride[which] + head * p.row_head_stride[which];
    uint4 x = *(const uint4*)(from + piece * 16);
    if (p.rotary && which == 0 && live) x = rotated_k(from, piece, position, p.rotary, p.interleaved, p.cos, p.sin);
    const int slot = position % p.page_size;
    char* to = p.pages[which] + id * p.page_stride + slot * p.token_stride + head * p.head_stride + piece * kBits;  // eight numbers a lane
    if constexpr (KV == kBf16) {
      if (live) *(uint4*)to = x;
    } else {
      const uint32_t w[4] = {x.x, x.y, x.z, x.w};
      float numbers[8], top = 0.f;
      bool strange = false;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = unpack_bf16(w[i / 2]);
        numbers[i] = i % 2 ? pair.y : pair.x;
        if (fabsf(numbers[i]) < INFINITY) top = fmaxf(top, fabsf(numbers[i]));
        strange |= numbers[i] != numbers[i];
      }
#pragma unroll
      for (int n = kLanes / 2; n > 0; n /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
        strange |= __shfl_xor_sync(~0u, (int)strange, n) != 0;
      }
      float* scale_at = p.scales[which] + id * p.scale_page_stride + slot * p.scale_token_stride + head * p.scale_head_stride;
      float scale;
      if (p.scale_token_stride) {
        // As the host's: no scale below the normal numbers. Integers have no code for NaN: the scale says it.
        scale = top == 0.f ? 1.f : fmaxf(__fdiv_rn(top, kLargest<KV>), 1.17549435e-38f);
        if (KV != kE4m3 && strange) scale = __int_as_float(0x7fc00000);
        if (live && piece == 0) *scale_at = scale;
      } else {
        scale = live ? *scale_at : 1.f;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] = __fdiv_rn(numbers[i], scale);
      if (live) store_codes<KV, kBits>(to, numbers);
    }
  }
}

#define APPEND(D, KV, NAME) \
  extern "C" __global__ void __launch_bounds__(256) append_##D##_##NAME(const __grid_constant__ AppendParams p) { append<D, KV>(p); }
#define APPEND_TYPES(D) APPEND(D, kBf16, bf16) APPEND(D, kE4m3, e4m3) APPEND(D, kInt8, int8) APPEND(D, kInt4, int4)
APPEND_TYPES(64)
APPEND_TYPES(128)
APPEND_TYPES(256)

}  // namespace suanpan
