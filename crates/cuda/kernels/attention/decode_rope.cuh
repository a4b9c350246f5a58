// Rotary position embedding of eight elements of a head, for queries and keys on their way into decode. Not here: where they come from.
#pragma once
#include "../common/mma.cuh"

namespace suanpan {

__device__ __forceinline__ float2 unpack_bf16(uint32_t x) { return float2{__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

// a c - b s and a c + b s, each rounded in one way only.
__device__ __forceinline__ float less(float a, float c, float b, float s) { return __fmaf_rn(a, c, -__fmul_rn(b, s)); }
__device__ __forceinline__ float more(float a, float c, float b, float s) { return __fmaf_rn(a, c, __fmul_rn(b, s)); }

// Elements 8 piece .. 8 piece + 7 of a head at `position`, turned: `x` holds them, `other` the elements rotary / 2 away, which only
// pairs that are not neighbours need. cos, sin: [positions, rotary / 2] f32.
__device__ __forceinline__ uint4 rotated(uint4 x, uint4 other, int piece, int position, int rotary, bool interleaved, const float* cos, const float* sin) {
  if (piece * 8 >= rotary) return x;
  const int half = rotary / 2, at = position * half;
  const bool high = !interleaved && piece * 8 >= half;
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
  const uint32_t y[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack_bf16(w[i]), b = unpack_bf16(y[i]);
    if (interleaved) {
      const float c = cos[at + 4 * piece + i], s = sin[at + 4 * piece + i];
      w[i] = pack_bf16(less(a.x, c, a.y, s), more(a.y, c, a.x, s));
    } else {
      const int pair = at + 8 * piece + 2 * i - (high ? half : 0);
      const float2 c = *(const float2*)(cos + pair), s = *(const float2*)(sin + pair);
      w[i] = high ? pack_bf16(more(a.x, c.x, b.x, s.x), more(a.y, c.y, b.y, s.y)) : pack_bf16(less(a.x, c.x, b.x, s.x), less(a.y, c.y, b.y, s.y));
    }
  }
  return uint4{w[0], w[1], w[2], w[3]};
}

// A q row held by D / 8 lanes side by side; every lane of the warp takes part.
template <int D>
__device__ __forceinline__ uint4 rotated_q(uint4 x, int piece, int position, int rotary, bool interleaved, const float* cos, const float* sin) {
  const int away = interleaved ? 0 : rotary / 16;
  const uint4 other = {__shfl_xor_sync(~0u, x.x, away), __shfl_xor_sync(~0u, x.y, away), __shfl_xor_sync(~0u, x.z, away), __shfl_xor_sync(~0u, x.w, away)};
  return position < 0 ? x : rotated(x, other, piece, position, rotary, interleaved, cos, sin);
}

// A k row in memory.
__device__ __forceinline__ uint4 rotated_k(const char* row, int piece, int position, int rotary, bool interleaved, const float* cos, const float* sin) {
  const int other = piece * 8 < rotary && !interleaved ? piece ^ rotary / 16 : piece;
  return rotated(*(const uint4*)(row + piece * 16), *(const uint4*)(row + other * 16), piece, position, rotary, interleaved, cos, sin);
}

}  // namespace suanpan
