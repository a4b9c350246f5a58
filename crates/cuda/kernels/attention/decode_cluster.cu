// Decode for Hopper (sm_90a) by clusters of blocks: few query rows per sequence over a paged KV cache of bf16, e4m3, 8-bit or
// 4-bit numbers, split at absolute key positions. Not here: appending K and V. Built once per HEAD_DIM and KV type.
//
// Every kv head (and every 16 query rows of it) has its own clusters. Either these take all sequences in turn, tile t of a
// sequence going to block t mod blocks and there to warp t / blocks mod warps: the load is even whatever the lengths are, a table
// entry can be fetched before the length is known, and a sequence's result depends on nothing but itself, so that no bit changes
// when the batch does. Or (`line`) all tiles form one line that is cut into equal parts, a cluster each, as in decode.cu: fewer
// merges where sequences are many.
// Each warp streams its tiles through a ring of its own (cp.async) with no block-wide step; they meet once a sequence: the warps'
// results are merged in shared memory, a slice of the sum goes to each block of the cluster, which adds the slices up
// (distributed shared memory), and several clusters of one head meet in global memory the way of decode.cu: words that wait at a
// bit pattern no arithmetic produces; only the cluster with the last piece waits, and for lower-numbered ones.
#include "decode_cluster.cuh"
#include "decode_rope.cuh"

