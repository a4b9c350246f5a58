// Quantised keys and values of a paged cache as bf16 rows one after another, what the 16-bit forward takes: a number times its scale, rounded once.
// Not here: attention; decode reads such pages as they are (decode_cluster.cu).
#include "../common/sequences.cuh"
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
};

// Element i of the eight codes that start at `from`.
template <int KV> struct Eight;
template <> struct Eight<kE4m3> {
  float x[8];
  __device__ __forceinline__ explicit Eight(const char* from) {
    const uint2 w = *(const uint2*)from;
    const uint32_t pairs[4] = {e4m3_pair<0>(w.x), e4m3_pair<1>(w.x), e4m3_pair<0>(w.y), e4m3_pair<1>(w.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(*(const __half2*)&pairs[i]);
      x[2 * i] = f.x;
      x[2 * i + 1] = f.y;
    }
  }
};
template <> struct Eight<kInt8> {
  float x[8];
  __device__ __forceinline__ explicit Eight(const char* from) {
    const uint64_t w = *(const uint64_t*)from;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (float)(int8_t)(w >> (8 * i));
  }
};
template <> struct Eight<kInt4> {
  float x[8];
  __device__ __forceinline__ explicit Eight(const char* from) {
    const uint32_t w = *(const uint32_t*)from;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (float)((int32_t)(w << (28 - 4 * i)) >> 28);
  }
};

// D / 8 lanes a row of k or v; the rows of one token are neighbours.
template <int D, int KV> __device__ __forceinline__ void unpack(const UnpackParams& p) {
  constexpr int kLanes = D / 8, kBits = KvTile<D, KV>::kRow / kLanes;
  const long long pieces = 2LL * p.tokens * p.heads * kLanes, step = (long long)gridDim.x * blockDim.x;
  for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < pieces; at += step) {
    const int piece = (int)(at % kLanes);
    const long long row = at / kLanes;
    const int token = (int)(row / (2 * p.heads)), rest = (int)(row % (2 * p.heads)), which = rest / p.heads, head = rest % p.heads;
    const int b = sequence_of(p.cu_seqlens_k, p.batch, token), position = token - p.cu_seqlens_k[b];
    if (position < p.starts[b]) continue;
    const int id = p.page_table[(long long)b * p.table_row + position / p.page_size], slot = position % p.page_size;
    if ((uint32_t)id >= (uint32_t)p.num_pages) continue;
    const Eight<KV> codes(p.pages[which] + id * p.page_stride + slot * p.token_stride + head * p.head_stride + piece * kBits);
    const float scale = p.scales[which][id * p.scale_page_stride + slot * p.scale_token_stride + head * p.scale_head_stride];
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = pack_bf16(codes.x[2 * i] * scale, codes.x[2 * i + 1] * scale);
    *(uint4*)(p.rows[which] + ((long long)token * p.heads + head) * D + piece * 8) = uint4{w[0], w[1], w[2], w[3]};
  }
}

#define UNPACK(D, KV, NAME) \
  extern "C" __global__ void __launch_bounds__(256) unpack_##D##_##NAME(const __grid_constant__ UnpackParams p) { unpack<D, KV>(p); }
#define UNPACK_TYPES(D) UNPACK(D, kE4m3, e4m3) UNPACK(D, kInt8, int8) UNPACK(D, kInt4, int4)
UNPACK_TYPES(64)
UNPACK_TYPES(128)
UNPACK_TYPES(256)

}  // namespace suanpan
