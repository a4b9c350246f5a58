// Exact attention forward for Hopper (sm_90a) over e4m3 v and q and k that are both e4m3 or both 8-bit integers: f32 softmax, bf16 o and
// natural-log lse out. Integers are the closer ones where numbers are spread evenly, as the Hadamard matrix leaves them: a step of 1/127 of the largest.
// Not here: features (forward.cu), quantisation. Built once per HEAD_DIM; each cubin holds a full and a causal kernel over contiguous K and V, and
// the same over pages, where each page may have scales of its own: K's go into the scores, V's into P, as parts of a tile's largest one.
//
// 8-bit products take both operands with the summed dimension contiguous, so v must be transposed: two producer warps do it, tile
// by tile (ldmatrix.trans, byte permutes, stmatrix). The order in which it leaves keys within a group of 16 is the order in which
// a thread's scores already lie, so that P needs no shuffles; columns of v leave in an order that o undoes at the end.
// The matrix unit sums 8-bit products with fewer bits than f32 has: each tile's P v starts from zero and is added to o in f32.
// P is scaled by 2^8 against the exact running maximum and rounded on a grid of tiles at absolute key positions.
#include "forward_tile.cuh"

namespace suanpan {

// The numbers and their meanings are those of src/shapes.rs.
struct Fp8Chosen {
  static constexpr int kNumWg = WARPGROUPS, kKStages = K_STAGES, kVStages = V_STAGES, kTStages = TRANSPOSED_STAGES, kToken = TOKEN;
};

struct Fp8Scales {  // of a (sequence, kv head), over pages of a (page, kv head); or null: 1
  const float* q;       // [num_q_heads, total_q]: one a row, so that a row's bits know nothing of its neighbours
  const float* k;       // strides below, in elements: 0 repeats a scale
  const float* v;
  long long outer_stride;  // from sequence to sequence, or from page to page
  int head_stride;
};

template <int D> struct Fp8Layout {
  using S = Fp8Chosen;
  static constexpr int kBn = 128;
  static constexpr int kChunks = D / 128;            // 128-column chunks of 128 bytes
  static constexpr int kQChunk = 64 * 128;
  static constexpr int kQWg = kChunks * kQChunk;
  static constexpr int kChunk = kBn * 128;           // of K and V as stored, and of V transposed
  static constexpr int kTile = kChunks * kChunk;
  static constexpr int kK = S::kNumWg * kQWg;
  static constexpr int kV = kK + S::kKStages * kTile;
  static constexpr int kT = kV + S::kVStages * kTile;
  static constexpr int kBars = kT + S::kTStages * kTile;
  static constexpr int kNumBars = 2 * (S::kKStages + S::kVStages + S::kTStages + S::kNumWg) + 5;
  static constexpr int kSlots = (kBars + kNumBars * 8 + 15) / 16 * 16;
  static constexpr int kZero = kSlots + 2 * (int)sizeof(Tile);  // a float that is zero
  // Of the last kScaleSlots key tiles, over pages: K's scale of each 16 keys, V's as parts of the tile's largest, and that. A slot is written
  // again once every warpgroup has scored the tile kKStages later, and so is done with this one.
  static constexpr int kScales = kZero + 16, kScaleSlots = 8, kScaleSlot = 80;
  static constexpr int kBytes = kScales + kScaleSlots * kScaleSlot + 1024;
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
  static_assert(S::kKStages + 2 <= kScaleSlots, "scales are overwritten too early");
};

// Every role goes by one word, for want of registers: key tiles so far (key tile n lies in stage n % STAGES, a power of two), from
// bit 29 the parity of the next q, and from bit 30 tiles so far, modulo 4.
constexpr uint32_t kOneQ = 1u << 29, kOneTile = 1u << 30;
__device__ __forceinline__ int slot_of(uint32_t n) { return n >> 30 & 1; }
__device__ __forceinline__ uint32_t slot_parity(uint32_t n) { return n >> 31; }
template <int STAGES> __device__ __forceinline__ int stage_of(uint32_t n) { return n % STAGES; }
template <int STAGES> __device__ __forceinline__ uint32_t parity_of(uint32_t n) { return n / STAGES & 1; }

constexpr float kPLog2 = 8.f;  // P is multiplied by 2^8: up to 256 of e4m3's 448

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Half of one tile of v, [64 keys of 128, D] -> [D, 64 keys of 128], by one warp of two. Within 16 keys: position 4c + i holds key 2c + i % 2 + 8 * (i / 2).
// Within 16 columns: row g holds column 2g, row 8 + g column 2g + 1. Both sides swizzled, without bank conflicts.
template <int CHUNKS> __device__ __forceinline__ void transpose_half(uint32_t from, uint32_t to, int half, int lane) {
  const int r = lane & 7, m = lane >> 3;
  // ldmatrix: matrices 0, 1: keys 0-7 and 8-15 of 16 columns; 2, 3: of the next 16. stmatrix: even and odd columns of the same.
  from += (64 * half + r + 8 * (m & 1)) * 128 + ((m >> 1) ^ r) * 16;
  to += (r + 8 * (m & 1) + 16 * (m >> 1)) * 128 + r * 16;
  constexpr int kBatch = 2;  // loads in flight
#pragma unroll 1
  for (int c = 0; c < CHUNKS; ++c, from += 64 * 128, to += 128 * 128)
#pragma unroll 1
    for (int keys = 4 * half; keys < 4 * half + 4; ++keys, from += 16 * 128)
#pragma unroll
      for (int columns = 0; columns < 8; columns += 2 * kBatch) {
        uint32_t a[kBatch][4];
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(a[n][0]), "=r"(a[n][1]), "=r"(a[n][2]), "=r"(a[n][3]) : "r"(from ^ (columns + 2 * n) * 16) : "memory");
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                       ::"r"((to ^ keys * 16) + (columns + 2 * n) * 16 * 128),
                       "r"(__byte_perm(a[n][0], a[n][1], 0x6420)), "r"(__byte_perm(a[n][0], a[n][1], 0x7531)),
                       "r"(__byte_perm(a[n][2], a[n][3], 0x6420)), "r"(__byte_perm(a[n][2], a[n][3], 0x7531)) : "memory");
      }
}

