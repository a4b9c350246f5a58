// Decode for Hopper (sm_90a): few query rows per sequence over a long paged KV cache, bf16, split over the whole chip.
// Not here: quantised caches, appending K and V, a batch-invariant mode. Built once per HEAD_DIM.
//
// All (sequence, 64-key tile) pairs form one line, cut into equal parts: balance does not depend on the lengths, which are
// read here, so that a captured graph stays right when they change. A part has one block for each kv head, and those run
// side by side: the heads of a token are neighbours in memory, and DRAM gives most when they are read together. A block
// streams its part through a ring of stages without a pause between sequences. What is cut leaves partial results in the
// workspace, merged in block order, so that results do not depend on timing. A partial result carries no flag and needs no
// fence: its words wait at a bit pattern that no arithmetic produces; the reader polls the words themselves and puts the
// pattern back. A block waits for lower-numbered blocks only, which were started before it: no launch can hang another.
#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES (192 * 1024)
#endif

namespace suanpan {

struct DecodeParams {
  void* o;                // [batch * seqlen_q, num_q_heads, head_dim] bf16, or f32 where wide, contiguous
  float* lse;             // [num_q_heads, lse_row], natural logarithm, the first batch * seqlen_q of each row
  const int* seqlens_k;   // [batch]
  const int* page_table;  // [batch, pages_max]
  float* partial;         // [3 * blocks, rows, head_dim + 4]: o, maximum (scaled, base 2), sum, two unused; slots of a
                          // block: its first unit, its last, a group's sum. All bits one before the first launch, left so
  int batch;
  int seqlen_q;           // query tokens per sequence; row = token * group_size + head in group
  int num_kv_heads;
  int group_size;
  int page_size;          // tokens, a multiple of 16
  int pages_max;          // per sequence
  int piece_rows;         // rows that one copy brings: 64 when pages allow, else 16
  float scale_log2;
  int causal;             // 1: a row sees the keys up to its own; 0: all
  int wide;               // o is f32
  int lse_row;
  int shared;             // every sequence has the first one's length and pages
};

constexpr int D = HEAD_DIM;
constexpr int BN = 64;                       // keys a tile
constexpr int kChunks = D / 64;
constexpr int kChunk = 64 * 128;             // bytes of 64 rows of one 64-column chunk
constexpr int kTile = kChunks * kChunk;      // K or V of one tile, or q
constexpr int kStages = STAGE_BYTES / (2 * kTile);
constexpr int kQ = 0, kKv = kTile;
constexpr int kBars = kKv + kStages * 2 * kTile;
constexpr int kWords = kBars + (3 * kStages + 2) * 8;
constexpr int kBytes = kWords + 96 + 1024;
static_assert(kBytes <= 232448, "more shared memory than a block can have");

__device__ __forceinline__ int len_of(const DecodeParams& p, int b) { return p.seqlens_k[p.shared ? 0 : b]; }

// A block's part of the line, sequence by sequence.
struct Walk {
  int b, len, tiles;         // the sequence, its keys and tiles
  uint32_t start;            // where the sequence begins on the line
  uint32_t at, end;          // where this block is on the line, where its part ends
  int from, to;              // tiles of the sequence that are this block's
  __device__ __forceinline__ bool unit() {
    if (at >= end) return false;
    from = (int)(at - start);
    to = min(tiles, (int)(end - start));
    return true;
  }
  __device__ __forceinline__ void next(const DecodeParams& p) {
    at = start + to;
    if (to < tiles || at >= end) return;
    start += tiles;
    do { len = len_of(p, ++b); } while (len <= 0);  // at < end: a sequence with tiles follows
    tiles = (len + BN - 1) / BN;
  }
};

template <bool MASKED>
__device__ __forceinline__ void softmax_tile(float (&s)[BN / 2], float (&o)[D / 2], uint32_t (&pk)[BN / 4], float (&row_max)[2],
                                             float (&row_sum)[2], const int (&limit)[2], float scale_log2) {
  if (MASKED) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i)
      if ((i / 4) * 8 + (i & 1) >= limit[(i >> 1) & 1]) s[i] = -INFINITY;
  }
  float mx[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
  for (int i = 4; i < BN / 2; ++i) mx[(i >> 1) & 1][i & 1] = fmaxf(mx[(i >> 1) & 1][i & 1], s[i]);
  float corr[2], off[2];
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = fmaxf(mx[h][0], mx[h][1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    const bool up = (m - row_max[h]) * scale_log2 > 8.f;  // rescale rarely: see forward.cu
    corr[h] = up ? exp2_fast((row_max[h] - m) * scale_log2) : 1.f;
    row_max[h] = up ? m : row_max[h];
    off[h] = row_max[h] == -INFINITY ? 0.f : row_max[h] * scale_log2;
    row_sum[h] *= corr[h];
    moved |= up;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= corr[(i >> 1) & 1];
  }
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const int h = (i >> 1) & 1;
    const float a = exp2_fast(fmaf(s[i], scale_log2, -off[h])), b = exp2_fast(fmaf(s[i + 1], scale_log2, -off[h]));
    sum[h][0] += a;
    sum[h][1] += b;
    pk[i / 2] = pack_bf16(a, b);
  }
  row_sum[0] += sum[0][0] + sum[0][1];
  row_sum[1] += sum[1][0] + sum[1][1];
}