namespace suanpan {

// Hides where x comes from, so that what is worked out from it stays where it is used: hoisted out of the loop over sequences it
// would hold registers all the time.
__device__ __forceinline__ int here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <int N> struct Number { static constexpr int value = N; };

__device__ __forceinline__ float4 load_words(const float* p) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ bool is_empty(float x) { return __float_as_uint(x) == kEmpty; }

// LINE: whether tiles form one line: 0 no, 1 yes, 2 as p.line says. EXTRA: softcap, ALiBi, window, sinks, keys that come with the
// query, a result to join, f32 out.
template <int NT, bool EXTRA, int LINE>
__device__ __forceinline__ void decode_body(const ClusterParams& p) {
  const bool line = LINE == 2 ? p.line : LINE;
  using L = Layout<NT, EXTRA>;
  constexpr int R = L::R, W = L::W;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_addr(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int ranks = cluster_ranks(), rank = cluster_rank(), part = cluster_index();

  // ---- what comes first: length and table at once, neither waits for the other ---------------------------------------------------
  const int step = (line ? 1 : p.parts) * ranks * W;  // tiles from one of a warp to its next
  const int offset = (line ? 0 : part * ranks) + rank + (line ? 1 : p.parts) * ranks * warp;
  // Table entries of the next 32 / MT tiles from `tile` on, a lane for each 16 keys: the offset of the data; of quantised numbers the
  // page and, below, its part of 16 keys.
  const auto fetch_entries = [&](int b, int tile) {
    const uint32_t sixteen = (uint32_t)(tile + lane / MT * step) * MT + lane % MT, page_16 = p.page_size / 16;
    uint32_t entry = __umulhi(sixteen, p.page_inverse);
    uint32_t rest = sixteen - entry * page_16;
    if (rest >= page_16) { ++entry; rest -= page_16; }
    const int page = entry < (uint32_t)p.pages_max ? p.page_table[(p.shared ? 0 : (long long)b * p.table_row) + entry] : 0;
    return KV == kBf16 ? page * p.page_stride + rest * 16 * p.token_stride : (long long)page << 32 | rest;
  };
  const auto data_of = [&](long long entry) {
    return KV == kBf16 ? entry : (entry >> 32) * p.page_stride + (long long)(uint32_t)entry * (16 * p.token_stride);
  };
  // Keys after the last that a row of token `token` sees.
  const auto behind = [&](int token) { return p.causal ? p.seqlen_q - 1 - token : 0; };
  // Tiles of a sequence that no row sees, for a window, and those after them.
  const auto hidden_tiles = [&](int len) { return EXTRA && p.left >= 0 ? max(0, len - behind(0) - 1 - p.left) / TK : 0; };
  const auto tiles_of = [&](int len) { return len > 0 ? (uint32_t)((len + TK - 1) / TK - hidden_tiles(len)) : 0u; };

  const auto len_of = [&](int b) { return p.seqlens_k[p.shared ? 0 : b]; };

  int b = 0;
  uint32_t part_at = 0, part_end = ~0u, start = 0;  // of the line; where sequence b begins on it
  // In shared memory: of the line's sequence that ends in this part and began in another which it is, the pieces before, where the
  // first lies (two words); tiles of a part, and parts that have one more (which every thread writes alike and reads as its own).
  int* const words = (int*)(smem + L::kBars + 16);
  const auto part_begin = [&](uint32_t i) { return words[4] * i + min(i, (uint32_t)words[5]); };
  if (line) {
    uint32_t total = 0;
#pragma unroll 1
    for (int i = lane; i < p.batch; i += 32) total += tiles_of(len_of(i));
    for (int x = 16; x > 0; x /= 2) total += __shfl_xor_sync(~0u, total, x);
    words[4] = total / p.parts;
    words[5] = total % p.parts;
    part_at = part_begin(part);
    part_end = part_begin(part + 1);
    b = p.batch;
#pragma unroll 1
    for (int b0 = 0; b0 < p.batch && part_at < part_end; b0 += 32) {
      const uint32_t tiles = b0 + lane < p.batch ? tiles_of(len_of(b0 + lane)) : 0;
      uint32_t upto = tiles;
      for (int x = 1; x < 32; x *= 2) {
        const uint32_t y = __shfl_up_sync(~0u, upto, x);
        if (lane >= x) upto += y;
      }
      const uint32_t vote = __ballot_sync(~0u, start + upto > part_at);
      if (vote) {
        b = b0 + __ffs(vote) - 1;
        start += __shfl_sync(~0u, upto - tiles, __ffs(vote) - 1);
        break;
      }
      start += __shfl_sync(~0u, upto, 31);
    }
  }
  if (part == 0) b = 0;  // sequences without keys belong to the part before them, the first ones to the first
  int in_b = b - 1, in_len = 0, in_tile = 0, in_end = 0, in_at = 0, in_v = 0;
  long long in_entries = 0;
  uint32_t in_start = start;
  int next_len = b < p.batch ? len_of(b) : 0;
  long long next_entries = fetch_entries(min(b, p.batch - 1), offset);

  const int h = blockIdx.y, row_base = blockIdx.z * L::kRows;
  const int rows = min(L::kRows, p.seqlen_q * p.group_size - row_base);
  const auto bar = [&](int n) { return base + L::kBars + 8 * n; };
  const auto token_of = [&](int row) { return (row * p.group_inverse) >> 16; };  // row / group_size, exact below 64

  // q of a sequence passes through registers: it is on its way while the sequence before is worked on.
  constexpr int kQPieces = L::kRows * D / 8, kQLoads = (kQPieces + W * 32 - 1) / (W * 32);
  constexpr bool kHoldQ = kQLoads <= 2;  // where registers allow
  uint4 q_held[kQLoads];
  int q_b = -1;
  const auto fetch_q = [&](int b) {
    q_b = b;
    const int thread = here(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kQLoads; ++i) {
      const int n = thread + i * W * 32, row = n / (D / 8), r = row_base + row, token = token_of(r);
      q_held[i] = uint4{0, 0, 0, 0};
      if (row < rows && b < p.batch)
        q_held[i] = *(const uint4*)(p.q + (b * p.seqlen_q + token) * p.q_token_stride +
                                    (h * p.group_size + r - token * p.group_size) * p.q_head_stride + n % (D / 8) * 16);
    }
  };

  if (threadIdx.x == 0) {
    mbar_init(bar(0), 1);
    mbar_init(bar(1), 1);
    mbar_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  if (kHoldQ) fetch_q(b);

  // ---- loading: halves of tiles, K and V in turn -----------------------------------------------------------------------------
  const uint32_t ring = base + L::kRing + warp * R * kSlot;
  const int lane_row = lane / kLanesOfRow, lane_piece = lane % kLanesOfRow;
  // threadIdx.y is 0 and keeps the address out of uniform registers: nvcc 13.0 builds copies with a policy to such an address as
  // illegal instructions.
  const uint32_t lane_dst = ring + lane_row * Tile::kRow + threadIdx.y, lane_place = lane_piece ^ Tile::place(lane_row);
  const long long lane_src = h * p.head_stride + lane_row * p.token_stride + lane_piece * 16;
  long long more = kRowsAtOnce * p.token_stride;
  char *k_src = p.k + lane_src, *v_src = p.v + lane_src;
  asm volatile("" : "+l"(more), "+l"(k_src), "+l"(v_src));  // held, not worked out again for every half
  // Rows of half a line are fetched with their neighbours', which are for another head's block: those must stay until it comes.
  constexpr bool kOnce = Tile::kRow >= 128;
  const uint64_t policy = kOnce ? evict_first() : 0;
  const auto load_half = [&](uint32_t slot_at) {
    while (in_tile >= in_end && in_b < p.batch) {  // the next sequence of which this warp has tiles
      in_start += tiles_of(in_len);
      if (++in_b >= p.batch || in_start >= part_end) {
        in_b = p.batch;
        break;
      }
      in_len = next_len;
      in_entries = next_entries;
      if (in_b + 1 < p.batch) {
        next_len = len_of(in_b + 1);
        next_entries = fetch_entries(in_b + 1, offset);
      }
      const int hidden = hidden_tiles(in_len), from = hidden + (part_at > in_start ? part_at - in_start : 0);
      in_tile = from + offset;
      in_end = hidden + min(tiles_of(in_len), part_end - in_start);
      in_at = 0;
      if (from > 0 && in_tile < in_end) in_entries = fetch_entries(in_b, in_tile);
    }
    if (in_tile < in_end) {
      char* const from = in_v ? v_src : k_src;
      const int keys = in_len - in_tile * TK;  // of this tile, and beyond
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        // Entries past the keys may be anything: those pieces become zeros and read nothing.
        char* src = from + data_of(__shfl_sync(~0u, in_entries, in_at + m));
        if (16 * m >= keys) src = p.k;
        const uint32_t dst = lane_dst + slot_at + 16 * m * Tile::kRow;
        const auto dst_of = [&](int i) { return dst + i * kRowsAtOnce * Tile::kRow + ((lane_place ^ Tile::place(i * kRowsAtOnce)) * 16); };
        const int first_new = EXTRA && KV == kBf16 && p.k_new ? keys - p.seqlen_q - 16 * m : 16;  // of these 16 keys
        if (first_new < 16) {
#pragma unroll 1
          for (int i = 0; i < 16 / kRowsAtOnce; ++i, src += more) {
            const int row = i * kRowsAtOnce + lane_row, at = row - first_new;  // of the new tokens
            const uint32_t to = dst + i * kRowsAtOnce * Tile::kRow + ((lane_piece ^ Tile::place(row)) * 16);
            if (at >= 0 && at < p.seqlen_q) {
              const char* fresh = (in_v ? p.v_new : p.k_new) + ((long long)(in_b * p.seqlen_q + at) * p.num_kv_heads + h) * D * 2;
              const uint4 x = in_v || !p.rotary ? *(const uint4*)(fresh + lane_piece * 16)
                                                : rotated_k(fresh, lane_piece, in_len - p.seqlen_q + at, p.rotary, p.interleaved, p.cos, p.sin);
              store_shared_16(to, x);
              *(uint4*)src = x;
            } else {
              copy_16<kOnce>(to, src, 16 * m + row < keys ? 16 : 0, policy);
            }
          }
        } else if (16 * m + 16 <= keys) {
#pragma unroll
          for (int i = 0; i < 16 / kRowsAtOnce; ++i, src += more) copy_16<kOnce>(dst_of(i), src, policy);
        } else {
#pragma unroll
          for (int i = 0; i < 16 / kRowsAtOnce; ++i, src += more)  // rows past the keys read nothing, wherever this points
            copy_16<kOnce>(dst_of(i), src, 16 * m + i * kRowsAtOnce + lane_row < keys ? 16 : 0, policy);
        }
      }
      if (KV != kBf16) {
        const float* const scales = (in_v ? p.v_scale : p.k_scale) + h * p.scale_head_stride;
#pragma unroll
        for (int i = 0; i < (TK + 31) / 32; ++i) {
          const int n = lane + 32 * i;
          const long long entry = __shfl_sync(~0u, in_entries, in_at + (n / 16) % MT);
          const long long at = (entry >> 32) * p.scale_page_stride + (long long)((uint32_t)entry * 16 + n % 16) * p.scale_token_stride;
          if (n < TK) copy_4(ring + slot_at + kHalf + n * 4, n < keys ? scales + at : scales, n < keys ? 4 : 0);
        }
      }
      if (in_v) {
        in_tile += step;
        in_at += MT;
        if (in_at == 32 && in_tile < in_end) {
          in_at = 0;
          in_entries = fetch_entries(in_b, in_tile);
        }
      }
      in_v ^= 1;
    }
    copies_commit();
  };

  // ---- a block's slice of a sequence, sent by every block of the cluster ---------------------------------------------------------
  // A slice that stays in its block is stored, not sent. (4-bit numbers leave no register for the choice: it is sent in any case.)
  const bool alone = KV != kInt4 && ranks == 1;
  const int ranks_log2 = 31 - __clz(ranks), slice = (rows * D) >> ranks_log2;  // floats
  const int rows_inverse = (int)__fdividef(65536.f, rows) + 1;                 // exact quotients below 512
  const int slice_row = rank * slice / D;
  int merged = 0;  // sequences so far: the parity names buffer and barrier
  // Columns d, d + 1 of a row: what has been summed up, the maximum that it is relative to, and the weights' sum.
  const auto finish = [&](int b, int row, int d, float2 acc, float top, float sum) {
    const int r = row_base + row, token = token_of(r), head = h * p.group_size + r - token * p.group_size;
    const long long at = ((long long)(b * p.seqlen_q + token) * p.num_kv_heads * p.group_size + head) * D + d;
    float* const lse = p.lse + (long long)head * p.lse_row + b * p.seqlen_q + token;
    const auto join = [&](float logit, float2 value) {
      const float m = fmaxf(top, logit), low = m == -INFINITY ? 0.f : m, a = exp2_fast(top - low), w = exp2_fast(logit - low);
      acc.x = acc.x * a + value.x * w;
      acc.y = acc.y * a + value.y * w;
      sum = sum * a + w;
      top = m;
    };
    if (EXTRA && p.prior_o) join(p.prior_lse[lse - p.lse] * kLog2e, *(const float2*)(p.prior_o + at));
    if (EXTRA && p.sinks) join(p.sinks[head] * kLog2e, float2{0.f, 0.f});
    const float inv = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
    if (EXTRA && p.wide) *(float2*)((float*)p.o + at) = float2{acc.x * inv, acc.y * inv};
    else *(uint32_t*)((uint16_t*)p.o + at) = pack_bf16(acc.x * inv, acc.y * inv);
    if (d == 0) *lse = sum > 0.f ? (top + __log2f(sum)) * 0.6931471805599453f : -INFINITY;
  };
  constexpr long long kRecord = L::kRows * D * 2;  // floats
  // The sequence whose slice is not collected yet, and the record that takes this part's piece of it, or -1 where it is finished here.
  int waiting_b = -1, waiting_record = -1;
  int tail = 0;  // the line's sequence that ends in this part and began in another: 1 where there is one, 2 once its turn has come
  // The slice of the sequence merged last; or of the line's sequence that ends in this part, once the earlier parts are done too.
  const auto collect = [&]() {
    const int buffer = (merged - 1) & 1, b = waiting_b, thread = here(threadIdx.x), unit = blockIdx.z * p.num_kv_heads + h;
    const bool stored = tail == 2;
    const int pieces = stored ? words[1] : waiting_record < 0 && !line ? p.parts - 1 : 0;
    const int slot = stored ? words[3] : 0, record = stored ? words[2] : (b * (int)gridDim.z * p.num_kv_heads + unit) * (p.parts - 1);
    if (alone) __syncthreads();
    if (thread >= slice / 2) return;
    if (!stored && !alone) mbar_wait_cluster(bar(buffer), (merged - 1) >> 1 & 1);
#pragma unroll 1
    for (int e = thread; e < slice / 2; e += W * 32) {
      const int at = rank * slice + 2 * e, row = at / D, d = at % D;
      const float2* sums = (const float2*)(smem + L::kRankSums) + buffer * kRanksMax * L::kRows + row;
      const float2* from = (const float2*)(smem + L::kReceived) + (buffer * L::kRows * D) / 2 + e;
      float top = -INFINITY;
      const int senders = stored ? 0 : ranks;
#pragma unroll 8
      for (int s = 0; s < senders; ++s) top = fmaxf(top, sums[s * L::kRows].x);
      const float low = top == -INFINITY ? 0.f : top;
      float sum = 0.f;
      float2 acc = {0.f, 0.f};
#pragma unroll 8
      for (int s = 0; s < senders; ++s) {
        const float2 ml = sums[s * L::kRows], x = from[s * (slice / 2)];
        const float w = exp2_fast(ml.x - low);
        sum += w * ml.y;
        acc.x += w * x.x;
        acc.y += w * x.y;
      }
      if (waiting_record >= 0) {  // not the last piece: left for the cluster that has it
        __stcg((float4*)(p.partial + waiting_record * kRecord + at * 2), float4{acc.x, acc.y, top, sum});
        continue;
      }
      if (pieces > 0) {
        const float4 own = {acc.x, acc.y, top, sum};
        acc = {0.f, 0.f};
        sum = 0.f;
        top = -INFINITY;
        constexpr int kAtOnce = LINE > 0 ? 2 : D == 256 ? 4 : 8;  // on their way; a line's sequence lies in few parts
        float* const lies = p.partial + (record + slot) * kRecord + at * 2;
#pragma unroll 1
        for (int i0 = 0; i0 <= pieces; i0 += kAtOnce) {
          const auto piece_of = [&](int i) { return lies + (line ? i == 0 ? 0 : 2 * i - slot : i) * kRecord; };
          const int end = stored ? pieces + 1 : pieces;  // of those that lie in memory
          float4 x[kAtOnce];
          bool again;
          do {
            again = false;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              x[i] = own;
              if (i0 + i < end) x[i] = load_words(piece_of(i0 + i));
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) again |= is_empty(x[i].x) || is_empty(x[i].y) || is_empty(x[i].z) || is_empty(x[i].w);
          } while (again);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {  // added up piece by piece, in order
            if (i0 + i > pieces) break;
            if (i0 + i < end) __stcg((uint4*)piece_of(i0 + i), uint4{kEmpty, kEmpty, kEmpty, kEmpty});
            const float m = fmaxf(top, x[i].z), low = m == -INFINITY ? 0.f : m;
            const float a = exp2_fast(top - low), w = exp2_fast(x[i].z - low);
            acc.x = acc.x * a + x[i].x * w;
            acc.y = acc.y * a + x[i].y * w;
            sum = sum * a + x[i].w * w;
            top = m;
          }
        }
      }
      finish(b, row, d, acc, top, sum);
    }
  };
  const auto zero = [&](int b) {  // a sequence without keys
    for (int i = here(threadIdx.x); i < slice / 2; i += W * 32) {
      const int at = rank * slice + 2 * i;
      finish(b, at / D, at % D, float2{0.f, 0.f}, -INFINITY, 0.f);
    }
  };

  // ---- the sequences ---------------------------------------------------------------------------------------------------------------
  const float scale_log2 = p.scale * kLog2e;
  uint32_t slot_at = 0;
  int lead = R;  // loads before the first product
  for (;;) {
    int len = 0;
    while (b < p.batch && start <= part_end && (len = len_of(b)) <= 0) {
      if (line || part == 0) zero(b);
      ++b;
    }
    const bool more = b < p.batch && start < part_end;
    const uint32_t tiles = tiles_of(len), from = part_at > start ? part_at - start : 0, to = min(tiles, part_end - start);
    float o[D / 16][NT][4], row_max[NT][2], row_sum[NT][2];
    float v_part = 0.f;  // what the weights' share of V's scales is multiplied with, a power of two; 0 before the first scale
    if (more) {
      // Keys that query row `row` of this unit sees end here; worked out where a mask needs it.
      const auto seen_by = [&](int row) { return row < rows ? len - behind(token_of(row_base + row)) : 0; };
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          row_max[n][e] = -INFINITY;
          row_sum[n][e] = 0.f;
        }
#pragma unroll
        for (int t = 0; t < D / 16; ++t) o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.f;
      }
      const int all_see = len - behind(0);                               // keys that every row sees end here
      const int all_from = EXTRA && p.left >= 0 ? len - 1 - p.left : 0;  // and begin here
      const int hidden = hidden_tiles(len), end = hidden + to;
      int tile = hidden + from + offset;
      float s[MT][NT][4];
      int n = -lead;
      lead = 0;
#pragma unroll 1
      for (;; ++n) {  // halves: K and V of a tile in turn; before the first sequence loads alone
        if (n == 0) {
          if (!kHoldQ || q_b != b) fetch_q(b);
          const int thread = here(threadIdx.x);
#pragma unroll
          for (int i = 0; i < kQLoads; ++i) {
            const int n = thread + i * W * 32;
            if (n < kQPieces) {  // whole warps
              const int row = n / (D / 8), piece = n % (D / 8);
              uint4 x = q_held[i];
              if (EXTRA && p.rotary) x = rotated_q<D>(x, piece, len - behind(token_of(min(row, rows - 1) + row_base)) - 1, p.rotary, p.interleaved, p.cos, p.sin);
              if constexpr (KV != kBf16) {
                float2 of_row;
                x = q_of_quantised<D, KV>(x, of_row);
                if (piece == 0) *(float2*)(smem + L::kQRows + row * 8) = of_row;
              }
              *(uint4*)(smem + L::kQ + row * kQPitch + piece * 16) = x;
            }
          }
          __syncthreads();  // q is there, and the sums of the sequence before have been read
          if (kHoldQ && b + 1 < p.batch) fetch_q(b + 1);
        }
        if (n >= 0) {
          if (tile >= end) break;
          copies_wait<R - 1>();
          __syncwarp();
          const float* scale_at = (const float*)(smem + (ring - base) + slot_at + kHalf) + g;
          if (!(n & 1)) {
            const int key0 = tile * TK;
            float unit[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float2 of_row = KV == kBf16 ? float2{1.f, 0.f} : *(const float2*)(smem + L::kQRows + (8 * n + 2 * c + e) * 8);
                unit[n][e] = of_row.x;
#pragma unroll
                for (int m = 0; m < MT; ++m) s[m][n][e] = s[m][n][e + 2] = -of_row.y;
              }
            }
            scores<D, KV, MT, NT>(s, ring + slot_at, base + L::kQ, kQPitch, KV == kBf16 ? lane : here(lane));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {  // scores as powers of two
                const float f = (KV == kBf16 ? 1.f : scale_at[16 * m + 8 * e]) * (EXTRA ? p.scale : scale_log2);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                  s[m][n][2 * e] *= f * unit[n][0];
                  s[m][n][2 * e + 1] *= f * unit[n][1];
                }
              }
            }
            if (EXTRA) {
#pragma unroll
              for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int row = here(8 * n + 2 * c + e), r = min(row, rows - 1) + row_base, own = seen_by(row) - 1;
                  const float slope = p.slopes ? p.slopes[h * p.group_size + r - token_of(r) * p.group_size] : 0.f;
#pragma unroll
                  for (int m = 0; m < MT; ++m) {
#pragma unroll
                    for (int i = e; i < 4; i += 2) {
                      float x = s[m][n][i];
                      if (p.softcap > 0.f) x = p.softcap * (1.f - __fdividef(2.f, exp2_fast(x / p.softcap * (2.f * kLog2e)) + 1.f));
                      x -= slope * fabsf((float)(own - (key0 + 16 * m + g + (i >> 1) * 8)));
                      s[m][n][i] = x * kLog2e;
                    }
                  }
                }
              }
            }
            if (key0 + TK > all_see || (EXTRA && key0 < all_from)) {
#pragma unroll
              for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int end = seen_by(here(8 * n + 2 * c + e));
#pragma unroll
                  for (int m = 0; m < MT; ++m) {
#pragma unroll
                    for (int i = e; i < 4; i += 2) {
                      const int key = key0 + 16 * m + g + (i >> 1) * 8;
                      if (key >= end || (EXTRA && p.left >= 0 && key < end - 1 - p.left)) s[m][n][i] = -INFINITY;
                    }
                  }
                }
              }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              float corr[2], off[2];
              bool moved = false;
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float m = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
                for (int i = 1; i < MT; ++i) m = fmaxf(m, fmaxf(s[i][n][e], s[i][n][e + 2]));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                const bool up = m - row_max[n][e] > 8.f;  // rescale rarely: see forward.cu
                corr[e] = up ? exp2_fast(row_max[n][e] - m) : 1.f;
                row_max[n][e] = up ? m : row_max[n][e];
                off[e] = row_max[n][e] == -INFINITY ? 0.f : row_max[n][e];
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
#pragma unroll
              for (int m = 0; m < MT; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  s[m][n][i] = exp2_fast(s[m][n][i] - off[i & 1]);
                  row_sum[n][i & 1] += s[m][n][i];
                }
              }
            }
          } else {
            uint32_t probs[MT][NT][2];
            if constexpr (KV == kBf16) {
#pragma unroll
              for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                  for (int n = 0; n < NT; ++n) probs[m][n][e] = transpose_8x8(pack_bf16(s[m][n][2 * e], s[m][n][2 * e + 1]));
            } else {
              // Weights are fp16: V's scales count as parts of one that is as large as they are, a power of two, and grows with them.
              float top = 0.f;
#pragma unroll
              for (int i = 0; i < 2 * MT; ++i) top = fmaxf(top, fabsf(scale_at[8 * i]));
              if (__any_sync(~0u, top * v_part > 128.f || v_part == 0.f)) {  // weights are at most 256 times this
#pragma unroll
                for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
                const float part = top > 0.f ? __uint_as_float(max(254 - (int)(__float_as_uint(top) >> 23), 1) << 23) : v_part;
                const float less = v_part > 0.f ? part / v_part : 0.f;
                v_part = part;
#pragma unroll
                for (int t = 0; t < D / 16; ++t)
#pragma unroll
                  for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) o[t][n][i] *= less;
              }
#pragma unroll
              for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const float w = *(volatile const float*)(scale_at + 16 * m + 8 * e) * v_part;
#pragma unroll
                  for (int n = 0; n < NT; ++n) probs[m][n][e] = transpose_8x8(pack_fp16(s[m][n][2 * e] * w, s[m][n][2 * e + 1] * w));
                }
            }
            mix<D, KV, MT, NT>(o, ring + slot_at, probs, KV == kBf16 ? lane : here(lane));
            tile += step;
          }
          __syncwarp();
        }
        load_half(slot_at);
        slot_at = slot_at + kSlot == R * kSlot ? 0 : slot_at + kSlot;
      }
    }
    if (waiting_b >= 0) collect();
    if (!more) {
      if (tail != 1) break;
      tail = 2;
      __syncthreads();  // the words are there
      waiting_b = words[0];
      waiting_record = -1;
      continue;
    }

    // ---- merging: warps, then blocks; clusters when the slice is collected -------------------------------------------------------
    const int thread = here(threadIdx.x), g = thread % 32 / 4, c = thread % 4;
    const float v_whole = KV == kBf16 ? 1.f : v_part > 0.f ? __uint_as_float((254u << 23) - __float_as_uint(v_part)) : 0.f;
    float* merge = (float*)(smem + L::kMerge) + warp * L::kRows * L::kMergePitch;
    float2* warp_sums = (float2*)(smem + L::kWarpSums);
    const int buffer = merged & 1;
    constexpr int kPass = D / L::kPasses, kRun = KV == kBf16 ? kPass : kPass / 8;  // columns of a pass, side by side in it
    const auto merge_columns = [&](auto which) {
      constexpr int pass = decltype(which)::value;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 8 * n + 2 * c + e;
          if (pass == 0) {
            float sum = row_sum[n][e];
            sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (g == 0) warp_sums[warp * L::kRows + row] = float2{row_max[n][e], sum};
          }
          if (row < rows && row_max[n][e] != -INFINITY) {
            float* const to = merge + row * L::kMergePitch;
#pragma unroll
            for (int t = pass * (D / 16) / L::kPasses; t < (pass + 1) * (D / 16) / L::kPasses; ++t) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int at = KV == kBf16 ? Tile::out_dim(g, t, i) - pass * kPass : kRun * g + 2 * t + i - pass * kRun;
                to[at] = o[t][n][e + 2 * i] * v_whole;
              }
            }
          }
        }
      }
      if (pass == 0 && merged == 0) cluster_wait();  // every block of the cluster has begun
      __syncthreads();
      if (pass == 0 && threadIdx.x == 0 && !alone)
        mbar_expect(bar(buffer), ranks * (slice * 4 + ((rank * slice + slice - 1) / D - slice_row + 1) * 8));