template <int D, int MODE, bool PAGED, bool INT8>
__device__ __forceinline__ void fp8_body(const CUtensorMap* q_map, const CUtensorMap* k_map, const CUtensorMap* v_map,
                                         const ForwardParams& p, const Fp8Scales& scales) {
  using L = Fp8Layout<D>;
  using S = Fp8Chosen;
  constexpr int BM = S::kNumWg * 64, BN = L::kBn;
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u;
  const auto bar = [&](int i) { return base + L::kBars + 8 * i; };
  constexpr int k_full = 0, k_empty = k_full + S::kKStages, v_full = k_empty + S::kKStages, v_empty = v_full + S::kVStages;
  constexpr int t_full = v_empty + S::kVStages, t_empty = t_full + S::kTStages, q_full = t_empty + S::kTStages;
  constexpr int q_done = q_full + S::kNumWg, slot_full = q_done + S::kNumWg, slot_empty = slot_full + 2, draw = slot_empty + 2;
  Tile* slots = (Tile*)(smem_raw + (base - smem_addr(smem_raw)) + L::kSlots);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kKStages; ++s) { mbar_init(bar(k_full + s), 1); mbar_init(bar(k_empty + s), 4 * S::kNumWg); }
    for (int s = 0; s < S::kVStages; ++s) { mbar_init(bar(v_full + s), 1); mbar_init(bar(v_empty + s), 2); }
    for (int s = 0; s < S::kTStages; ++s) { mbar_init(bar(t_full + s), 2); mbar_init(bar(t_empty + s), 4 * S::kNumWg); }
    for (int w = 0; w < S::kNumWg; ++w) { mbar_init(bar(q_full + w), 1); mbar_init(bar(q_done + w), 4); }
    for (int b = 0; b < 2; ++b) { mbar_init(bar(slot_full + b), 1); mbar_init(bar(slot_empty + b), 3 + 4 * S::kNumWg); }
    mbar_init(bar(draw), 1);
    store_shared(base + L::kZero, 0.f);
    mbar_init_fence();
    tma_prefetch_map(q_map);
    tma_prefetch_map(k_map);
    tma_prefetch_map(v_map);
  }
  __syncthreads();
  uint32_t n = 0;
  const auto scales_at = [&](uint32_t n) { return base + L::kScales + n % L::kScaleSlots * L::kScaleSlot; };
  // Else a head's scales take no part until the end. Integers over pages have one form only: both at run time would take a register too many.
  const bool per_page = PAGED && (INT8 || scales.outer_stride != 0);

  if (warp < 4) {
    registers_down<(S::kNumWg == 3) ? 32 : 40>();
    const auto last_key_tile = [&](const auto& t) { return key_tiles<BN, MODE>(tile_keys<BM, MODE>(p, t)).end - 1; };
    if (PAGED && warp == 0) {  // K and V in boxes of one page's rows, a lane each; page ids a tile ahead
      for (;; n += kOneTile) {
        mbar_wait(bar(slot_full + slot_of(n)), slot_parity(n));
        const volatile Tile& t = slots[slot_of(n)];
        const int head = t.head, kv_head = t.kv_head, batch = t.batch, len_k = t.len_k;
        int j = head < 0 ? -1 : last_key_tile(t);
        __syncwarp();
        if (lane == 0) mbar_arrive(bar(slot_empty + slot_of(n)));
        if (head < 0) break;
        const int draw_at = min(j, 2), rows = p.box_rows;
        if (j < 0 && lane == 0) mbar_arrive(bar(draw));
        const int* const ids = p.page_table + (long long)batch * p.pages_max;
        // Lanes 0 .. 7 stand for 16 keys of the tile each, whatever the boxes are.
        const auto live = [&](int j, int each) { return lane * each < BN && j * BN + lane * each < len_k; };
        const auto id_at = [&](int j, int each) { return j >= 0 && live(j, each) ? ids[(j * BN + lane * each) / p.page_size] : 0; };
        const auto scale_of = [&](const float* of, int id, int j) {
          return !live(j, 16) ? 0.f : of ? of[id * scales.outer_stride + kv_head * scales.head_stride] : 1.f;
        };
        int box = id_at(j, rows), sixteen = id_at(j, 16);
#pragma unroll 1
        for (; j >= 0; --j, ++n) {
          const int k = stage_of<S::kKStages>(n), v = stage_of<S::kVStages>(n), this_box = box;
          float ks = 0.f, vs = 0.f;
          if (per_page) {
            ks = scale_of(scales.k, sixteen, j);
            vs = scale_of(scales.v, sixteen, j);
            sixteen = id_at(j - 1, 16);
          }
          box = id_at(j - 1, rows);
          const bool loads = live(j, rows);
          const int bytes = __popc(__ballot_sync(~0u, loads)) * rows * 128 * L::kChunks, row = (j * BN + lane * rows) % p.page_size;
          float top = fabsf(vs);
#pragma unroll
          for (int x = 4; x > 0; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
          mbar_wait(bar(k_empty + k), parity_of<S::kKStages>(n) ^ 1);
          if (per_page && lane < 8) {
            store_shared(scales_at(n) + lane * 4, ks);
            store_shared(scales_at(n) + 32 + lane * 4, top > 0.f ? vs / top : 0.f);
            if (lane == 0) store_shared(scales_at(n) + 64, top);
          }
          const auto load = [&](uint32_t to, const CUtensorMap* map, uint32_t full) {
            __syncwarp();
            if (lane == 0) mbar_expect(full, bytes);
            __syncwarp();
            if (loads) {
#pragma unroll
              for (int c = 0; c < L::kChunks; ++c)
                tma_load_4d(to + c * L::kChunk + lane * rows * 128, map, full, c * 128, row, kv_head, this_box);
            }
          };
          load(base + L::kK + k * L::kTile, k_map, bar(k_full + k));
          mbar_wait(bar(v_empty + v), parity_of<S::kVStages>(n) ^ 1);
          load(base + L::kV + v * L::kTile, v_map, bar(v_full + v));
          if (j == draw_at && lane == 0) mbar_arrive(bar(draw));  // as in forward.cu
        }
      }
    } else if (!PAGED && warp == 0 && lane == 0) {  // K and V
      Tile t;
      const auto load = [&](uint32_t to, const CUtensorMap* map, uint32_t full, int token) {
        mbar_expect(full, L::kTile);
#pragma unroll
        for (int c = 0; c < L::kChunks; ++c) tma_load_3d(to + c * L::kChunk, map, full, c * 128, token, t.kv_head);
      };
      for (;; n += kOneTile) {
        mbar_wait(bar(slot_full + slot_of(n)), slot_parity(n));
        t = slots[slot_of(n)];
        mbar_arrive(bar(slot_empty + slot_of(n)));
        if (t.head < 0) break;
        int j = last_key_tile(t);
        const int draw_at = min(j, 2);
        if (j < 0) mbar_arrive(bar(draw));
#pragma unroll 1
        for (; j >= 0; --j, ++n) {
          const int k = stage_of<S::kKStages>(n), v = stage_of<S::kVStages>(n);
          mbar_wait(bar(k_empty + k), parity_of<S::kKStages>(n) ^ 1);
          load(base + L::kK + k * L::kTile, k_map, bar(k_full + k), t.k0 + j * BN);
          mbar_wait(bar(v_empty + v), parity_of<S::kVStages>(n) ^ 1);
          load(base + L::kV + v * L::kTile, v_map, bar(v_full + v), t.k0 + j * BN);
          if (j == draw_at) mbar_arrive(bar(draw));  // as in forward.cu
        }
      }
    } else if (warp >= 2) {  // transpose V, half a tile each
      for (;; n += kOneTile) {
        mbar_wait(bar(slot_full + slot_of(n)), slot_parity(n));
        const volatile Tile& t = slots[slot_of(n)];
        if (t.head < 0) break;
        int tail = t.len_k, j = last_key_tile(t);  // tail: keys from the first of tile j to the end
        tail -= j * BN;
        __syncwarp();
        if (lane == 0) mbar_arrive(bar(slot_empty + slot_of(n)));
#pragma unroll 1
        for (; j >= 0; --j, ++n, tail += BN) {
          const int v = stage_of<S::kVStages>(n), transposed = stage_of<S::kTStages>(n);
          const uint32_t from = base + L::kV + v * L::kTile;
          mbar_wait(bar(v_full + v), parity_of<S::kVStages>(n));
          if (tail < BN) {  // rows past the sequence may hold anything, and 0 * NaN is NaN
            for (int i = max(tail, 64 * (warp - 2)) * 8 + lane; i < 64 * (warp - 1) * 8; i += 32)
              for (int c = 0; c < L::kChunks; ++c)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(from + c * L::kChunk + i * 16), "r"(0) : "memory");
            __syncwarp();
          }
          mbar_wait(bar(t_empty + transposed), parity_of<S::kTStages>(n) ^ 1);
          transpose_half<L::kChunks>(from, base + L::kT + transposed * L::kTile, warp - 2, lane);
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) { mbar_arrive(bar(v_empty + v)); mbar_arrive(bar(t_full + transposed)); }
        }
      }
    } else if (warp == 1 && lane == 0) {  // draws tiles, works them out and loads their q
      const int total = (p.seqlen_q_max + BM - 1) / BM * p.batch * p.num_kv_heads * p.group_size;
      uint32_t phases = ~0u;  // bit w: parity of the next wait on q_done; the first falls through
      for (int i = blockIdx.x;; i = gridDim.x + atomicAdd(p.counter, 1)) {
        volatile Tile& t = slots[slot_of(n)];
        mbar_wait(bar(slot_empty + slot_of(n)), slot_parity(n) ^ 1);
        while (i < total && !tile_at<S::kNumWg, BN, MODE>(p, i, t)) i = gridDim.x + atomicAdd(p.counter, 1);
        if (i >= total) t.head = -1;
        mbar_arrive(bar(slot_full + slot_of(n)));
        if (i >= total) break;
        for (int w = 0; w < S::kNumWg; ++w) {
          const int row = t.row0 + w * 64;
          if (row < 0 || row >= t.len_q) continue;
          mbar_wait(bar(q_done + w), phases >> w & 1);
          phases ^= 1u << w;
          mbar_expect(bar(q_full + w), L::kQWg);
#pragma unroll
          for (int c = 0; c < L::kChunks; ++c)
            tma_load_3d(base + w * L::kQWg + c * L::kQChunk, q_map, bar(q_full + w), c * 128, t.q0 + row, t.head);
        }
        mbar_wait(bar(draw), slot_of(n));
        n += kOneTile;
      }
      if (atomicAdd(p.counter + 1, 1) == (int)gridDim.x - 1) {  // every block has drawn its last
        p.counter[0] = 0;
        p.counter[1] = 0;
      }
    }
  } else {
    registers_up<(S::kNumWg == 3) ? 160 : 232>();
    const int wg = warp / 4 - 1;
    const int row_in_wg = (warp & 3) * 16 + lane / 4;
    constexpr int kN = 64, kSums = D / kN;  // columns of one product of P v, and how many make the tile
    float o[kSums][kN / 2];
    const auto release = [&](int b) { if (lane == 0) mbar_arrive(bar(b)); };
    const auto take_token = [&] { if (S::kToken) named_sync(8 + wg, 256); };
    const auto pass_token = [&](int place) { if (S::kToken && S::kToken == place) named_arrive(8 + (wg + 1) % S::kNumWg, 256); };
    if (wg == S::kNumWg - 1) pass_token(S::kToken);
    for (;; release(slot_empty + slot_of(n)), n += kOneTile) {
      mbar_wait(bar(slot_full + slot_of(n)), slot_parity(n));
      const volatile Tile& t = slots[slot_of(n)];  // read where it lies: registers are short
      if (t.head < 0) break;
      const int row0 = t.row0 + wg * 64;
      const int rows = row0 < 0 ? 0 : min(64, t.len_q - row0);
      int j = key_tiles<BN, MODE>(tile_keys<BM, MODE>(p, t)).end - 1;
      const auto skip = [&] {  // a tile that none of this warpgroup's rows sees
        take_token();
        pass_token(S::kToken);
        mbar_wait(bar(k_full + stage_of<S::kKStages>(n)), parity_of<S::kKStages>(n));
        release(k_empty + stage_of<S::kKStages>(n));
        mbar_wait(bar(t_full + stage_of<S::kTStages>(n)), parity_of<S::kTStages>(n));
        release(t_empty + stage_of<S::kTStages>(n));
        ++n;
      };
      if (rows <= 0) {
#pragma unroll 1
        for (; j >= 0; --j) skip();
        __syncwarp();
        continue;
      }
      const Part mine = part_of<BN, MODE>(p, t, row0, rows);
      const long long kv_scale = t.batch * scales.outer_stride + t.kv_head * scales.head_stride;
      const float factor = p.scale_log2 * (!per_page && scales.k ? scales.k[kv_scale] : 1.f);
      float scale_log2[2] = {factor, factor};
      if (scales.q) {
        const float* const of_rows = scales.q + (long long)t.head * p.total_q + t.q0 + row0;
        for (int h = 0; h < 2; ++h)
          if (row_in_wg + 8 * h < rows) scale_log2[h] *= of_rows[row_in_wg + 8 * h];
      }
      float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
#pragma unroll
      for (int c = 0; c < kSums; ++c)
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) o[c][i] = 0.f;
#pragma unroll 1
      for (; j >= mine.end; --j) skip();
      mbar_wait(bar(q_full + wg), n / kOneQ & 1);
      n ^= kOneQ;
      if (j < 0) release(q_done + wg);
      const uint32_t qd = desc_low(base + wg * L::kQWg, 0);
#pragma unroll 1
      for (; j >= 0; --j, ++n) {
        mbar_wait(bar(k_full + stage_of<S::kKStages>(n)), parity_of<S::kKStages>(n));
        if (S::kToken < 6) take_token();
        const uint32_t kd = desc_low(base + L::kK + stage_of<S::kKStages>(n) * L::kTile, 0);
        float s[64];
        int (&sums)[64] = reinterpret_cast<int (&)[64]>(s);
        wgmma_fence();
        if constexpr (INT8) Wgmma<128, S8>::ss_first(sums, desc(qd), desc(kd));
        else Wgmma<128, E4m3>::ss_first(s, desc(qd), desc(kd));
#pragma unroll
        for (int ks = 1; ks < D / 32; ++ks) {
          const uint64_t a = desc(qd + ((ks / 4) * L::kQChunk + (ks % 4) * 32) / 16), b = desc(kd + ((ks / 4) * L::kChunk + (ks % 4) * 32) / 16);
          if constexpr (INT8) Wgmma<128, S8>::ss(sums, a, b);
          else Wgmma<128, E4m3>::ss(s, a, b, 1);
          if (S::kToken == 2 && ks == D / 64 - 1) wgmma_commit();
        }
        wgmma_commit();
        pass_token(1);
        if (S::kToken == 2) wgmma_wait<1>();
        pass_token(2);
        wgmma_wait<0>();
        if constexpr (INT8) {
          pin(sums);
        } else {
          pin(s);
        }
        pass_token(3);
        release(k_empty + stage_of<S::kKStages>(n));
        if (j == 0) release(q_done + wg);
        const uint32_t of_tile = scales_at(n);
        if (per_page) {
#pragma unroll
          for (int g = 0; g < 8; ++g) {
            const float ks = load_shared(of_tile + 4 * g);
#pragma unroll
            for (int i = 8 * g; i < 8 * g + 8; ++i) s[i] = (INT8 ? __int2float_rn(sums[i]) : s[i]) * ks;
          }
        } else if constexpr (INT8) {
#pragma unroll
          for (int i = 0; i < 64; ++i) s[i] = __int2float_rn(sums[i]);  // exact below 2^24, and the same numbers over pages
        }
        if (j >= mine.whole_end) {
          int limit[2];
          for (int h = 0; h < 2; ++h) limit[h] = visible<MODE>(p, t, row0 + row_in_wg + 8 * h).end - j * BN - 2 * (lane & 3);
#pragma unroll
          for (int i = 0; i < 64; ++i)
            if ((i / 4) * 8 + (i & 1) >= limit[(i >> 1) & 1]) s[i] = -INFINITY;
        }
        float corr[2], off[2];
        {
          float mx[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
          for (int i = 4; i < 64; ++i) mx[(i >> 1) & 1][i & 1] = fmaxf(mx[(i >> 1) & 1][i & 1], s[i]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float m = fmaxf(fmaxf(mx[h][0], mx[h][1]), row_max[h]);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            corr[h] = m == -INFINITY ? 1.f : exp2_fast((row_max[h] - m) * scale_log2[h]);
            off[h] = m == -INFINITY ? 0.f : m * scale_log2[h] - kPLog2;
            row_max[h] = m;
          }
        }
        pass_token(4);
        if (S::kToken >= 6) {  // the assembler moves arithmetic across barriers, but no load: hang the exponentials on one
          take_token();
          const float zero = load_shared(base + L::kZero);
          off[0] += zero;
          off[1] += zero;
        }
        uint32_t pk[16];
        row_sum[0] *= corr[0];
        row_sum[1] *= corr[1];
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          s[i] = exp2_fast(fmaf(s[i], scale_log2[(i >> 1) & 1], -off[(i >> 1) & 1]));
          row_sum[(i >> 1) & 1] += s[i];
          // A sum of exponentials is not negative, which the assembler does not know: it has to have them first.
          if (S::kToken >= 6 && i == (S::kToken == 6 ? 63 : S::kToken == 7 ? 47 : 31))
            named_arrive(8 + (wg + 1) % S::kNumWg + (row_sum[0] + row_sum[1] < 0.f), 256);
        }
        if (per_page) {  // after the sums: lse does not know V
#pragma unroll
          for (int g = 0; g < 8; ++g) {
            const float vs = load_shared(of_tile + 32 + 4 * g);
#pragma unroll
            for (int i = 8 * g; i < 8 * g + 8; ++i) s[i] *= vs;
          }
        }
#pragma unroll
        for (int ks = 0; ks < 4; ++ks)
#pragma unroll
          for (int r = 0; r < 4; ++r) {  // r: row half, key half
            const int i = (4 * ks + 2 * (r >> 1)) * 4 + 2 * (r & 1);
            pk[4 * ks + r] = pack_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
          }
        mbar_wait(bar(t_full + stage_of<S::kTStages>(n)), parity_of<S::kTStages>(n));
        const uint32_t td = desc_low(base + L::kT + stage_of<S::kTStages>(n) * L::kTile, 0);
        float sum[2][kN / 2];
        const auto products = [&](int c) {  // columns c * kN .., from zero
          if (c >= 2) { pin(o[c - 2]); pin(sum[c & 1]); }  // or the assembler lets a third sum live
          wgmma_fence();
          if (c < 2) Wgmma<kN, E4m3>::rs_first(sum[c], pk, desc(td + c * kN * 128 / 16));
          else Wgmma<kN, E4m3>::rs(sum[c & 1], pk, desc(td + c * kN * 128 / 16), 0);
#pragma unroll
          for (int ks = 1; ks < 4; ++ks) Wgmma<kN, E4m3>::rs(sum[c & 1], pk + 4 * ks, desc(td + (c * kN * 128 + ks * 32) / 16), 1);
          wgmma_commit();
        };
        products(0);
#pragma unroll
        for (int c = 0; c < kSums; ++c) {  // the next columns are on their way while these are added to o
          if (c + 1 < kSums) { products(c + 1); wgmma_wait<1>(); } else { wgmma_wait<0>(); }
          pin(sum[c & 1]);
          if (c == kSums - 1) release(t_empty + stage_of<S::kTStages>(n));
          if (per_page) {
            const float v_tile = load_shared(of_tile + 64);
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) sum[c & 1][i] *= v_tile;
          }
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) o[c][i] = fmaf(o[c][i], corr[(i >> 1) & 1], sum[c & 1][i]);
        }
      }

      const float v_scale = !per_page && scales.v ? scales.v[t.batch * scales.outer_stride + t.kv_head * scales.head_stride] : 1.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = row_sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = row0 + row_in_wg + 8 * h;
        const float inv = sum > 0.f ? v_scale / sum : 0.f;
        if (row >= t.len_q) continue;  // the next rows belong to another sequence
        if ((lane & 3) == 0)
          p.lse[(long long)t.head * p.total_q + t.q0 + row] =
              sum > 0.f ? (row_max[h] * scale_log2[h] - kPLog2) * 0.69314718f + logf(sum) : -INFINITY;
        uint16_t* to = (uint16_t*)p.o + (long long)(t.q0 + row) * p.o_token_stride + t.head * p.o_head_stride + 4 * (lane & 3);
