// A warp's products with one tile of K or V that lies in shared memory as 16-bit, e4m3, 8-bit or 4-bit numbers.
// Not here: where tiles come from, the softmax, and scales (which the caller folds into scores and probabilities).
//
// Scores are taken as S^T = K q^T and outputs as O^T = V^T P^T: keys fill the 16 rows of an instruction, and as few as 8 query
// rows its columns. Numbers of fewer bits become bf16 in registers, which holds each exactly. What a lane loads in one piece
// becomes operands by naming the summed index freely: the same permutation of it on both operands changes no product.
#pragma once
#include "../common/mma.cuh"

namespace suanpan {

enum KvType { kBf16 = 0, kE4m3 = 1, kInt8 = 2, kInt4 = 3 };
constexpr int kv_bits(int kv) { return kv == kBf16 ? 16 : kv == kInt4 ? 4 : 8; }

template <int D, int KV> struct KvTile {
  static constexpr int kRow = D * kv_bits(KV) / 8;  // bytes of one key
  static constexpr int kPieces = kRow / 16;         // 16-byte pieces of one key
  static constexpr uint32_t kTurn = KV == kInt8 ? 0x80808080u : 0u;  // turns the signs of two's complement
  // Where piece `piece` of key `row` lies among its row's pieces: spreads a column of pieces over the banks.
  static __device__ __forceinline__ int place(int row) {
    if constexpr (KV == kBf16) return row & 7;
    else if constexpr (kRow >= 128) return ((row >> 1 & 3) << 1) ^ ((row & 1) << 2);
    else if constexpr (kRow == 64) return row >> 1 & 3;
    else return row >> 2 & 1;
  }
  static __device__ __forceinline__ uint32_t at(int row, int piece) { return row * kRow + (piece ^ place(row)) * 16; }
  // Where element (step t, half e) of a lane's output column lies in the head.
  static __device__ __forceinline__ int out_dim(int g, int t, int e) {
    return KV == kBf16 ? 16 * t + g + 8 * e : D / 8 * g + 2 * t + e;
  }
};

// ---- numbers of fewer bits to pairs of fp16, which holds each exactly ------------------------------------------------------
// (x & mask) ^ bits in one instruction; left to itself the compiler takes two.
__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
  return r;
}
__device__ __forceinline__ uint32_t sub_fp16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Bytes 0 and 1 (or 2 and 3) of x.
template <int HALF> __device__ __forceinline__ uint32_t e4m3_pair(uint32_t x) {
  uint32_t h;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((uint16_t)(HALF ? x >> 16 : x)));
  return h;
}
// Bytes 0 and 1 (or 2 and 3) of x, in two's complement with the sign turned (0 to 255), plus 1,024: kByte above the number.
constexpr uint32_t kByte = 0x64806480u;
template <int HALF> __device__ __forceinline__ uint32_t int8_pair(uint32_t x) { return __byte_perm(x, 0x64646464u, HALF ? 0x4342 : 0x4140); }
// Nibbles N and N + 4 of x, in two's complement: their signs turned (0 to 15) and 1,024 added, kNibble above the number; for odd N
// 16 times the turned nibble, so kByte above 16 times the number.
constexpr uint32_t kNibble = 0x64086408u;
template <int N> __device__ __forceinline__ uint32_t int4_pair(uint32_t x) {
  return and_xor(N < 2 ? x : x >> 8, N % 2 ? 0x00f000f0u : 0x000f000fu, N % 2 ? 0x64806480u : 0x64086408u);
}
// The numbers themselves.
template <int N> __device__ __forceinline__ uint32_t int4_exact(uint32_t x) {
  if (N % 2 == 0) return sub_fp16(int4_pair<N>(x), kNibble);
  uint32_t r;  // a sixteenth, less 72
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(int4_pair<N>(x)), "r"(0x2c002c00u), "r"(0xd480d480u));
  return r;
}

// ---- q ---------------------------------------------------------------------------------------------------------------------
// Eight elements of a q row of bf16 (D / 8 lanes side by side hold the row) as the products with quantised K take them: fp16 times
// a power of two that brings the row's largest to 256 .. 1,024; 4-bit numbers in the order 0 4 1 5 2 6 3 7, a sixteenth where K comes
// 16 times. `row`: what undoes the power of two; what the products are too large by, since every other 4-bit number of K keeps its offset (72: an offset of
// 1,032 would cost the scores four of their bits).
template <int D, int KV> __device__ __forceinline__ uint4 q_of_quantised(uint4 x, float2& row) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w}, top = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) top = max(top, max(w[i] & 0x7fffu, w[i] >> 16 & 0x7fffu));
#pragma unroll
  for (int n = D / 16; n > 0; n /= 2) top = max(top, __shfl_xor_sync(~0u, top, n));
  const uint32_t exponent = min(max(top >> 7, 9u), 253u);
  const float up = __uint_as_float((262 - exponent) << 23);
  float above = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = __uint_as_float(w[i] << 16) * up, b = __uint_as_float(w[i] & 0xffff0000u) * up * (KV == kInt4 ? 0.0625f : 1.f);
    w[i] = pack_fp16(a, b);
    const float2 rounded = __half22float2(*(__half2*)&w[i]);
    if (KV == kInt4) above += 1152.f * rounded.y;
  }
