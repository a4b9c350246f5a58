// Rows of bf16 to e4m3 or 8-bit integers, rotated first where asked: what the e4m3 forward takes. Queries with one scale a row, in one pass, so
// that a row's bits know nothing of its neighbours; contiguous keys with one a (sequence, kv head). Not here: a cache's pages (append.cu).
//
// The rotation is the Hadamard matrix of the row's width over its root: orthogonal, so that q and k turned by it keep their products,
// while a lone large element is spread over the row and no longer sets the scale of all others.
#include <cuda_bf16.h>
#include <cstdint>
#include "../common/sequences.cuh"

namespace suanpan {

struct QuantiseParams {
  const uint16_t* x;       // [tokens, heads, head_dim] bf16, strides in elements
  uint8_t* codes;          // [tokens, heads, head_dim], contiguous
  float* scales;           // what codes are multiplied by: of rows [heads, tokens]; else [batch, heads / group_size], zero before `largest`,
                           // which leaves the largest size there
  const int* cu_seqlens;   // [batch + 1]
  long long token_stride;
  long long head_stride;
  int tokens;
  int heads;
  int group_size;
  int batch;
  int rotate;
  int int8;                // codes are integers to 127, else e4m3 to 448
};

// This lane's elements of a row: 32 i + lane, i < D / 32.
template <int D> struct Row {
  static constexpr int kEach = D / 32;
  float x[kEach];
  __device__ __forceinline__ void load(const uint16_t* from, int lane, bool rotate) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = __uint_as_float((uint32_t)from[32 * i + lane] << 16);
    if (!rotate) return;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], step);
        x[i] = lane & step ? other - x[i] : x[i] + other;
      }
#pragma unroll
    for (int step = 1; step < kEach; step <<= 1)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (!(i & step)) {
          const float a = x[i], b = x[i + step];
          x[i] = a + b;
          x[i + step] = a - b;
        }
    const float root = rsqrtf((float)D);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] *= root;
  }
};

// The number of the scale of `token` and `head`.
__device__ __forceinline__ int scale_of(const QuantiseParams& p, int token, int head) {
  return sequence_of(p.cu_seqlens, p.batch, token) * (p.heads / p.group_size) + head / p.group_size;
}

// What a launch makes: sizes of the largest, codes by them, or both a row.
enum Makes { kLargest, kCodes, kRows };

template <int D, Makes MAKES> __device__ __forceinline__ void quantise(const QuantiseParams& p) {
  const int lane = threadIdx.x % 32;
  const long long rows = (long long)p.tokens * p.heads;
  for (long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += (long long)gridDim.x * (blockDim.x / 32)) {
    const int token = (int)(row / p.heads), head = (int)(row % p.heads);
    Row<D> r;
    r.load(p.x + token * p.token_stride + head * p.head_stride, lane, p.rotate);
    float largest = 0.f;
    if (MAKES != kCodes) {
#pragma unroll
      for (int i = 0; i < Row<D>::kEach; ++i) largest = fmaxf(largest, fabsf(r.x[i]));
#pragma unroll
      for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float top = p.int8 ? 127.f : 448.f;
    if (MAKES == kRows) {
      if (lane == 0) p.scales[(long long)head * p.tokens + token] = largest / top;
    } else {
      float* scale = p.scales + scale_of(p, token, head);
      if (MAKES == kCodes) largest = *scale;
      else if (lane == 0) atomicMax((int*)scale, __float_as_int(largest));  // sizes are not negative: their bits are in their order
    }
    if (MAKES != kLargest) {
      const float inverse = largest > 1e-35f ? top / largest : 0.f;  // below, the quotient may be infinite, and 0 times that is NaN
#pragma unroll
      for (int i = 0; i < Row<D>::kEach; ++i) {
        uint16_t code;
        if (p.int8) code = (uint8_t)min(max(__float2int_rn(r.x[i] * inverse), -127), 127);
        else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.f), "f"(r.x[i] * inverse));
        p.codes[row * D + 32 * i + lane] = (uint8_t)code;
      }
    }
  }
}

#define QUANTISE(D)                                                                                                          \
  extern "C" __global__ void largest_##D(const __grid_constant__ QuantiseParams p) { quantise<D, kLargest>(p); }            \
  extern "C" __global__ void codes_##D(const __grid_constant__ QuantiseParams p) { quantise<D, kCodes>(p); }                \
  extern "C" __global__ void rows_##D(const __grid_constant__ QuantiseParams p) { quantise<D, kRows>(p); }
QUANTISE(64)
QUANTISE(128)
QUANTISE(256)

// Largest sizes to scales.
extern "C" __global__ void scales_of_largest(float* scales, int n, float top) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) scales[i] /= top;
}

}  // namespace suanpan