#pragma unroll
        for (int c = 0; c < kSums; ++c)
#pragma unroll
          for (int u = 0; u < kN / 16; ++u) {  // 16 columns: this thread's accumulators are four neighbours
            const int i = 8 * u + 2 * h;
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to + c * kN + u * 16),
                         "r"(pack_bf16(o[c][i] * inv, o[c][i + 4] * inv)), "r"(pack_bf16(o[c][i + 1] * inv, o[c][i + 5] * inv)) : "memory");
          }
      }
      __syncwarp();
    }
  }
}

// What the host must know of this build: math warpgroups, keys a tile, bytes of shared memory.
extern "C" __device__ const int forward_tiling[3] = {Fp8Chosen::kNumWg, Fp8Layout<HEAD_DIM>::kBn, Fp8Layout<HEAD_DIM>::kBytes};

#define FP8_KERNEL(NAME, MODE, PAGED, INT8)                                                                                                \
  extern "C" __global__ void __launch_bounds__((Fp8Chosen::kNumWg + 1) * 128, 1)                                              \
      NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,                              \
           const __grid_constant__ CUtensorMap v_map, const __grid_constant__ ForwardParams p,                                \
           const __grid_constant__ Fp8Scales scales) {                                                                        \
    fp8_body<HEAD_DIM, MODE, PAGED, INT8>(&q_map, &k_map, &v_map, p, scales);                                                              \
  }
FP8_KERNEL(forward_fp8_full, kFull, false, false)
FP8_KERNEL(forward_fp8_causal, kCausal, false, false)
FP8_KERNEL(forward_fp8_full_pages, kFull, true, false)
FP8_KERNEL(forward_fp8_causal_pages, kCausal, true, false)
FP8_KERNEL(forward_int8_full, kFull, false, true)
FP8_KERNEL(forward_int8_causal, kCausal, false, true)
FP8_KERNEL(forward_int8_full_pages, kFull, true, true)
FP8_KERNEL(forward_int8_causal_pages, kCausal, true, true)

}  // namespace suanpan