// As many parts as there are blocks for, but no part is empty: merging counts on each to arrive.
__device__ __forceinline__ int parts_of(uint32_t total, int num_kv_heads) { return (int)min(gridDim.x / num_kv_heads, max(total, 1u)); }
// Where part `c` of `parts` begins, and which part holds position `x`. 32 bits: a device's memory holds under 2^24 tiles.
__device__ __forceinline__ uint32_t part_begin(uint32_t total, uint32_t c, uint32_t parts) { return total * c / parts; }
__device__ __forceinline__ int part_of(uint32_t x, uint32_t total, uint32_t parts) { return ((x + 1) * parts - 1) / total; }

constexpr int kRecord = D + 4;            // floats of one row's partial result
constexpr uint32_t kEmpty = 0xFFFFFFFFu;  // a NaN that hardware never writes (its own is 0x7FFFFFFF)
constexpr int kGroup = 8;                 // more than 32 parts are merged by groups first

__device__ __forceinline__ float4 load_record(const float* p) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_pair(const float* p) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ bool is_empty(float x) { return __float_as_uint(x) == kEmpty; }

// Elements `at`, `at` + 1 of o.
__device__ __forceinline__ void store_pair(const DecodeParams& p, long long at, float x, float y) {
  if (p.wide) *(float2*)((float*)p.o + at) = float2{x, y};
  else *(uint32_t*)((uint16_t*)p.o + at) = pack_bf16(x, y);
}

