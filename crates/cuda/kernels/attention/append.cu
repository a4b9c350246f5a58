// Rows of new keys and values into the pages of a cache: keys turned by rotary embedding where asked, both rounded to the cache's type, with one
// scale a (token, head) worked out here or coarser ones that stand already. Codes and scales are those of suanpan_attn::quant, bit by bit.
// Not here: attention over them (decode_cluster.cu appends bf16 rows by itself).
#include "../common/sequences.cuh"
#include "../common/token_rows.cuh"
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
  int parts;                   // of a token's rows, a warp's each
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

// x / scale, rounded as a division is. One reciprocal for a row and two corrections each, where no step of that comes near the ends of the
// range (Markstein 1990); else eight divisions.
__device__ __forceinline__ void divide(float (&x)[8], float top, float scale) {
  const auto ordinary = [](float a) { return a > 0x1p-60f && a < 0x1p60f; };
  if (ordinary(top) && ordinary(scale)) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float near = x[i] * inverse;
      x[i] = copysignf(__fmaf_rn(__fmaf_rn(-near, scale, x[i]), inverse, near), x[i]);  // -0 stays so
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fdiv_rn(x[i], scale);
  }
}

// The largest size of a row that `LANES` lanes hold, of its finite numbers; `strange` says that one is NaN. Every lane of the warp takes part.
template <int LANES> __device__ __forceinline__ float largest(const uint32_t (&w)[4], const float (&x)[8], bool& strange) {
  uint32_t m = 0;  // sizes are not negative: their bits are in their order
#pragma unroll
  for (int i = 0; i < 4; ++i) m = __vmaxu2(m, w[i] & 0x7fff7fffu);
  m = max(m >> 16, m & 0xffffu);
#pragma unroll
  for (int n = LANES / 2; n > 0; n /= 2) m = max(m, __shfl_xor_sync(~0u, m, n));
  float top = __uint_as_float(m << 16);
  strange = false;
  if (__any_sync(~0u, !(top < INFINITY))) {
    top = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (fabsf(x[i]) < INFINITY) top = fmaxf(top, fabsf(x[i]));
      strange |= x[i] != x[i];
    }
#pragma unroll
    for (int n = LANES / 2; n > 0; n /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
      strange |= __shfl_xor_sync(~0u, (int)strange, n) != 0;
    }
  }
  return top;
}

template <int D, int KV> __device__ __forceinline__ void append(const AppendParams& p) {
  using Rows = TokenRows<D>;
  constexpr int kBits = KvTile<D, KV>::kRow / Rows::kLanes;  // bytes of eight numbers
  const int piece = threadIdx.x % Rows::kLanes, warps = gridDim.x * (blockDim.x / 32);
  for (int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < p.tokens * p.parts; unit += warps) {
    const Rows mine(unit, p.parts, p.heads);
    const int token = mine.token;
    int b = 0, q0 = 0, len_q = p.seqlen_q;
    if (p.cu_seqlens_q) {
      b = sequence_of(p.cu_seqlens_q, p.batch, token);
      q0 = p.cu_seqlens_q[b];
      len_q = p.cu_seqlens_q[b + 1] - q0;
    } else {
      b = token / len_q;
      q0 = b * len_q;
    }
    const int position = p.seqlens_k[b] - len_q + token - q0, page = position / p.page_size, slot = position - page * p.page_size;
    // What lies in no page is written nowhere.
    if (position < 0 || page >= p.table_row) continue;
    const int id = p.page_table[(long long)b * p.table_row + page];
    if ((uint32_t)id >= (uint32_t)p.num_pages) continue;
    const auto from = [&](int row) {
      const int which = row >= p.heads, head = row - which * p.heads;
      return p.rows[which] + token * p.row_token_stride[which] + head * p.row_head_stride[which];
    };
    uint4 x[Rows::kAhead];
    const auto load = [&](int n, int row) { x[n] = row < mine.rows ? *(const uint4*)(from(row) + piece * 16) : uint4{}; };
    mine.each(load, [&](int n, int row) {
      const bool live = row < mine.rows;
      const int which = row >= p.heads, head = row - which * p.heads;
      if (p.rotary && row < p.heads) x[n] = rotated_k(from(row), piece, position, p.rotary, p.interleaved, p.cos, p.sin);
      char* to = p.pages[which] + id * p.page_stride + slot * p.token_stride + head * p.head_stride + piece * kBits;
      if constexpr (KV == kBf16) {
        if (live) *(uint4*)to = x[n];
      } else {
        const uint32_t w[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
        float numbers[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 pair = unpack_bf16(w[i / 2]);
          numbers[i] = i % 2 ? pair.y : pair.x;
        }
        bool strange;
        const float top = largest<Rows::kLanes>(w, numbers, strange);
        float scale = 1.f;
        float* scale_at = p.scales[which] + id * p.scale_page_stride + slot * p.scale_token_stride + head * p.scale_head_stride;
        if (p.scale_token_stride) {
          // As the host's: no scale below the normal numbers. Integers have no code for NaN: the scale says it.
          scale = top == 0.f ? 1.f : fmaxf(__fdiv_rn(top, kLargest<KV>), 1.17549435e-38f);
          if (KV != kE4m3 && strange) scale = __int_as_float(0x7fc00000);
          if (live && piece == 0) *scale_at = scale;
        } else if (live) {
          scale = *scale_at;
        }
        divide(numbers, top, scale);
        if (live) store_codes<KV, kBits>(to, numbers);
      }
    });
  }
}

#define APPEND(D, KV, NAME) \
  extern "C" __global__ void __launch_bounds__(256) append_##D##_##NAME(const __grid_constant__ AppendParams p) { append<D, KV>(p); }
#define APPEND_TYPES(D) APPEND(D, kBf16, bf16) APPEND(D, kE4m3, e4m3) APPEND(D, kInt8, int8) APPEND(D, kInt4, int4)
APPEND_TYPES(64)
APPEND_TYPES(128)
APPEND_TYPES(256)

}  // namespace suanpan
