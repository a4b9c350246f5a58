// Decode for Hopper (sm_90a) by clusters of blocks: few query rows per sequence over a paged KV cache of bf16, e4m3, 8-bit or
// 4-bit numbers, split at absolute key positions. Not here: appending K and V. Built once per HEAD_DIM and KV type.
//
// Every kv head (and every 16 query rows of it) has its own clusters, and these take all sequences in turn: tile t of a sequence
// belongs to block t mod blocks and there to warp t / blocks mod warps. So the load is even whatever the lengths are, a table
// entry can be fetched before the length is known, and a sequence's result depends on nothing but itself: no bit changes when
// the batch does. Each warp streams its tiles through a ring of its own (cp.async) with no block-wide step; they meet once a
// sequence: the warps' results are merged in shared memory, a slice of the sum goes to each block of the cluster, which adds
// the slices up (distributed shared memory), and several clusters of one head meet in global memory the way of decode.cu:
// words that wait at a bit pattern no arithmetic produces; only the last cluster waits, and for lower-numbered ones.
#include "decode_tile.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_TYPE
#define KV_TYPE 0
#endif

namespace suanpan {

// One of K and V as stored; strides in bytes (of `scale` in elements).
struct Pages {
  const char* data;      // [pages, page_size, num_kv_heads, head_dim]
  const float* scale;    // of quantised numbers: [pages, page_size, num_kv_heads] by strides, which may be 0
  long long page_stride, token_stride, head_stride;
  long long scale_page_stride, scale_token_stride, scale_head_stride;
};

struct ClusterParams {
  const char* q;          // [batch * seqlen_q, num_q_heads, head_dim] bf16, strides in bytes
  long long q_token_stride, q_head_stride;
  Pages k, v;
  void* o;                // [batch * seqlen_q, num_q_heads, head_dim] bf16, contiguous
  float* lse;             // [num_q_heads, batch * seqlen_q], natural logarithm
  const int* seqlens_k;   // [batch]
  const int* page_table;  // [batch, pages_max]
  float* partial;         // with parts > 1: [batch, units, parts - 1, rows, head_dim / 2, 4]; all bits one, left so
  const float* slopes;    // [num_q_heads] or null
  const float* sinks;     // [num_q_heads] or null
  int batch;
  int seqlen_q;           // row = token * group_size + head in group
  int num_kv_heads;
  int group_size;
  int page_size;          // tokens, a multiple of 16
  int pages_max;          // per sequence
  int parts;              // clusters that share a unit: a kv head and up to 8 NT query rows of it
  int row_groups;         // units of one kv head
  int left;               // keys before a row's own that it sees, or -1: all
  float scale;            // of the scores
  float softcap;          // 0: none
};

constexpr int D = HEAD_DIM, KV = KV_TYPE;
constexpr float kLog2e = 1.4426950408889634f;
constexpr uint32_t kEmpty = 0xFFFFFFFFu;  // a NaN that hardware never writes (its own is 0x7FFFFFFF)
constexpr int kRanksMax = 16;
using Tile = KvTile<D, KV>;

#ifndef WARPS
#define WARPS (D == 256 ? 4 : KV != kBf16 && D == 128 && NT == 1 ? 12 : 8)
#endif
#ifndef RING_MAX
#define RING_MAX 8
#endif
constexpr int kGroupBytes = 16 * Tile::kRow;
constexpr int MT = kGroupBytes >= 4096 ? 1 : kGroupBytes == 2048 ? 2 : 4;  // groups of 16 keys: a tile is 4 KB where it can be
constexpr int TK = 16 * MT;
constexpr int kHalf = MT * kGroupBytes;                          // K or V of a tile
constexpr int kSlot = kHalf + (KV == kBf16 ? 0 : TK * 4);        // with its scales
constexpr int kLanesOfRow = Tile::kPieces, kRowsAtOnce = 32 / kLanesOfRow;
constexpr int kQPitch = 2 * D + 16;

// Shared memory of a block with NT * 8 query rows.
template <int NT> struct Layout {
  static constexpr int W = WARPS;
  static constexpr int kRows = 8 * NT;
  static constexpr int kMergePitch = D + 4;                              // floats: a row's columns spread over the banks
  static constexpr int kMerge = 0;                                       // [W][kRows][kMergePitch] f32
  static constexpr int kWarpSums = kMerge + W * kRows * kMergePitch * 4;  // [W][kRows] (maximum, sum)
  static constexpr int kReceived = kWarpSums + W * kRows * 8;            // [2][kRows * D] f32, slices by rank
  static constexpr int kRankSums = kReceived + 2 * kRows * D * 4;        // [2][ranks][kRows] (maximum, sum)
  static constexpr int kQ = kRankSums + 2 * kRanksMax * kRows * 8;       // [kRows][kQPitch]
  static constexpr int kBars = kQ + kRows * kQPitch;
  static constexpr int kRing = (kBars + 16 + 127) / 128 * 128;           // [W][R] slots
  static constexpr int kLeft = (232448 - kRing) / (W * kSlot);
  static constexpr int R = kLeft < RING_MAX ? kLeft : RING_MAX;          // halves in flight a warp
  static constexpr int kBytes = kRing + W * R * kSlot;
  static_assert(R >= 2, "no room for a ring");
};

__device__ __forceinline__ float4 load_words(const float* p) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ bool is_empty(float x) { return __float_as_uint(x) == kEmpty; }

// The first sequence from `b` on that has keys, `len` of them.
__device__ __forceinline__ void skip_empty(const ClusterParams& p, int& b, int& len) {
  while (len <= 0 && ++b < p.batch) len = p.seqlens_k[b];
}

template <int NT, bool EXTRA>
__device__ __forceinline__ void decode_body(const ClusterParams& p) {
  using L = Layout<NT>;
  constexpr int R = L::R, W = L::W;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_addr(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int ranks = cluster_ranks(), rank = cluster_rank();
  const int units = p.num_kv_heads * p.row_groups;
  const int unit = (int)blockIdx.x / ranks % units, part = (int)blockIdx.x / ranks / units;
  const int h = unit % p.num_kv_heads, row_base = unit / p.num_kv_heads * L::kRows;
  const int rows = min(L::kRows, p.seqlen_q * p.group_size - row_base);
  const int step = p.parts * ranks * W;                      // tiles from one of a warp to its next
  const int first = part * ranks + rank + p.parts * ranks * warp;
  const int num_q_heads = p.num_kv_heads * p.group_size, total_q = p.batch * p.seqlen_q;

  // The tiles of a sequence that are this warp's: `count`, `step` apart from `tile` on.
  struct Share { int tile, count; };
  const auto share_of = [&](int len) {
    int tile = first;
    if (EXTRA && p.left >= 0) {  // the first row sees no key before these
      const int skipped = max(0, len - p.seqlen_q - p.left) / TK;
      if (skipped > first) tile += (skipped - first + step - 1) / step * step;
    }
    const int tiles = (len + TK - 1) / TK;
    return Share{tile, tile < tiles ? (tiles - 1 - tile) / step + 1 : 0};
  };
  // Table entries of the next 32 / MT tiles from `tile` on, a lane for each 16 keys: page and row in it.
  int page = 0, row_in_page = 0;
  const auto fetch_entries = [&](int b, int tile) {
    const uint32_t token = (uint32_t)(tile + lane / MT * step) * TK + lane % MT * 16;
    const uint32_t entry = token / p.page_size;
    row_in_page = token - entry * p.page_size;
    page = entry < (uint32_t)p.pages_max ? p.page_table[(long long)b * p.pages_max + entry] : 0;
  };

  // ---- what comes first: length, table, q, all at once -----------------------------------------------------------------
  int in_b = 0, in_len = p.seqlens_k[0];
  fetch_entries(0, first);
  int b = 0, len = in_len;

  // q of a sequence passes through registers: it is on its way while the sequence before is merged.
  constexpr int kQPieces = L::kRows * D / 8, kQLoads = (kQPieces + W * 32 - 1) / (W * 32);
  uint4 q_held[kQLoads];
  const auto fetch_q = [&](int b) {
#pragma unroll
    for (int i = 0; i < kQLoads; ++i) {
      const int n = threadIdx.x + i * W * 32, row = n / (D / 8);
      q_held[i] = uint4{0, 0, 0, 0};
      if (row < rows && b < p.batch) {
        const int r = row_base + row, token = b * p.seqlen_q + r / p.group_size, head = h * p.group_size + r % p.group_size;
        q_held[i] = *(const uint4*)(p.q + token * p.q_token_stride + head * p.q_head_stride + n % (D / 8) * 16);
      }
    }
  };
  const auto store_q = [&]() {
#pragma unroll
    for (int i = 0; i < kQLoads; ++i) {
      const int n = threadIdx.x + i * W * 32;
      uint4 x = q_held[i];
      if (KV == kInt4)  // 0 4 1 5 2 6 3 7
        x = uint4{__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
      if (n < kQPieces) *(uint4*)(smem + L::kQ + n / (D / 8) * kQPitch + n % (D / 8) * 16) = x;
    }
  };
  fetch_q(0);

  const auto bar = [&](int n) { return base + L::kBars + 8 * n; };
  if (threadIdx.x == 0) {
    mbar_init(bar(0), 1);
    mbar_init(bar(1), 1);
    mbar_init_fence();
  }
  __syncwarp();
  cluster_arrive();

  // ---- loading: halves of tiles, K and V in turn -------------------------------------------------------------------------
  const uint32_t ring = base + L::kRing + warp * R * kSlot;
  Share in = share_of(in_len);
  int in_at = 0;  // of the held entries
  if (in_len <= 0) {
    skip_empty(p, in_b, in_len);
    b = in_b;
    len = in_len;
    if (in_b < p.batch) {
      in = share_of(in_len);
      fetch_entries(in_b, in.tile);
      fetch_q(in_b);
    }
  } else if (EXTRA && p.left >= 0) {
    fetch_entries(0, in.tile);
  }
  const auto next_in = [&]() {  // the next sequence of which this warp has tiles
    while (in.count == 0 && in_b < p.batch) {
      in_len = 0;
      skip_empty(p, in_b, in_len);
      if (in_b >= p.batch) break;
      in = share_of(in_len);
      in_at = 0;
      if (in.count > 0) fetch_entries(in_b, in.tile);
    }
  };
  next_in();
  const int lane_row = lane / kLanesOfRow, lane_piece = lane % kLanesOfRow;
  const uint32_t lane_dst = lane_row * Tile::kRow, lane_place = lane_piece ^ Tile::place(lane_row);
  const auto load_half = [&](int slot, const Pages& x, bool last_of_tile) {
    if (in.count > 0) {
      const int keys = in_len - in.tile * TK;  // of this tile, and beyond
      const uint32_t dst = ring + slot * kSlot + lane_dst;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const int from = __shfl_sync(~0u, page, in_at + m), row = __shfl_sync(~0u, row_in_page, in_at + m);
        // Entries past the keys may be anything: those pieces become zeros and read nothing.
        const bool some = 16 * m < keys;
        const char* src = x.data + h * x.head_stride + lane_piece * 16;
        if (some) src += from * x.page_stride + (row + lane_row) * x.token_stride;
#pragma unroll
        for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
          const int r = 16 * m + i * kRowsAtOnce;
          copy_16(dst + r * Tile::kRow + ((lane_place ^ Tile::place(i * kRowsAtOnce)) * 16), src, r + lane_row < keys ? 16 : 0);
          if (some) src += kRowsAtOnce * x.token_stride;
        }
      }
      if (KV != kBf16) {
#pragma unroll
        for (int i = 0; i < (TK + 31) / 32; ++i) {
          const int n = lane + 32 * i;
          const int from = __shfl_sync(~0u, page, in_at + (n / 16) % MT), row = __shfl_sync(~0u, row_in_page, in_at + (n / 16) % MT);
          const float* src = x.scale + h * x.scale_head_stride;
          if (n < keys) src += from * x.scale_page_stride + (row + n % 16) * x.scale_token_stride;
          if (n < TK) copy_4(ring + slot * kSlot + kHalf + n * 4, src, n < keys ? 4 : 0);
        }
      }
      if (last_of_tile) {
        in.tile += step;
        in_at += MT;
        if (--in.count == 0) next_in();
        else if (in_at == 32 / MT * MT) {
          in_at = 0;
          fetch_entries(in_b, in.tile);
        }
      }
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < R; ++i) load_half(i, i & 1 ? p.v : p.k, i & 1);

  // ---- a block's slice of a sequence, sent by every block of the cluster ------------------------------------------------------
  const int slice = rows * D / ranks;  // floats
  int merged = 0;                      // sequences so far: the parity names buffer and barrier
  const auto finish = [&](int b, float2 acc, float top, float sum, int at) {
    const int r = row_base + at / D, d = at % D;
    const int token = b * p.seqlen_q + r / p.group_size, head = h * p.group_size + r % p.group_size;
    if (EXTRA && p.sinks) {
      const float sink = p.sinks[head] * kLog2e, m = fmaxf(top, sink);
      const float w = exp2f(top - m);  // m is finite: a sink is
      acc.x *= w;
      acc.y *= w;
      sum = sum * w + exp2f(sink - m);
      top = m;
    }
    const float inv = sum > 0.f ? 1.f / sum : 0.f;
    *(uint32_t*)((uint16_t*)p.o + ((long long)token * num_q_heads + head) * D + d) = pack_bf16(acc.x * inv, acc.y * inv);
    if (d == 0) p.lse[(long long)head * total_q + token] = sum > 0.f ? (top + log2f(sum)) * 0.6931471805599453f : -INFINITY;
  };
  const auto collect = [&](int b) {  // the slice of the sequence merged last
    const int buffer = (merged - 1) & 1;
    if ((int)threadIdx.x >= slice / 2) return;
    mbar_wait_cluster(bar(buffer), (merged - 1) >> 1 & 1);
    for (int e = threadIdx.x; e < slice / 2; e += W * 32) {
      const int at = rank * slice + 2 * e, row = at / D;
      const float2* sums = (const float2*)(smem + L::kRankSums) + buffer * kRanksMax * L::kRows + row;
      const float2* from = (const float2*)(smem + L::kReceived) + (buffer * L::kRows * D) / 2 + e;
      float top = -INFINITY;
      for (int s = 0; s < ranks; ++s) top = fmaxf(top, sums[s * L::kRows].x);
      float sum = 0.f;
      float2 acc = {0.f, 0.f};
      for (int s = 0; s < ranks; ++s) {
        const float2 ml = sums[s * L::kRows], x = from[s * (slice / 2)];
        const float w = ml.x == -INFINITY ? 0.f : exp2f(ml.x - top);
        sum += w * ml.y;
        acc.x += w * x.x;
        acc.y += w * x.y;
      }
      if (p.parts > 1) {
        const long long record = ((long long)b * units + unit) * (p.parts - 1), pairs = (long long)L::kRows * D / 2;
        float* mine = p.partial + (record * pairs + at / 2) * 4;
        if (part < p.parts - 1) {
          __stcg((float4*)(mine + part * pairs * 4), float4{acc.x, acc.y, top, sum});
          continue;
        }
        float m = top, own_acc_x = acc.x, own_acc_y = acc.y, own_sum = sum;
        const float own_top = top;
        acc = {0.f, 0.f};
        sum = 0.f;
        for (int i = 0; i < p.parts - 1; ++i) {  // part by part, in order
          float4 x;
          do { x = load_words(mine + i * pairs * 4); } while (is_empty(x.x) || is_empty(x.y) || is_empty(x.z) || is_empty(x.w));
          __stcg((uint4*)(mine + i * pairs * 4), uint4{kEmpty, kEmpty, kEmpty, kEmpty});
          m = i == 0 ? x.z : fmaxf(top, x.z);
          const float a = top == -INFINITY || i == 0 ? 0.f : exp2f(top - m), w = x.z == -INFINITY ? 0.f : exp2f(x.z - m);
          acc.x = acc.x * a + x.x * w;
          acc.y = acc.y * a + x.y * w;
          sum = sum * a + x.w * w;
          top = m;
        }
        m = fmaxf(top, own_top);
        const float a = top == -INFINITY ? 0.f : exp2f(top - m), w = own_top == -INFINITY ? 0.f : exp2f(own_top - m);
        acc = {acc.x * a + own_acc_x * w, acc.y * a + own_acc_y * w};
        sum = sum * a + own_sum * w;
        top = m;
      }
      finish(b, acc, top, sum, at);
    }
  };

  store_q();
  __syncthreads();
  cluster_wait();

  // ---- the sequences ---------------------------------------------------------------------------------------------------------
  int slot = 0, before = -1;
  const auto next_slot = [&]() { slot = slot + 1 == R ? 0 : slot + 1; };
  while (b < p.batch) {
    const Share share = share_of(len);
    float o[D / 16][NT][4], row_max[NT][2], row_sum[NT][2];
    int seen[NT][2];  // keys that query row 8 n + 2 c + e sees end here
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * c + e;
        row_max[n][e] = -INFINITY;
        row_sum[n][e] = 0.f;
        seen[n][e] = row < rows ? len - p.seqlen_q + (row_base + row) / p.group_size + 1 : 0;
      }
#pragma unroll
      for (int t = 0; t < D / 16; ++t) o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.f;
    }
    const int all_see = len - p.seqlen_q + 1;  // keys that every row sees end here
    const int all_from = EXTRA && p.left >= 0 ? len - 1 - p.left : 0;  // and begin here
    for (int j = 0; j < share.count; ++j) {
      const int key0 = (share.tile + j * step) * TK;
      copies_wait<R - 1>();
      __syncwarp();
      float s[MT][NT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
      scores<D, KV, MT, NT>(s, ring + slot * kSlot, base + L::kQ, kQPitch, lane);
      const float* scale_at = (const float*)(smem + (ring - base) + slot * kSlot + kHalf) + g;
      if (KV != kBf16) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float f = scale_at[16 * m + (i >> 1) * 8];
#pragma unroll
            for (int n = 0; n < NT; ++n) s[m][n][i] *= f;
          }
        }
      }
      __syncwarp();
      load_half(slot, R & 1 ? p.v : p.k, R & 1);
      next_slot();
      const float scale_log2 = EXTRA ? 1.f : p.scale * kLog2e;
      if (EXTRA) {  // natural scores become powers of two
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = min(8 * n + 2 * c + e, rows - 1) + row_base;
            const float slope = p.slopes ? p.slopes[h * p.group_size + row % p.group_size] : 0.f;
#pragma unroll
            for (int i = e; i < 4; i += 2) {
#pragma unroll
              for (int m = 0; m < MT; ++m) {
                float x = s[m][n][i] * p.scale;
                if (p.softcap > 0.f) x = p.softcap * (1.f - __fdividef(2.f, exp2f(x / p.softcap * (2.f * kLog2e)) + 1.f));
                x -= slope * fabsf((float)(seen[n][e] - 1 - (key0 + 16 * m + g + (i >> 1) * 8)));
                s[m][n][i] = x * kLog2e;
              }
            }
          }
        }
      }
      if (key0 + TK > all_see || (EXTRA && key0 < all_from)) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = key0 + 16 * m + g + (i >> 1) * 8;
              if (key >= seen[n][i & 1] || (EXTRA && p.left >= 0 && key < seen[n][i & 1] - 1 - p.left)) s[m][n][i] = -INFINITY;
            }
          }
        }
      }
      float off[NT][2];
      bool moved = false;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float corr[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float m = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
          for (int i = 1; i < MT; ++i) m = fmaxf(m, fmaxf(s[i][n][e], s[i][n][e + 2]));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
          const bool up = (m - row_max[n][e]) * scale_log2 > 8.f;  // rescale rarely: see forward.cu
          corr[e] = up ? exp2_fast((row_max[n][e] - m) * scale_log2) : 1.f;
          row_max[n][e] = up ? m : row_max[n][e];
          off[n][e] = row_max[n][e] == -INFINITY ? 0.f : row_max[n][e] * scale_log2;
          row_sum[n][e] *= corr[e];
          moved |= up;
        }
        if (__any_sync(~0u, moved)) {
#pragma unroll
          for (int t = 0; t < D / 16; ++t) {
            o[t][n][0] *= corr[0];
            o[t][n][1] *= corr[1];
            o[t][n][2] *= corr[0];
            o[t][n][3] *= corr[1];
          }
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale_log2, -off[n][i & 1]));
            row_sum[n][i & 1] += s[m][n][i];
          }
        }
      }
      copies_wait<R - 1>();
      __syncwarp();
      uint32_t probs[MT][NT][2];
      scale_at = (const float*)(smem + (ring - base) + slot * kSlot + kHalf) + g;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float f = KV == kBf16 ? 1.f : scale_at[16 * m + 8 * e];