#pragma unroll
  for (int n = D / 16; KV == kInt4 && n > 0; n /= 2) above += __shfl_xor_sync(~0u, above, n);
  row = float2{__uint_as_float((exponent - 8) << 23), above};
  if (KV != kInt4) return uint4{w[0], w[1], w[2], w[3]};
  const auto low = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); };
  const auto high = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); };
  return uint4{low(w[0], w[2]), high(w[0], w[2]), low(w[1], w[3]), high(w[1], w[3])};
}

// ---- products --------------------------------------------------------------------------------------------------------------
// s[m][n] += keys 16 m .. 16 m + 15 of the tile at `k` times query rows 8 n .. 8 n + 7 of `q`, [8 NT][q_pitch bytes] bf16;
// q as bf16, or as q_of_quantised gives it.
template <int D, int KV, int MT, int NT>
__device__ __forceinline__ void scores(float (&s)[MT][NT][4], uint32_t k, uint32_t q, int q_pitch, int lane) {
  using T = KvTile<D, KV>;
  const int g = lane / 4, c = lane % 4;
  if constexpr (KV == kBf16) {
    const int row = lane & 15;
    const uint32_t row_at = k + row * T::kRow, q_at = q + (lane & 7) * q_pitch + (lane >> 3) * 16;
    // Operands of several steps first, then their products: two chains of sums a tile of rows.
    constexpr int kSteps = NT == 1 ? 8 : 4, kGroup = kSteps < D / 16 ? kSteps : D / 16;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float odd[NT][4] = {};
#pragma unroll
      for (int k0 = 0; k0 < D / 16; k0 += kGroup) {
        uint32_t a[kGroup][4], b[kGroup / 2][NT][4];
#pragma unroll
        for (int ks = 0; ks < kGroup; ++ks) {
          load_matrices(a[ks], row_at + m * 16 * T::kRow + (((2 * (k0 + ks) + (lane >> 4)) ^ (row & 7)) * 16));
          if (ks % 2 == 0) {
#pragma unroll
            for (int n = 0; n < NT; ++n) load_matrices(b[ks / 2][n], q_at + n * 8 * q_pitch + (k0 + ks) * 32);
          }
        }
#pragma unroll
        for (int ks = 0; ks < kGroup; ++ks) {
#pragma unroll
          for (int n = 0; n < NT; ++n)
            mma_bf16(ks % 2 ? odd[n] : s[m][n], a[ks], b[ks / 2][n][ks % 2 * 2], b[ks / 2][n][ks % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] += odd[n][i];
    }
  } else {
    // A lane's words of one key: KEY_WORDS times 4 (8-bit) or 8 (4-bit) elements, side by side in each 16-byte piece.
    constexpr int kWords = T::kRow / 16, kVec = kWords < 4 ? kWords : 4;
    constexpr int kElements = KV == kInt4 ? 8 : 4;  // of a word
#pragma unroll
    for (int j = 0; j < kWords / kVec; ++j) {
      // Elements (4 j + c) * kVec * kElements onward: kVec words.
      uint32_t b[NT][kVec * kElements / 2];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < kVec * kElements / 8; ++i) {
          const uint4 x = load_shared_16(q + (8 * n + g) * q_pitch + ((4 * j + c) * kVec * kElements + 8 * i) * 2);
          b[n][4 * i] = x.x;
          b[n][4 * i + 1] = x.y;
          b[n][4 * i + 2] = x.z;
          b[n][4 * i + 3] = x.w;
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t w[2][kVec];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 16 * m + g + 8 * e;
          if constexpr (kVec == 4) {
            const uint4 x = load_shared_16(k + T::at(row, 4 * j + c));
            w[e][0] = x.x ^ T::kTurn;
            w[e][1] = x.y ^ T::kTurn;
            w[e][2] = x.z ^ T::kTurn;
            w[e][3] = x.w ^ T::kTurn;
          } else {
            const uint2 x = load_shared_8(k + T::at(row, c / 2) + c % 2 * 8);
            w[e][0] = x.x ^ T::kTurn;
            w[e][1] = x.y ^ T::kTurn;
          }
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if constexpr (KV == kInt4) {
            const uint32_t a0[4] = {int4_exact<0>(w[0][i]), int4_exact<0>(w[1][i]), int4_pair<1>(w[0][i]), int4_pair<1>(w[1][i])};
            const uint32_t a1[4] = {int4_exact<2>(w[0][i]), int4_exact<2>(w[1][i]), int4_pair<3>(w[0][i]), int4_pair<3>(w[1][i])};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              mma_fp16(s[m][n], a0, b[n][4 * i], b[n][4 * i + 1]);
              mma_fp16(s[m][n], a1, b[n][4 * i + 2], b[n][4 * i + 3]);
            }
          } else {
            uint32_t a[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              a[e] = KV == kE4m3 ? e4m3_pair<0>(w[e][i]) : sub_fp16(int8_pair<0>(w[e][i]), kByte);
              a[2 + e] = KV == kE4m3 ? e4m3_pair<1>(w[e][i]) : sub_fp16(int8_pair<1>(w[e][i]), kByte);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) mma_fp16(s[m][n], a, b[n][2 * i], b[n][2 * i + 1]);
          }
        }
      }
    }
  }
}