// Merges `count` <= 32 partial results of a unit, the i-th in slot `slot(i)`, with all eight warps, a row a warp. All the
// loads of a row are in flight together: this is the tail of a short decode. Writes o and lse, or one more partial result.
template <bool FINAL, class Slot>
__device__ void merge(const DecodeParams& p, int b, int h, int rows, int count, Slot slot, int out_slot) {
  constexpr int V = D / 32;               // columns a lane
  // Parts in flight; few where the code would be long, for it runs once and from a cold instruction cache.
  constexpr int U = V == 8 ? 2 : V == 4 ? 24 : 32;
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < rows; r += 8) {
    const auto record = [&](int i) { return p.partial + ((long long)slot(i) * rows + r) * kRecord; };
    float2 ml = {-INFINITY, 0.f};
    float acc[V];
#pragma unroll
    for (int k = 0; k < V; ++k) acc[k] = 0.f;
    float top = 0.f, sum = 0.f, weight = 0.f;
    for (int base = 0; base < count; base += U) {
      float x[U][V];
      bool again;
      do {
        again = false;
        if (base == 0 && lane < count) {
          ml = load_pair(record(lane) + D);
          again = is_empty(ml.x) || is_empty(ml.y);
        }
#pragma unroll
        for (int n = 0; n < U; ++n) {
          if (base + n >= count) break;
          const float* src = record(base + n) + lane * V;
          if constexpr (V == 2) {
            const float2 y = load_pair(src);
            x[n][0] = y.x;
            x[n][1] = y.y;
          } else {
#pragma unroll
            for (int k = 0; k < V; k += 4) {
              const float4 y = load_record(src + k);
              x[n][k] = y.x;
              x[n][k + 1] = y.y;
              x[n][k + 2] = y.z;
              x[n][k + 3] = y.w;
            }
          }
        }
#pragma unroll
        for (int n = 0; n < U; ++n) {
          if (base + n >= count) break;
#pragma unroll
          for (int k = 0; k < V; ++k) again |= is_empty(x[n][k]);
        }
      } while (again);
      __syncwarp();
      if (base == 0) {
        top = ml.x;
        for (int y = 16; y > 0; y /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, y));
        weight = ml.x == -INFINITY ? 0.f : exp2f(ml.x - top);
        sum = weight * ml.y;
        for (int y = 16; y > 0; y /= 2) sum += __shfl_xor_sync(~0u, sum, y);
      }
#pragma unroll
      for (int n = 0; n < U; ++n) {
        if (base + n >= count) break;
        const float w = __shfl_sync(~0u, weight, base + n);
        float* src = record(base + n) + lane * V;
#pragma unroll
        for (int k = 0; k < V; ++k) acc[k] += w * x[n][k];
#pragma unroll
        for (int k = 0; k < V; k += 2) __stcg((uint2*)(src + k), uint2{kEmpty, kEmpty});
      }
    }
    if (lane < count) __stcg((uint2*)(record(lane) + D), uint2{kEmpty, kEmpty});
    if (FINAL) {
      const float inv = sum > 0.f ? 1.f / sum : 0.f;
      const int num_q_heads = p.num_kv_heads * p.group_size;
      const int token = b * p.seqlen_q + r / p.group_size, head = h * p.group_size + r % p.group_size;
      const long long out = ((long long)token * num_q_heads + head) * D + lane * V;
#pragma unroll
      for (int k = 0; k < V; k += 2) store_pair(p, out + k, acc[k] * inv, acc[k + 1] * inv);
      if (lane == 0)
        p.lse[(long long)head * p.lse_row + token] = sum > 0.f ? (top + log2f(sum)) * 0.6931471805599453f : -INFINITY;
    } else {
      float* out = p.partial + ((long long)out_slot * rows + r) * kRecord;
#pragma unroll
      for (int k = 0; k < V; k += 2) __stcg((float2*)(out + lane * V + k), float2{acc[k], acc[k + 1]});
      if (lane == 0) __stcg((float2*)(out + D), float2{top, sum});
    }
  }
}

extern "C" __device__ const int decode_tiling[2] = {BN, kBytes};