#pragma unroll(NT)
      for (int e = thread; e < rows * kPass / 4; e += W * 32) {
        const int row = e / (kPass / 4), local = 4 * e % kPass, d = local / kRun * (kRun * L::kPasses) + pass * kRun + local % kRun;
        const int flat = row * D + d, dest = (((flat << ranks_log2) / D) * rows_inverse) >> 16, at = flat - dest * slice;
        const float2* sums = warp_sums + row;
        const float4* sources = (const float4*)(smem + L::kMerge + (row * L::kMergePitch + local) * 4);
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < W; ++w) top = fmaxf(top, sums[w * L::kRows].x);
        float4 acc = {0.f, 0.f, 0.f, 0.f};
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < W; ++w) {
          const float2 ml = sums[w * L::kRows];
          if (ml.x == -INFINITY) continue;  // and nothing was written there
          const float f = exp2_fast(ml.x - top);
          const float4 x = sources[w * L::kRows * L::kMergePitch / 4];
          sum += f * ml.y;
          acc.x += f * x.x;
          acc.y += f * x.y;
          acc.z += f * x.z;
          acc.w += f * x.w;
        }
        const uint32_t to = base + L::kReceived + buffer * L::kRows * D * 4 + (rank * slice + at) * 4;
        const uint32_t sums_to = base + L::kRankSums + ((buffer * kRanksMax + rank) * L::kRows + row) * 8;
        if (alone) {
          *(float4*)(smem + (to - base)) = acc;
          if (d == 0) *(float2*)(smem + (sums_to - base)) = float2{top, sum};
        } else {
          const uint32_t there = cluster_addr(base, dest) - base, bar_there = there + bar(buffer);
          send_four(there + to, acc, bar_there);
          if (d == 0 || at == 0) send_pair(there + sums_to, top, sum, bar_there);
        }
      }
    };
    merge_columns(Number<0>{});
    if constexpr (L::kPasses > 1) {
      __syncthreads();
      merge_columns(Number<1>{});
    }
    if constexpr (L::kPasses > 2) {
      __syncthreads();
      merge_columns(Number<2>{});
      __syncthreads();
      merge_columns(Number<3>{});
    }
    ++merged;
    waiting_b = b;
    waiting_record = -1;
    const int unit = blockIdx.z * p.num_kv_heads + h;
    if (!line) {
      if (part < p.parts - 1) waiting_record = (b * (int)gridDim.z * p.num_kv_heads + unit) * (p.parts - 1) + part;
    } else if (from > 0 || to < tiles) {
      waiting_record = (unit * p.parts + part) * 2 + (start <= part_at ? 0 : 1);
      if (to == tiles) {
        const uint32_t share = words[4], longer = words[5], of_longer = (share + 1) * longer;
        const int began = start < of_longer ? start / (share + 1) : longer + (start - of_longer) / share;
        tail = 1;
        if (threadIdx.x == 0) {
          words[0] = b;
          words[1] = part - began;
          words[2] = (unit * p.parts + began) * 2;
          words[3] = part_begin(began) == start ? 0 : 1;
        }
      }
    }
    start += tiles;
    ++b;
  }
  if (merged > 0) return;
  // Nothing to do but what the others of the cluster count on.
  cluster_wait();
}

#define TILING(NT, EXTRA) Layout<NT, EXTRA>::kBytes, Layout<NT, EXTRA>::W * 32
extern "C" __device__ const int decode_cluster_tiling[8] = {TILING(1, false), TILING(2, false), TILING(1, true), TILING(2, true)};

#define DECODE(NAME, NT, EXTRA, LINE) \
  extern "C" __global__ void __launch_bounds__(Layout<NT, EXTRA>::W * 32, 1) NAME(const __grid_constant__ ClusterParams p) { decode_body<NT, EXTRA, LINE>(p); }
DECODE(decode_8, 1, false, 0)
DECODE(decode_16, 2, false, 0)
DECODE(decode_8_line, 1, false, 1)
DECODE(decode_16_line, 2, false, 1)
DECODE(decode_8_extra, 1, true, 2)
DECODE(decode_16_extra, 2, true, 2)

}  // namespace suanpan
