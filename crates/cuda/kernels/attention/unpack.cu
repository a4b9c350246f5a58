// Quantised keys and values of a paged cache as bf16 rows one after another, what the 16-bit forward takes: a number times its scale, rounded once.
// Not here: attention; decode reads such pages as they are (decode_cluster.cu).
#include "../common/sequences.cuh"
#include "../common/token_rows.cuh"
#include "decode_tile.cuh"

namespace suanpan {

struct UnpackParams {
  const char* pages[2];        // k, v: [pages, page_size, heads, D] of the type, the same strides for both, bytes
  long long page_stride;
  long long token_stride;
  long long head_stride;
  const float* scales[2];      // the same strides for both, elements
  long long scale_page_stride;
  long long scale_token_stride;
  long long scale_head_stride;
  uint16_t* rows[2];           // [tokens, heads, D] bf16
  const int* cu_seqlens_k;     // [batch + 1]
  const int* starts;           // [batch]: tokens before it stay unwritten
  const int* page_table;       // [batch, table_row]
  int tokens;
  int heads;
  int batch;
  int page_size;
  int table_row;
  int num_pages;
  int parts;                   // of a token's rows, a warp's each
};

// Eight codes side by side, as they lie and as numbers.
template <int KV> struct Eight {
  using Codes = uint2;
  static __device__ __forceinline__ void numbers(const uint2& w, float (&x)[8]) {
    if constexpr (KV == kE4m3) {
      const uint32_t pairs[4] = {e4m3_pair<0>(w.x), e4m3_pair<1>(w.x), e4m3_pair<0>(w.y), e4m3_pair<1>(w.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(*(const __half2*)&pairs[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = (float)(int8_t)((i < 4 ? w.x : w.y) >> 8 * (i % 4));
    }
  }
};
template <> struct Eight<kInt4> {
  using Codes = uint32_t;
  static __device__ __forceinline__ void numbers(uint32_t w, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (float)((int32_t)(w << (28 - 4 * i)) >> 28);
  }
};

template <int D, int KV> __device__ __forceinline__ void unpack(const UnpackParams& p) {
  using Rows = TokenRows<D>;
  using Codes = typename Eight<KV>::Codes;
  const int piece = threadIdx.x % Rows::kLanes, warps = gridDim.x * (blockDim.x / 32);
  for (int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < p.tokens * p.parts; unit += warps) {
    const Rows mine(unit, p.parts, p.heads);
    const int b = sequence_of(p.cu_seqlens_k, p.batch, mine.token), position = mine.token - p.cu_seqlens_k[b];
    if (position < p.starts[b]) continue;
    const int page = position / p.page_size, slot = position - page * p.page_size;
    const int id = p.page_table[(long long)b * p.table_row + page];
    if ((uint32_t)id >= (uint32_t)p.num_pages) continue;
    Codes codes[Rows::kAhead];
    float scale[Rows::kAhead];
    const auto load = [&](int n, int row) {
      if (row >= mine.rows) return;
      const int which = row >= p.heads, head = row - which * p.heads;
      const char* from = p.pages[which] + id * p.page_stride + slot * p.token_stride + head * p.head_stride;
      codes[n] = *((const Codes*)from + piece);
      scale[n] = p.scales[which][id * p.scale_page_stride + slot * p.scale_token_stride + head * p.scale_head_stride];
    };
    mine.each(load, [&](int n, int row) {
      if (row >= mine.rows) return;
      const int which = row >= p.heads, head = row - which * p.heads;
      float x[8];
      Eight<KV>::numbers(codes[n], x);
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_bf16(x[2 * i] * scale[n], x[2 * i + 1] * scale[n]);
      *(uint4*)(p.rows[which] + ((long long)mine.token * p.heads + head) * D + piece * 8) = uint4{w[0], w[1], w[2], w[3]};
    });
  }
}

#define UNPACK(D, KV, NAME) \
  extern "C" __global__ void __launch_bounds__(256) unpack_##D##_##NAME(const __grid_constant__ UnpackParams p) { unpack<D, KV>(p); }
#define UNPACK_TYPES(D) UNPACK(D, kE4m3, e4m3) UNPACK(D, kInt8, int8) UNPACK(D, kInt4, int4)
UNPACK_TYPES(64)
UNPACK_TYPES(128)
UNPACK_TYPES(256)

}  // namespace suanpan
