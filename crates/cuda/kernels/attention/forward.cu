// Exact attention forward for Hopper (sm_90a): 16-bit q, k, v, f32 accumulation, o and natural-log lse out.
// Not here: paging, split KV, FP8, backward. Built once per (HEAD_DIM, DTYPE); each cubin holds a full and a causal kernel.
//
// One persistent CUDA block per multiprocessor. The producer warpgroup has four working warps: K, V, one that loads q and
// stores o, and one that draws tiles from a counter. Each math warpgroup owns 64 query rows and runs S = q k^T,
// softmax, o += P v. Left alone, the warpgroups fall into step: all in products, then all in softmax with the matrix
// units idle. A token (named barriers) makes them issue q k^T one after another, so that one's softmax runs under the
// products of the others.
#include <type_traits>

#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef DTYPE
#define DTYPE Bf16
#endif

namespace suanpan {

struct ForwardParams {
  float* lse;            // [num_q_heads, total_q], natural logarithm
  void* o;               // [total_q, num_q_heads, head_dim] with the two strides below, in elements
  const int* cu_q;       // [batch + 1] exclusive prefix sums, or null: every sequence has seqlen_q_max tokens
  const int* cu_k;       // the same for keys
  int* counter;          // {tiles drawn, blocks done}: zero before the first launch, left zero by every launch
  long long o_token_stride;
  long long o_head_stride;
  int total_q;
  int batch;
  int num_kv_heads;
  int group_size;
  int seqlen_q_max;
  int seqlen_k_max;
  int units_per_section; // (sequence, kv head) pairs whose K and V stay in L2 together
  float scale;
  float scale_log2;      // scale * log2(e)
};

// Found by search on one H200 (NOTES.md). Three math warpgroups leave 160 registers a thread, two leave 232. With overlap a
// warpgroup computes the next tile's scores beside this tile's P v, at the price of S and P living at once.
// kToken: where in its step a warpgroup passes the token: 1 when q k^T is issued, 2 at its half, 3 when it is done, 4 after
// the maxima, 5 amid the exponentials; 0 is no token.
template <int D> struct Shape;
template <> struct Shape<64>  { static constexpr int kNumWg = 3, kBn = 128, kStages = 4, kQBufs = 2, kToken = 1; static constexpr bool kOverlap = true; };
template <> struct Shape<96>  { static constexpr int kNumWg = 3, kBn = 128, kStages = 2, kQBufs = 2, kToken = 2; static constexpr bool kOverlap = false; };
template <> struct Shape<128> { static constexpr int kNumWg = 3, kBn = 128, kStages = 2, kQBufs = 2, kToken = 2; static constexpr bool kOverlap = false; };
template <> struct Shape<192> { static constexpr int kNumWg = 2, kBn = 96, kStages = 2, kQBufs = 1, kToken = 4; static constexpr bool kOverlap = true; };
template <> struct Shape<256> { static constexpr int kNumWg = 2, kBn = 64, kStages = 2, kQBufs = 1, kToken = 1; static constexpr bool kOverlap = true; };
#ifdef VARIANT  // V_*: for the search only
struct Chosen { static constexpr int kNumWg = V_WG, kBn = V_BN, kStages = V_STAGES, kQBufs = V_QBUFS, kToken = TOKEN; static constexpr bool kOverlap = V_OVERLAP; };
#else
using Chosen = Shape<HEAD_DIM>;
#endif
#ifndef PV_GROUPS
#define PV_GROUPS 4
#endif

template <int D> struct Layout {
  static constexpr int kNumWg = Chosen::kNumWg, kBn = Chosen::kBn, kStages = Chosen::kStages, kQBufs = Chosen::kQBufs;
  static constexpr int kChunks = (D + 63) / 64;        // 64-column chunks of 128 bytes; columns past D arrive as zeros
  static constexpr int kQChunk = 64 * 128;             // bytes of one chunk of one warpgroup's rows
  static constexpr int kQWg = kChunks * kQChunk;
  static constexpr int kQBuf = kNumWg * kQWg;
  static constexpr int kKvChunk = kBn * 128;
  static constexpr int kKvTile = kChunks * kKvChunk;
  static constexpr int kK = kQBufs * kQBuf;
  static constexpr int kV = kK + kStages * kKvTile;
  static constexpr int kBars = kV + kStages * kKvTile;
  static constexpr int kNumBars = 4 * kStages + 2 * kQBufs * kNumWg + 5;
  static constexpr int kSlots = (kBars + kNumBars * 8 + 15) / 16 * 16;  // two tiles in flight
  static constexpr int kBytes = kSlots + 64 + 1024;           // 1,024: the base is aligned by hand
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
};

struct alignas(16) Tile {
  int row0;  // first query row, within the sequence; negative where the first warpgroups have no rows
  int head;  // -1: no more tiles
  int kv_head, q0, k0, len_q, len_k, unused;
};

// Tile number -> tile; false when the sequence has no such tile. Order: sections whose K and V fit in L2 together. Causal
// goes longest first inside a section, and keeps the shortest quarter of all sections for the end (a sixteenth of the
// work), where it fills the gaps that the last long tiles leave.
template <int BM, bool CAUSAL> __device__ __forceinline__ bool tile_at(const ForwardParams& p, int i, Tile& t) {
  const int num_m = (p.seqlen_q_max + BM - 1) / BM;
  const int all_units = p.batch * p.num_kv_heads;
  const int short_m = CAUSAL ? num_m / 4 : 0;
  int top = num_m, first = 0, units = all_units;
  if (i < all_units * p.group_size * (num_m - short_m)) {
    const int per_unit = (num_m - short_m) * p.group_size;
    first = i / (per_unit * p.units_per_section) * p.units_per_section;
    units = min(p.units_per_section, all_units - first);
    i -= first * per_unit;
  } else {
    top = short_m;
    i -= all_units * p.group_size * (num_m - short_m);
  }
  const int heads = units * p.group_size;
  const int rank = i / heads;
  const int h = i - rank * heads;
  const int m = CAUSAL ? top - 1 - rank : rank;
  const int unit = first + h / p.group_size;
  const int b = unit / p.num_kv_heads;
  t.kv_head = unit - b * p.num_kv_heads;
  t.head = t.kv_head * p.group_size + h % p.group_size;
  if (p.cu_q) { t.q0 = p.cu_q[b]; t.len_q = p.cu_q[b + 1] - t.q0; }
  else { t.q0 = b * p.seqlen_q_max; t.len_q = p.seqlen_q_max; }
  if (p.cu_k) { t.k0 = p.cu_k[b]; t.len_k = p.cu_k[b + 1] - t.k0; }
  else { t.k0 = b * p.seqlen_k_max; t.len_k = p.seqlen_k_max; }
  const int mine = (t.len_q + BM - 1) / BM;
  // The tile that is not full is the first one: when causal it is also the shortest.
  t.row0 = m * BM - (CAUSAL ? (mine * BM - t.len_q) / 64 * 64 : 0);
  return m < mine;
}

// Keys visible to row `row` of a sequence (bottom-right aligned when causal).
template <bool CAUSAL> __device__ __forceinline__ int visible(const Tile& t, int row) {
  return CAUSAL ? max(0, min(t.len_k, t.len_k - t.len_q + row + 1)) : t.len_k;
}
template <int BM, int BN, bool CAUSAL> __device__ __forceinline__ int num_kv_tiles(const Tile& t) {
  const int last = min(t.len_q, t.row0 + BM) - 1;
  return (visible<CAUSAL>(t, last) + BN - 1) / BN;
}

template <int STAGES> struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

template <class T> __device__ __forceinline__ uint32_t pack16(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack16<Bf16>(float lo, float hi) { return pack_bf16(lo, hi); }
template <> __device__ __forceinline__ uint32_t pack16<Fp16>(float lo, float hi) { return pack_fp16(lo, hi); }

// A row keeps its reference maximum until the true one exceeds it by 2^8: P then reaches 256 at most, which f32 sums and
// 16-bit P hold as precisely as 1, and o is hardly ever rescaled. Decided row by row: no row depends on its neighbours.
constexpr float kRescaleLog2 = 8.0f;

template <int D, class T, bool CAUSAL> struct Math {
  using L = Layout<D>;
  static constexpr int BM = L::kNumWg * 64, BN = L::kBn;
  static constexpr int kSteps = BN / 16;   // k-steps of P v
  static constexpr int kGroups = (kSteps % PV_GROUPS == 0) ? PV_GROUPS : 1;
  float o[D / 2];
  float s[BN / 2];
  uint32_t pk[BN / 4];                     // P, packed as the A operand of P v
  float row_max[2], row_sum[2], corr[2];
  float part[2][2];                        // this tile's sums

  __device__ __forceinline__ void reset() {
    part[0][0] = part[0][1] = part[1][0] = part[1][1] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
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
    for (int i = 0; i < D / 2; ++i) o[i] *= corr[(i >> 1) & 1];
  }
  // Exponentials of scores [from, to) of this thread, in place; sums grow. All on the exponential unit: a share of them by
  // polynomial on the multiply-add pipe was slower even at head dim 64, where issue slots are as scarce (NOTES.md).
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
    for (int ks = from; ks < to; ++ks) Wgmma<D, T>::rs(o, pk + 4 * ks, desc(vd + ks * (2048 / 16)), 1);
    wgmma_commit();
  }
};

template <int D, class T, bool CAUSAL>
__device__ __forceinline__ void forward_body(const CUtensorMap* q_map, const CUtensorMap* k_map, const CUtensorMap* v_map,
                                             const CUtensorMap* o_map, const ForwardParams& p) {
  using L = Layout<D>;
  constexpr int BM = L::kNumWg * 64, BN = L::kBn;
  constexpr int kToken = Chosen::kToken;
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u;
  const uint32_t bars = base + L::kBars;
  const auto k_full = [&](int s) { return bars + 8 * s; };
  const auto k_empty = [&](int s) { return bars + 8 * (L::kStages + s); };
  const auto v_full = [&](int s) { return bars + 8 * (2 * L::kStages + s); };
  const auto v_empty = [&](int s) { return bars + 8 * (3 * L::kStages + s); };
  const auto q_full = [&](int b, int w) { return bars + 8 * (4 * L::kStages + b * L::kNumWg + w); };
  const auto o_ready = [&](int b, int w) { return bars + 8 * (4 * L::kStages + (L::kQBufs + b) * L::kNumWg + w); };
  const auto slot_full = [&](int b) { return bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + b); };
  const auto slot_empty = [&](int b) { return bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + 2 + b); };
  const uint32_t draw = bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + 4);
  Tile* slots = (Tile*)(smem_raw + (base - smem_addr(smem_raw)) + L::kSlots);
  static_assert(sizeof(Tile) == 32, "two 16-byte words");

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      mbar_init(k_full(s), 1);
      mbar_init(v_full(s), 1);
      mbar_init(k_empty(s), 4 * L::kNumWg);
      mbar_init(v_empty(s), 4 * L::kNumWg);
    }
    for (int b = 0; b < L::kQBufs; ++b)
      for (int w = 0; w < L::kNumWg; ++w) { mbar_init(q_full(b, w), 1); mbar_init(o_ready(b, w), 4); }
    for (int b = 0; b < 2; ++b) { mbar_init(slot_full(b), 1); mbar_init(slot_empty(b), 3 + 4 * L::kNumWg); }
    mbar_init(draw, 1);
    mbar_init_fence();
    tma_prefetch_map(q_map);
    tma_prefetch_map(k_map);
    tma_prefetch_map(v_map);
    tma_prefetch_map(o_map);
  }
  __syncthreads();
  const auto load_kv = [&](uint32_t tile, const CUtensorMap* map, uint32_t bar, int token, int head) {
    mbar_expect(bar, L::kKvTile);
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) tma_load_3d(tile + c * L::kKvChunk, map, bar, c * 64, token, head);
  };

  if (warp < 4) {
    registers_down<(L::kNumWg == 3) ? 32 : 40>();
    Tile t;
    Ring<2> slot;
    const auto next_tile = [&] {  // false at the end
      mbar_wait(slot_full(slot.stage), slot.phase);
      t = slots[slot.stage];
      mbar_arrive(slot_empty(slot.stage));
      slot.advance();
      return t.head >= 0;
    };
    if (warp == 3 && lane == 0) {  // draws tiles and works them out
      const int total = (p.seqlen_q_max + BM - 1) / BM * p.batch * p.num_kv_heads * p.group_size;
      int i = blockIdx.x;
      for (uint32_t asked = 0;; asked ^= 1) {
        while (i < total && !tile_at<BM, CAUSAL>(p, i, t)) i = gridDim.x + atomicAdd(p.counter, 1);
        if (i >= total) t.head = -1;
        mbar_wait(slot_empty(slot.stage), slot.phase ^ 1);
        slots[slot.stage] = t;
        mbar_arrive(slot_full(slot.stage));
        slot.advance();
        if (i >= total) break;
        mbar_wait(draw, asked);
        i = gridDim.x + atomicAdd(p.counter, 1);
      }
      if (atomicAdd(p.counter + 1, 1) == (int)gridDim.x - 1) {  // every block has drawn its last
        p.counter[0] = 0;
        p.counter[1] = 0;
      }
    } else if (warp == 0 && lane == 0) {  // K
      Ring<L::kStages> ring;
      while (next_tile()) {
        int j = num_kv_tiles<BM, BN, CAUSAL>(t) - 1;
        const int draw_at = min(j, 2);
        if (j < 0) mbar_arrive(draw);
#pragma unroll 1
        for (; j >= 0; --j) {
          mbar_wait(k_empty(ring.stage), ring.phase ^ 1);
          load_kv(base + L::kK + ring.stage * L::kKvTile, k_map, k_full(ring.stage), t.k0 + j * BN, t.kv_head);
          ring.advance();
          // The next tile is drawn only now, a few K tiles ahead of the math: earlier would undo longest-first at the end.
          if (j == draw_at) mbar_arrive(draw);
        }
      }
    } else if (warp == 2 && lane == 0) {  // V
      Ring<L::kStages> ring;
      while (next_tile()) {
#pragma unroll 1
        for (int j = num_kv_tiles<BM, BN, CAUSAL>(t) - 1; j >= 0; --j) {
          mbar_wait(v_empty(ring.stage), ring.phase ^ 1);
          load_kv(base + L::kV + ring.stage * L::kKvTile, v_map, v_full(ring.stage), t.k0 + j * BN, t.kv_head);
          ring.advance();
        }
      }
    } else if (warp == 1 && lane == 0) {  // q and o, which share buffers: o leaves from where its q lay
      const auto load_q = [&](int b, int w) {
        const int row = t.row0 + w * 64;
        if (row < 0 || row >= t.len_q) return;
        mbar_expect(q_full(b, w), L::kQWg);
#pragma unroll
        for (int c = 0; c < L::kChunks; ++c)
          tma_load_3d(base + b * L::kQBuf + w * L::kQWg + c * L::kQChunk, q_map, q_full(b, w), c * 64, t.q0 + row, t.head);
      };
      struct { int row0, q0, len_q, head; } last = {};
      const auto store_o = [&](int b, int w, uint32_t phase) {
        mbar_wait(o_ready(b, w), phase);
        const int row = last.row0 + w * 64;
        if (row < 0 || row + 64 > last.len_q) return;
#pragma unroll
        for (int c = 0; c < L::kChunks; ++c)
          tma_store_3d(o_map, base + b * L::kQBuf + w * L::kQWg + c * L::kQChunk, c * 64, last.q0 + row, last.head);
        tma_store_commit();
        tma_store_wait_read();
      };
      Ring<L::kQBufs> in, out;
#pragma unroll 1
      for (bool first = true, more = true; more; first = false) {
        more = next_tile();
        if (L::kQBufs > 1 && more)
          for (int w = 0; w < L::kNumWg; ++w) load_q(in.stage, w);
        for (int w = 0; w < L::kNumWg; ++w) {
          if (!first) store_o(out.stage, w, out.phase);
          if (L::kQBufs == 1 && more) load_q(in.stage, w);
        }
        if (!first) out.advance();
        in.advance();
        last = {t.row0, t.q0, t.len_q, t.head};
      }
    }
  } else {
    registers_up<(L::kNumWg == 3) ? 160 : 232>();
    const int wg = warp / 4 - 1;
    const int tid = threadIdx.x - 128 * (wg + 1);
    const int row_in_wg = (warp & 3) * 16 + lane / 4;
    Ring<L::kStages> kr, vr;
    Ring<L::kQBufs> qring;
    Ring<2> slot;
    uint32_t q_phase = 0;  // bit b: parity of q buffer b, which is loaded only when the warpgroup has rows
    Math<D, T, CAUSAL> m;
    const auto release = [&](uint32_t bar) { if (lane == 0) mbar_arrive(bar); };
    const auto take_token = [&] { if (kToken) named_sync(4 + wg, 256); };
    const auto pass_token = [&](int place) { if (kToken == place && kToken) named_arrive(4 + (wg + 1) % L::kNumWg, 256); };
    if (wg == L::kNumWg - 1) pass_token(kToken);
    for (;;) {
      mbar_wait(slot_full(slot.stage), slot.phase);
      const Tile t = slots[slot.stage];
      __syncwarp();
      release(slot_empty(slot.stage));
      slot.advance();
      if (t.head < 0) break;
      const int row0 = t.row0 + wg * 64;
      const int rows = row0 < 0 ? 0 : min(64, t.len_q - row0);
      int j = num_kv_tiles<BM, BN, CAUSAL>(t) - 1;
      const auto skip = [&] {  // a tile that none of this warpgroup's rows sees
        take_token();
        pass_token(kToken);
        mbar_wait(k_full(kr.stage), kr.phase);
        release(k_empty(kr.stage));
        kr.advance();
        mbar_wait(v_full(vr.stage), vr.phase);
        release(v_empty(vr.stage));
        vr.advance();
      };
      if (rows <= 0) {
#pragma unroll 1
        for (; j >= 0; --j) skip();
      } else {
        const uint32_t q = base + qring.stage * L::kQBuf + wg * L::kQWg;
        const int mine = (visible<CAUSAL>(t, row0 + rows - 1) + BN - 1) / BN;
        const int unmasked = visible<CAUSAL>(t, row0) / BN;
        const auto v_at = [&] { return base + L::kV + vr.stage * L::kKvTile; };
        using M = Math<D, T, CAUSAL>;
        const auto issue_scores = [&](auto width) {
          mbar_wait(k_full(kr.stage), kr.phase);
          take_token();
          m.template scores<decltype(width)::value>(q, base + L::kK + kr.stage * L::kKvTile);
        };
        const auto whole = std::integral_constant<int, BN>{};
        const auto mask = [&](auto width) {
          int limit[2];
          for (int h = 0; h < 2; ++h) limit[h] = visible<CAUSAL>(t, row0 + row_in_wg + 8 * h) - j * BN - 2 * (lane & 3);
          m.template mask<decltype(width)::value>(limit);
          const int tail = t.len_k - j * BN;
          if (tail < BN) {  // rows past the sequence may hold anything, and 0 * NaN is NaN; always a first tile
            mbar_wait(v_full(vr.stage), vr.phase);
            for (int i = tail * 8 + tid; i < BN * 8; i += 128)
              for (int c = 0; c < L::kChunks; ++c)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_at() + c * L::kKvChunk + i * 16), "r"(0) : "memory");
            fence_async_proxy();
            named_sync(1 + wg, 128);
          }
        };
        const auto done_v = [&] {
          pin(m.o);
          release(v_empty(vr.stage));
          vr.advance();
        };
        float off[2];
        const auto step_plain = [&](auto masked, auto width) {
          constexpr int W = decltype(width)::value;
          issue_scores(width);
          pass_token(1);
          if (kToken == 2) wgmma_wait<1>();
          pass_token(2);
          wgmma_wait<0>();
          pin(m.s);
          pass_token(3);
          release(k_empty(kr.stage));
          kr.advance();
          if constexpr (decltype(masked)::value) mask(width);
          if (m.template new_max<W>(p.scale_log2)) { m.rescale_sum(); m.rescale_o(); }
          pass_token(4);
          m.offsets(off, p.scale_log2);
#pragma unroll
          for (int g = 0; g < M::kGroups; ++g) {  // the products of one piece run while the next piece's exponentials are taken
            constexpr int per = W / 2 / M::kGroups, steps = W / 16 / M::kGroups;
            m.exponentials(g * per, (g + 1) * per, off, p.scale_log2);
            m.pack(g * per, (g + 1) * per);
            if (g == 0) mbar_wait(v_full(vr.stage), vr.phase);
            m.products(v_at(), g * steps, (g + 1) * steps);
            if (g == 0) pass_token(5);
          }
          m.close_sum();
          wgmma_wait<0>();
          done_v();
        };
        const auto soften = [&] {  // exponentials of a tile whose scores have arrived
          m.rescale_sum();
          m.offsets(off, p.scale_log2);
          m.exponentials(0, BN / 4, off, p.scale_log2);
          pass_token(5);
          m.exponentials(BN / 4, BN / 2, off, p.scale_log2);
          m.close_sum();
        };
        const auto step_first = [&](auto masked) {
          issue_scores(whole);
          pass_token(1);
          wgmma_wait<0>();
          pin(m.s);
          pass_token(3);
          release(k_empty(kr.stage));
          kr.advance();
          if constexpr (decltype(masked)::value) mask(whole);
          m.new_max(p.scale_log2);
          pass_token(4);
          soften();
          m.pack(0, BN / 2);
        };
        const auto step_overlap = [&](auto masked) {
          issue_scores(whole);
          mbar_wait(v_full(vr.stage), vr.phase);
          m.products(v_at(), 0, BN / 16);
          pass_token(1);
          wgmma_wait<1>();
          pin(m.s);
          pass_token(3);
          release(k_empty(kr.stage));
          kr.advance();
          if constexpr (decltype(masked)::value) mask(whole);
          const bool moved = m.new_max(p.scale_log2);
          pass_token(4);
          soften();
          wgmma_wait<0>();
          done_v();
          if (moved) m.rescale_o();
          m.pack(0, BN / 2);
        };
        m.reset();
#pragma unroll 1
        for (; j >= mine; --j) skip();
        mbar_wait(q_full(qring.stage, wg), (q_phase >> qring.stage) & 1);
        q_phase ^= 1u << qring.stage;
        if constexpr (Chosen::kOverlap) {
          if (j >= 0) {
            if (j >= unmasked) step_first(std::true_type{}); else step_first(std::false_type{});
            --j;
            for (; j >= unmasked; --j) step_overlap(std::true_type{});
            for (; j >= 0; --j) step_overlap(std::false_type{});
            mbar_wait(v_full(vr.stage), vr.phase);
            m.products(v_at(), 0, BN / 16);
            wgmma_wait<0>();
            done_v();
          }
        } else {
          if (CAUSAL && j >= unmasked && visible<CAUSAL>(t, row0 + rows - 1) - j * BN <= BN / 2) {
            step_plain(std::true_type{}, std::integral_constant<int, BN / 2>{});
            --j;
          }
          for (; j >= unmasked; --j) step_plain(std::true_type{}, whole);
          for (; j >= 0; --j) step_plain(std::false_type{}, whole);
        }

        // o / sum, into the buffer that held this warpgroup's q.
        float inv[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = m.row_sum[h];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          const int row = row0 + row_in_wg + 8 * h;
          inv[h] = sum > 0.f ? 1.f / sum : 0.f;
          if ((lane & 3) == 0 && row < t.len_q)
            p.lse[(long long)t.head * p.total_q + t.q0 + row] = sum > 0.f ? m.row_max[h] * p.scale + logf(sum) : -INFINITY;
        }
        if (rows == 64) {
          // All four warps have read q: each wrote its own rows only after its own last product, but q rows of a warp are
          // read by that warp's products alone, so no barrier is needed before writing.
#pragma unroll
          for (int i = 0; i < D / 2; i += 2) {
            const int h = (i >> 1) & 1, col = (i / 4) * 8, r = row_in_wg + 8 * h;
            const uint32_t dst = q + (col / 64) * L::kQChunk + r * 128 + ((((col % 64) / 8) ^ (r & 7)) * 16) + (lane & 3) * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(pack16<T>(m.o[i] * inv[h], m.o[i + 1] * inv[h])) : "memory");
          }
          fence_async_proxy();
        } else {  // the next rows belong to another sequence: store row by row
#pragma unroll
          for (int i = 0; i < D / 2; i += 2) {
            const int h = (i >> 1) & 1, col = (i / 4) * 8 + 2 * (lane & 3), row = row0 + row_in_wg + 8 * h;
            if (row < t.len_q)
              *(uint32_t*)((uint16_t*)p.o + (long long)(t.q0 + row) * p.o_token_stride + t.head * p.o_head_stride + col) =
                  pack16<T>(m.o[i] * inv[h], m.o[i + 1] * inv[h]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(o_ready(qring.stage, wg));
      qring.advance();
    }
  }
}

// What the host must know of this build: math warpgroups, keys a tile, bytes of shared memory.
extern "C" __device__ const int forward_tiling[3] = {Layout<HEAD_DIM>::kNumWg, Layout<HEAD_DIM>::kBn, Layout<HEAD_DIM>::kBytes};

#define FORWARD_KERNEL(NAME, CAUSAL)                                                                                          \
  extern "C" __global__ void __launch_bounds__((Chosen::kNumWg + 1) * 128, 1)                                                 \
      NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,                              \
           const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,                              \
           const __grid_constant__ ForwardParams p) {                                                                         \
    forward_body<HEAD_DIM, DTYPE, CAUSAL>(&q_map, &k_map, &v_map, &o_map, p);                                                 \
  }
FORWARD_KERNEL(forward_full, false)
FORWARD_KERNEL(forward_causal, true)

}  // namespace suanpan