#pragma unroll
          for (int n = 0; n < NT; ++n)
            probs[m][n][e] = transpose_8x8(KV == kBf16 ? pack_bf16(s[m][n][2 * e], s[m][n][2 * e + 1])
                                                      : pack_bf16(s[m][n][2 * e] * f, s[m][n][2 * e + 1] * f));
        }
      }
      mix<D, KV, MT, NT>(o, ring + slot * kSlot, probs, lane);
      __syncwarp();
      load_half(slot, R & 1 ? p.k : p.v, !(R & 1));
      next_slot();
    }

    // ---- merging: warps, then blocks; clusters when the slice is collected --------------------------------------------------
    if (before >= 0) collect(before);
    const float to_log2 = EXTRA ? 1.f : p.scale * kLog2e;
    float* merge = (float*)(smem + L::kMerge) + warp * L::kRows * L::kMergePitch;
    float2* warp_sums = (float2*)(smem + L::kWarpSums);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = row_sum[n][e];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        const int row = 8 * n + 2 * c + e;
        if (g == 0) warp_sums[warp * L::kRows + row] = float2{row_max[n][e] * to_log2, sum};
        if (row < rows && share.count > 0) {
#pragma unroll
          for (int t = 0; t < D / 16; ++t) {
            merge[row * L::kMergePitch + Tile::out_dim(g, t, 0)] = o[t][n][e];
            merge[row * L::kMergePitch + Tile::out_dim(g, t, 1)] = o[t][n][e + 2];
          }
        }
      }
    }
    int next_b = b, next_len = 0;
    skip_empty(p, next_b, next_len);
    fetch_q(next_b);
    __syncthreads();
    const int buffer = merged & 1;
    if (threadIdx.x == 0) mbar_expect(bar(buffer), ranks * (slice * 4 + rows * 8));
    for (int e = threadIdx.x; e < rows * D / 2; e += W * 32) {
      const int row = e / (D / 2), dest = 2 * e / slice;
      const float2* sums = warp_sums + row;
      const float2* from = (const float2*)(smem + L::kMerge + row * L::kMergePitch * 4) + e % (D / 2);
      float top = -INFINITY;
#pragma unroll
      for (int w = 0; w < W; ++w) top = fmaxf(top, sums[w * L::kRows].x);
      float2 acc = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float m = sums[w * L::kRows].x;
        if (m == -INFINITY) continue;  // and nothing was written there
        const float f = exp2f(m - top);
        const float2 x = from[w * L::kRows * L::kMergePitch / 2];
        acc.x += f * x.x;
        acc.y += f * x.y;
      }
      const uint32_t to = base + L::kReceived + buffer * L::kRows * D * 4 + (rank * slice + 2 * e - dest * slice) * 4;
      send_pair(cluster_addr(to, dest), acc.x, acc.y, cluster_addr(bar(buffer), dest));
    }
    for (int e = threadIdx.x; e < rows * ranks; e += W * 32) {
      const int row = e / ranks, dest = e % ranks;
      float top = -INFINITY, sum = 0.f;
#pragma unroll
      for (int w = 0; w < W; ++w) top = fmaxf(top, warp_sums[w * L::kRows + row].x);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float2 x = warp_sums[w * L::kRows + row];
        sum += x.x == -INFINITY ? 0.f : exp2f(x.x - top) * x.y;
      }
      const uint32_t to = base + L::kRankSums + ((buffer * kRanksMax + rank) * L::kRows + row) * 8;
      send_pair(cluster_addr(to, dest), top, sum, cluster_addr(bar(buffer), dest));
    }
    ++merged;
    before = b;
    b = next_b;
    len = next_len;
    if (b < p.batch) {
      store_q();
      __syncthreads();
    }
  }
  if (before >= 0) collect(before);

  // Sequences without keys.
  if (part == 0) {
    for (int e = 0; e < p.batch; ++e) {
      if (p.seqlens_k[e] > 0) continue;
      for (int i = threadIdx.x; i < slice / 2; i += W * 32) finish(e, float2{0.f, 0.f}, -INFINITY, 0.f, rank * slice + 2 * i);
    }
  }
}

extern "C" __device__ const int decode_cluster_tiling[4] = {Layout<1>::kBytes, Layout<2>::kBytes, Layout<1>::W * 32, Layout<2>::W * 32};

extern "C" __global__ void __launch_bounds__(Layout<1>::W * 32, 1) decode_8(const __grid_constant__ ClusterParams p) { decode_body<1, false>(p); }
extern "C" __global__ void __launch_bounds__(Layout<2>::W * 32, 1) decode_16(const __grid_constant__ ClusterParams p) { decode_body<2, false>(p); }
extern "C" __global__ void __launch_bounds__(Layout<1>::W * 32, 1) decode_8_scores(const __grid_constant__ ClusterParams p) { decode_body<1, true>(p); }
extern "C" __global__ void __launch_bounds__(Layout<2>::W * 32, 1) decode_16_scores(const __grid_constant__ ClusterParams p) { decode_body<2, true>(p); }

}  // namespace suanpan