extern "C" __global__ void __launch_bounds__(256, 1)
decode(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
       const __grid_constant__ CUtensorMap v_map, const __grid_constant__ DecodeParams p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u;
  uint8_t* smem = smem_raw + (base - smem_addr(smem_raw));
  const auto k_full = [&](int s) { return base + kBars + 8 * s; };
  const auto v_full = [&](int s) { return base + kBars + 8 * (kStages + s); };
  const auto empty = [&](int s) { return base + kBars + 8 * (2 * kStages + s); };
  const uint32_t q_full = base + kBars + 8 * (3 * kStages), q_empty = q_full + 8;
  volatile int* words = (volatile int*)(smem + kWords);

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rows = p.seqlen_q * p.group_size;
  if (warp == 1) {
    if (lane == 0) {
      for (int s = 0; s < kStages; ++s) { mbar_init(k_full(s), 4); mbar_init(v_full(s), 4); mbar_init(empty(s), 4); }
      mbar_init(q_full, 1);
      mbar_init(q_empty, 4);
      mbar_init_fence();
      tma_prefetch_map(&q_map);
      tma_prefetch_map(&k_map);
      tma_prefetch_map(&v_map);
    }
  } else if (warp == 0) {  // the length of the line, and where this block's part begins
    const auto tiles_of = [&](int b) { return b < p.batch ? (max(0, len_of(p, b)) + BN - 1) / BN : 0; };
    const int len0 = lane < p.batch ? len_of(p, lane) : 0;  // one load is all that a small batch needs
    const int tiles0 = (max(0, len0) + BN - 1) / BN;
    uint32_t total = tiles0;
    for (int b = lane + 32; b < p.batch; b += 32) total += tiles_of(b);
    for (int x = 16; x > 0; x /= 2) total += __shfl_xor_sync(~0u, total, x);
    const int parts = parts_of(total, p.num_kv_heads), part = min((int)blockIdx.x / p.num_kv_heads, parts);
    const uint32_t at = part_begin(total, part, parts), end = part_begin(total, min(part + 1, parts), parts);
    uint32_t before = 0;
    int found = -1;
    for (int b0 = 0; b0 < p.batch && found < 0 && at < end; b0 += 32) {
      const int tiles = b0 == 0 ? tiles0 : tiles_of(b0 + lane);
      uint32_t upto = tiles;
      for (int x = 1; x < 32; x *= 2) {
        const uint32_t y = __shfl_up_sync(~0u, upto, x);
        if (lane >= x) upto += y;
      }
      const uint32_t my_start = before + upto - tiles;
      const bool mine = tiles > 0 && at >= my_start && at < my_start + tiles;
      const uint32_t vote = __ballot_sync(~0u, mine);
      if (vote) {
        found = b0 + __ffs(vote) - 1;
        if (mine) {
          words[0] = found;
          words[10] = b0 == 0 ? len0 : len_of(p, b0 + lane);
          words[2] = my_start;
        }
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) {
      words[4] = total;
      words[6] = at;
      words[8] = end;
    }
  } else if (warp < 4) {  // a small page table comes to L2 while the lengths are on their way
    const int lines = (p.batch * p.pages_max + 31) / 32;
    const int line = threadIdx.x - 64;
    if (p.batch * p.pages_max <= 64 * 32 && line < lines)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.page_table + line * 32));
  } else {  // q rows past `rows` stay zero: their scores are finite and their results unused
    for (int i = threadIdx.x - 128; i < kTile / 16; i += 128) *(uint4*)(smem + kQ + i * 16) = uint4{0, 0, 0, 0};
    fence_async_proxy();
  }
  __syncthreads();

  Walk walk;
  const uint32_t total = words[4];
  const int parts = parts_of(total, p.num_kv_heads);
  const int h = blockIdx.x % p.num_kv_heads, part = blockIdx.x / p.num_kv_heads;
  walk.at = words[6];
  walk.end = words[8];
  if (walk.at < walk.end) {
    walk.b = words[0];
    walk.start = words[2];
    walk.len = words[10];
    walk.tiles = (walk.len + BN - 1) / BN;
  }

  Walk head = walk;  // this block's first unit: the only one of which it can hold the last part and others the rest
  if (warp < 4) {  // producers: copies of 16 or 64 rows by 64 columns, dealt to the four warps
    int stage = 0;
    uint32_t phase = 0, q_phase = 0;
    const int copy = lane * 4 + warp;
    const int piece = copy / kChunks, chunk = copy % kChunks;
    const bool works = piece < BN / p.piece_rows;
    const int copy_bytes = p.piece_rows * 128;
    for (; walk.unit(); walk.next(p)) {
      const int* pages = p.page_table + (p.shared ? 0 : (long long)walk.b * p.pages_max);
      if (threadIdx.x == 0) {
        mbar_wait(q_empty, q_phase ^ 1);
        mbar_expect(q_full, kChunks * rows * 128);
        for (int c = 0; c < kChunks; ++c)
          tma_load_3d(base + kQ + c * kChunk, &q_map, q_full, c * 64, h * p.group_size, walk.b * p.seqlen_q);
      }
      q_phase ^= 1;
      // Table entries come 32 at a time and 32 ahead of need, so that no copy waits for the table.
      const auto entries = [&](int at) { return pages[min(at + lane, p.pages_max - 1)]; };
      const int token0 = walk.from * BN + piece * p.piece_rows;
      int entry = token0 / p.page_size, row = token0 - entry * p.page_size;
      const int entry_step = BN / p.page_size, row_step = BN - entry_step * p.page_size;
      int held = walk.from * BN / p.page_size;
      int now = entries(held), later = entries(held + 32);
      for (int j = walk.from; j < walk.to; ++j) {
        const bool mine = works && j * BN + piece * p.piece_rows < walk.len;
        const int bytes = __popc(__ballot_sync(~0u, mine)) * copy_bytes;
        const int from_now = __shfl_sync(~0u, now, entry - held), from_later = __shfl_sync(~0u, later, entry - held - 32);
        const int page = entry - held < 32 ? from_now : from_later;
        mbar_wait(empty(stage), phase ^ 1);
        if (lane == 0) mbar_expect(k_full(stage), bytes);
        const uint32_t k = base + kKv + stage * 2 * kTile + chunk * kChunk + piece * copy_bytes;
        if (mine) tma_load_4d(k, &k_map, k_full(stage), chunk * 64, row, h, page);
        if (lane == 0) mbar_expect(v_full(stage), bytes);
        if (mine) tma_load_4d(k + kTile, &v_map, v_full(stage), chunk * 64, row, h, page);
        if (++stage == kStages) { stage = 0; phase ^= 1; }
        entry += entry_step;
        row += row_step;
        if (row >= p.page_size) { row -= p.page_size; ++entry; }
        if (__shfl_sync(~0u, entry, 0) >= held + 32) {  // lane 0 holds the warp's lowest entry
          now = later;
          held += 32;
          later = entries(held + 32);
        }
      }
    }
    if (warp == 3) {  // sequences without keys belong to no block's part
      const int num_q_heads = p.num_kv_heads * p.group_size;
      for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
        if (len_of(p, b) > 0) continue;
        const long long o = (long long)b * p.seqlen_q * num_q_heads * D;
        for (int i = lane; i < p.seqlen_q * num_q_heads * (D / 2); i += 32) store_pair(p, o + 2 * i, 0.f, 0.f);
        for (int i = lane; i < p.seqlen_q * num_q_heads; i += 32)
          p.lse[(long long)(i % num_q_heads) * p.lse_row + b * p.seqlen_q + i / num_q_heads] = -INFINITY;
      }
    }
  } else {
    const int tid = threadIdx.x - 128;
    const int w = warp - 4;
    const int row0 = w * 16 + lane / 4;
    const bool active = w * 16 < rows;  // the other warps only take part in the products
    int stage = 0;
    uint32_t phase = 0, q_phase = 0;
    for (; walk.unit(); walk.next(p)) {
      float o[D / 2], s[BN / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
      mbar_wait(q_full, q_phase);
      q_phase ^= 1;
      int seen[2];  // keys that this thread's rows see
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        seen[half] = row >= rows ? 0 : p.causal ? max(0, walk.len - p.seqlen_q + row / p.group_size + 1) : walk.len;
      }
      const int unmasked = (p.causal ? max(0, walk.len - p.seqlen_q + 1) : walk.len) / BN;
      for (int j = walk.from; j < walk.to; ++j) {
        const uint32_t k = base + kKv + stage * 2 * kTile, v = k + kTile;
        const uint32_t qd = desc_low(base + kQ, 0), kd = desc_low(k, 0), vd = desc_low(v, kChunk);
        mbar_wait(k_full(stage), phase);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < D / 16; ++ks) {
          const uint32_t step = ((ks / 4) * kChunk + (ks % 4) * 32) / 16;
          Wgmma<BN, Bf16>::ss(s, desc(qd + step), desc(kd + step), ks > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        uint32_t pk[BN / 4];
        if (j < unmasked) {
          if (active) softmax_tile<false>(s, o, pk, row_max, row_sum, seen, p.scale_log2);
        } else {
          const int limit[2] = {seen[0] - j * BN - 2 * (lane & 3), seen[1] - j * BN - 2 * (lane & 3)};
          if (active) softmax_tile<true>(s, o, pk, row_max, row_sum, limit, p.scale_log2);
        }
        if (!active) {
#pragma unroll
          for (int i = 0; i < BN / 4; ++i) pk[i] = 0;
        }
        mbar_wait(v_full(stage), phase);
        const int tail = walk.len - j * BN;
        if (tail < BN) {  // rows past the keys hold anything, and 0 * NaN is NaN
          for (int i = tail * 8 + tid; i < BN * 8; i += 128)
            for (int c = 0; c < kChunks; ++c) *(uint4*)(smem + (v - base) + c * kChunk + i * 16) = uint4{0, 0, 0, 0};
          fence_async_proxy();
          named_sync(1, 128);
        }
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < BN / 16; ++ks) Wgmma<D, Bf16>::rs(o, pk + 4 * ks, desc(vd + ks * (2048 / 16)), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        if (lane == 0) mbar_arrive(empty(stage));
        if (++stage == kStages) { stage = 0; phase ^= 1; }
      }
      if (lane == 0) mbar_arrive(q_empty);

      const bool whole = walk.from == 0 && walk.to == walk.tiles;
      const bool first_of_part = walk.at == part_begin(total, part, parts);
      const int num_q_heads = p.num_kv_heads * p.group_size;
      const int mine = 2 * blockIdx.x + (first_of_part ? 0 : 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        float sum = row_sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (row >= rows) continue;
        const float m = row_max[half] * p.scale_log2;
        if (whole) {
          const float inv = sum > 0.f ? 1.f / sum : 0.f;
          const int token = walk.b * p.seqlen_q + row / p.group_size, head = h * p.group_size + row % p.group_size;
          const long long out = ((long long)token * num_q_heads + head) * D + 2 * (lane & 3);
#pragma unroll
          for (int i = 0; i < D / 8; ++i) store_pair(p, out + 8 * i, o[4 * i + 2 * half] * inv, o[4 * i + 2 * half + 1] * inv);
          if ((lane & 3) == 0)
            p.lse[(long long)head * p.lse_row + token] = sum > 0.f ? (m + log2f(sum)) * 0.6931471805599453f : -INFINITY;
        } else {
          float* out = p.partial + ((long long)mine * rows + row) * kRecord;
          if ((lane & 3) == 0) __stcg((float2*)(out + D), float2{m, sum});
#pragma unroll
          for (int i = 0; i < D / 8; ++i)
            __stcg((float2*)(out + i * 8 + 2 * (lane & 3)), float2{o[4 * i + 2 * half], o[4 * i + 2 * half + 1]});
        }
      }
    }
  }
  // Merging comes only at the end: by now the lower-numbered parts are about to end too.
  if (head.unit() && !(head.from == 0 && head.to == head.tiles)) {
    __syncthreads();  // the producers would poll while the math still runs
    const int first = part_of(head.start, total, parts);
    const int first_slot = part_begin(total, first, parts) == head.start ? 0 : 1;
    const int count = part_of(head.start + head.tiles - 1, total, parts) - first + 1, index = part - first;
    const auto block = [&](int i) { return (first + i) * p.num_kv_heads + h; };
    const auto part_slot = [&](int i) { return 2 * block(i) + (i == 0 ? first_slot : 0); };
    if (count > 32) {
      const int group = index / kGroup * kGroup, groups = (count + kGroup - 1) / kGroup;
      if (index - group == kGroup - 1 || index == count - 1)
        merge<false>(p, 0, 0, rows, index - group + 1, [&](int i) { return part_slot(group + i); }, 2 * gridDim.x + blockIdx.x);
      if (index == count - 1)
        merge<true>(p, head.b, h, rows, groups,
                    [&](int g) { return 2 * gridDim.x + block(min(g * kGroup + kGroup, count) - 1); }, 0);
    } else if (index == count - 1) {
      merge<true>(p, head.b, h, rows, count, part_slot, 0);
    }
  }
}

}  // namespace suanpan