// o[t][n] += V^T of the tile at `v` times the weights `p`, bf16, or fp16 of quantised numbers: p[m][n][e] holds keys 16 m + 8 e + 2 c, + 1 of query row 8 n + g.
template <int D, int KV, int MT, int NT>
__device__ __forceinline__ void mix(float (&o)[D / 16][NT][4], uint32_t v, const uint32_t (&p)[MT][NT][2], int lane) {
  using T = KvTile<D, KV>;
  const int g = lane / 4, c = lane % 4;
  if constexpr (KV == kBf16) {
    const int row = (lane & 7) + (lane >> 4) * 8;
    const uint32_t row_at = v + row * T::kRow;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int t = 0; t < D / 16; ++t) {
        uint32_t a[4];
        load_matrices_transposed(a, row_at + m * 16 * T::kRow + (((2 * t + (lane >> 3 & 1)) ^ (row & 7)) * 16));
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_bf16(o[t][n], a, p[m][n][0], p[m][n][1]);
      }
    }
  } else {
    constexpr int kBytes = T::kRow / 8;  // of one key that a lane takes
    constexpr int kVec = kBytes < 16 ? kBytes / 4 : 4;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int j = 0; j < kBytes / (4 * kVec); ++j) {
        uint32_t w[4][kVec];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = 16 * m + 2 * c + (r & 1) + (r >> 1) * 8, byte = kBytes * g + 16 * j;
          const uint32_t at = v + T::at(row, byte / 16) + byte % 16;
          if constexpr (kVec == 4) {
            const uint4 x = load_shared_16(at);
            w[r][0] = x.x;
            w[r][1] = x.y;
            w[r][2] = x.z;
            w[r][3] = x.w;
          } else if constexpr (kVec == 2) {
            const uint2 x = load_shared_8(at);
            w[r][0] = x.x;
            w[r][1] = x.y;
          } else {
            w[r][0] = load_shared_4(at);
          }
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const int word = kVec * j + i;  // of this lane's D / 8 elements
          if constexpr (KV == kInt4) {
            // The low halves of two keys' words: nibble N beside nibble N.
            const uint32_t x[2] = {__byte_perm(w[0][i], w[1][i], 0x5410), __byte_perm(w[2][i], w[3][i], 0x5410)};
            const uint32_t y[2] = {__byte_perm(w[0][i], w[1][i], 0x7632), __byte_perm(w[2][i], w[3][i], 0x7632)};
            const uint32_t a0[4] = {int4_exact<0>(x[0]), int4_exact<1>(x[0]), int4_exact<0>(x[1]), int4_exact<1>(x[1])};
            const uint32_t a1[4] = {int4_exact<2>(x[0]), int4_exact<3>(x[0]), int4_exact<2>(x[1]), int4_exact<3>(x[1])};
            const uint32_t a2[4] = {int4_exact<0>(y[0]), int4_exact<1>(y[0]), int4_exact<0>(y[1]), int4_exact<1>(y[1])};
            const uint32_t a3[4] = {int4_exact<2>(y[0]), int4_exact<3>(y[0]), int4_exact<2>(y[1]), int4_exact<3>(y[1])};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              mma_fp16(o[4 * word][n], a0, p[m][n][0], p[m][n][1]);
              mma_fp16(o[4 * word + 1][n], a1, p[m][n][0], p[m][n][1]);
              mma_fp16(o[4 * word + 2][n], a2, p[m][n][0], p[m][n][1]);
              mma_fp16(o[4 * word + 3][n], a3, p[m][n][0], p[m][n][1]);
            }
          } else {
            uint32_t a0[4], a1[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const uint32_t lo = w[2 * e][i] ^ T::kTurn, hi = w[2 * e + 1][i] ^ T::kTurn;  // two keys
              const uint32_t x = __byte_perm(lo, hi, 0x5140), y = __byte_perm(lo, hi, 0x7362);
              if constexpr (KV == kE4m3) {
                a0[2 * e] = e4m3_pair<0>(x);
                a0[2 * e + 1] = e4m3_pair<1>(x);
                a1[2 * e] = e4m3_pair<0>(y);
                a1[2 * e + 1] = e4m3_pair<1>(y);
              } else {
                a0[2 * e] = sub_fp16(int8_pair<0>(x), kByte);
                a0[2 * e + 1] = sub_fp16(int8_pair<1>(x), kByte);
                a1[2 * e] = sub_fp16(int8_pair<0>(y), kByte);
                a1[2 * e + 1] = sub_fp16(int8_pair<1>(y), kByte);
              }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              mma_fp16(o[2 * word][n], a0, p[m][n][0], p[m][n][1]);
              mma_fp16(o[2 * word + 1][n], a1, p[m][n][0], p[m][n][1]);
            }
          }
        }
      }
    }
  }
}

}  // namespace suanpan
