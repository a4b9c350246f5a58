// The arithmetic of one math warpgroup: scores, masks, online softmax, P v. Registers of one thread and nothing else.
// Not here: barriers, copies, the order of steps (forward.cu).
#pragma once
#include "forward_tile.cuh"

#ifndef PV_GROUPS
#define PV_GROUPS 4
#endif

namespace suanpan {

template <class T> __device__ __forceinline__ uint32_t pack16(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack16<Bf16>(float lo, float hi) { return pack_bf16(lo, hi); }
template <> __device__ __forceinline__ uint32_t pack16<Fp16>(float lo, float hi) { return pack_fp16(lo, hi); }

// A row keeps its reference maximum until the true one exceeds it by 2^8: P then reaches 256 at most, which f32 sums and
// 16-bit P hold as precisely as 1, and o is hardly ever rescaled. Decided row by row: no row depends on its neighbours.
constexpr float kRescaleLog2 = 8.0f;

constexpr float kLog2E = 1.44269504f;

// Philox 4x32-10 (Salmon et al., SC 2011): suanpan_attn::dropout draws the same numbers.
__device__ __forceinline__ void philox(uint32_t (&n)[4], uint32_t low, uint32_t high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t a = __umulhi(0xD2511F53u, n[0]), b = 0xD2511F53u * n[0], c = __umulhi(0xCD9E8D57u, n[2]), d = 0xCD9E8D57u * n[2];
    n[0] = c ^ n[1] ^ low;
    n[1] = d;
    n[2] = a ^ n[3] ^ high;
    n[3] = b;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// Word b of thread c of four neighbours goes to word c of thread b.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; ++step)
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      if (a & step) continue;
      const int b = a + step;
      const bool odd = lane & step;
      const uint32_t got = __shfl_xor_sync(~0u, odd ? w[a] : w[b], step);
      w[a] = odd ? got : w[a];
      w[b] = odd ? w[b] : got;
    }
}

template <int D, int DV, class T> struct Math {
  using L = Layout<D, DV>;
  static constexpr int BM = L::kNumWg * 64, BN = L::kBn;
  static constexpr int kSteps = BN / 16;   // k-steps of P v
  static constexpr int kGroups = (kSteps % PV_GROUPS == 0) ? PV_GROUPS : 1;
  float o[DV / 2];
  float s[BN / 2];
  uint32_t pk[BN / 4];                     // P, packed as the A operand of P v
  float row_max[2], row_sum[2], corr[2];
  float part[2][2];                        // this tile's sums

  __device__ __forceinline__ void reset() {
    part[0][0] = part[0][1] = part[1][0] = part[1][1] = 0.f;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) o[i] = 0.f;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }
  // W: the columns of the tile that are worked on; half a tile is enough for half of the diagonals.
  template <int W = BN> __device__ __forceinline__ void scores(uint32_t q, uint32_t k) {
    const uint32_t qd = desc_low(q, 0), kd = desc_low(k, 0);
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks) {
      Wgmma<W, T>::ss(reinterpret_cast<float (&)[W / 2]>(s), desc(qd + ((ks / 4) * L::kQChunk + (ks % 4) * 32) / 16),
                       desc(kd + ((ks / 4) * L::kKvChunk + (ks % 4) * 32) / 16), ks > 0);
      if (Chosen::kToken == 2 && ks == D / 32 - 1) wgmma_commit();
    }
    wgmma_commit();
  }
  template <int W = BN> __device__ __forceinline__ void mask(const int (&limit)[2]) {  // limit: visible columns of this tile, less 2 * (lane % 4)
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
      const int col = (i / 4) * 8 + (i & 1);
      if (col >= limit[(i >> 1) & 1]) s[i] = -INFINITY;
    }
  }
  // Keeps columns lo..hi of the tile (less 2 * (lane % 4)) of each of the thread's two rows.
  __device__ __forceinline__ void mask_between(const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const int col = (i / 4) * 8 + (i & 1), h = (i >> 1) & 1;
      if (col < lo[h] || col >= hi[h]) s[i] = -INFINITY;
    }
  }
  // Keeps column c of block `block` (32 columns) where bit c of the row's word is set, the word shifted by 2 * (lane % 4).
  __device__ __forceinline__ void mask_bits(int block, int h, uint32_t word) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const int col = (i / 4) * 8 + (i & 1);
      if (col / 32 == block && ((i >> 1) & 1) == h && !(word >> (col % 32) & 1)) s[i] = -INFINITY;
    }
  }
  // Dot products -> scores in powers of two: cap * tanh(scale * s / cap), less slope * distance from the row's own key.
  // 1 - 2 / (1 + e^2x) instead of the tanh instruction, whose error of 2^-11 would be a percent of P at cap 50.
  __device__ __forceinline__ void softcap(float inner, float cap_log2) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i)
      s[i] = fmaf(-2.f * cap_log2, reciprocal_fast(1.f + exp2_fast(s[i] * inner)), cap_log2);
  }
  __device__ __forceinline__ void times(float x) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) s[i] *= x;
  }
  __device__ __forceinline__ void alibi(float slope_log2, const int (&own)[2]) {  // own: the row's own column of this tile, less 2 * (lane % 4)
    const float at[2] = {(float)own[0], (float)own[1]};
#pragma unroll
    for (int i = 0; i < BN / 2; ++i)
      s[i] = fmaf(-slope_log2, fabsf(at[(i >> 1) & 1] - (float)((i / 4) * 8 + (i & 1))), s[i]);
  }
  // rows: of this thread's two rows, at its first column of the tile; keys: of the sequence from there on. What lies past them is masked.
  __device__ __forceinline__ void bias(const float* const (&rows)[2], int key_stride, int keys) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const int column = (i / 4) * 8 + (i & 1);
      if (column < keys) s[i] = fmaf(rows[(i >> 1) & 1][column * key_stride], kLog2E, s[i]);
    }
  }
  // Drops weights [from, to) of this thread, or multiplies them by `kept`. `group`: of this thread's first column. Neighbouring lanes share
  // a group: the even one makes the numbers of the first row, the odd one those of the second, and they swap halves.
  __device__ __forceinline__ void drop(int from, int to, uint32_t group, const uint32_t (&row)[2], uint32_t head, uint32_t seq,
                                       uint32_t seed_low, uint32_t seed_high, uint32_t below, float kept, int lane) {
    const bool odd = lane & 1;
#pragma unroll
    for (int i = from; i < to; i += 4) {
      uint32_t n[4] = {group + (i / 4) * 2, odd ? row[1] : row[0], head, seq};
      philox(n, seed_low, seed_high);
      const uint32_t first = __shfl_xor_sync(~0u, odd ? n[0] : n[2], 1), second = __shfl_xor_sync(~0u, odd ? n[1] : n[3], 1);
      const uint32_t number[4] = {odd ? first : n[0], odd ? second : n[1], odd ? n[2] : first, odd ? n[3] : second};
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i + e] = number[e] < below ? 0.f : s[i + e] * kept;
    }
  }
  // New reference maxima. True when some row of the warp moved: o must then be multiplied by `corr`.
  template <int W = BN> __device__ __forceinline__ bool new_max(float scale_log2) {
    float mx[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int i = 4; i < W / 2; ++i) mx[(i >> 1) & 1][i & 1] = fmaxf(mx[(i >> 1) & 1][i & 1], s[i]);
    bool moved = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(mx[h][0], mx[h][1]);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      const bool up = (m - row_max[h]) * scale_log2 > kRescaleLog2;
      corr[h] = up ? exp2_fast((row_max[h] - m) * scale_log2) : 1.f;
      row_max[h] = up ? m : row_max[h];
      moved |= up;
    }
    return __any_sync(~0u, moved);
  }
  __device__ __forceinline__ void rescale_sum() {
    row_sum[0] *= corr[0];
    row_sum[1] *= corr[1];
  }
  __device__ __forceinline__ void rescale_o() {
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) o[i] *= corr[(i >> 1) & 1];
  }
  // Exponentials of scores [from, to) of this thread, in place; sums grow. All on the exponential unit: a share of them by
  // polynomial on the multiply-add pipe was slower even at head dim 64, where issue slots are as scarce.
  __device__ __forceinline__ void exponentials(int from, int to, const float (&off)[2], float scale_log2) {
#pragma unroll
    for (int i = from; i < to; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale_log2, -off[(i >> 1) & 1]));
      part[(i >> 1) & 1][i & 1] += s[i];
    }
  }
  __device__ __forceinline__ void pack(int from, int to) {
#pragma unroll
    for (int i = from; i < to; i += 2) pk[i / 2] = pack16<T>(s[i], s[i + 1]);
  }
  __device__ __forceinline__ void offsets(float (&off)[2], float scale_log2) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) off[h] = row_max[h] == -INFINITY ? 0.f : row_max[h] * scale_log2;
  }
  __device__ __forceinline__ void close_sum() {
    row_sum[0] += part[0][0] + part[0][1];
    row_sum[1] += part[1][0] + part[1][1];
    part[0][0] = part[0][1] = part[1][0] = part[1][1] = 0.f;
  }
  __device__ __forceinline__ void products(uint32_t v, int from, int to) {
    const uint32_t vd = desc_low(v, L::kKvChunk);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int ks = from; ks < to; ++ks) Wgmma<DV, T>::rs(o, pk + 4 * ks, desc(vd + ks * (2048 / 16)), 1);
    wgmma_commit();
  }
};

}  // namespace suanpan
