// Exact attention forward for Hopper: parameters, tile shapes, shared-memory layout, the order of tiles and the keys that a row sees.
// Not here: anything that computes (forward_math.cuh) or moves data (forward.cu).
#pragma once
#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"

#ifndef MORE
#define MORE 0
#endif

namespace suanpan {

enum Mode { kFull, kCausal, kFeatures };

struct ForwardParams {
  float* lse;            // [num_q_heads, total_q], natural logarithm
  void* o;               // [total_q, num_q_heads, head_dim_v] with the two strides below, in elements
  const int* cu_q;       // [batch + 1] exclusive prefix sums, or null: every sequence has seqlen_q_max tokens
  const int* cu_k;       // the same for keys (paged: lengths only)
  int* counter;          // {tiles drawn, blocks done} a row of the grid: zero before the first launch, left zero by every launch
  long long o_token_stride;
  long long o_head_stride;
  int total_q;
  int batch;
  int num_kv_heads;
  int group_size;
  int seqlen_q_max;
  int seqlen_k_max;
  int units_per_section; // (sequence, kv head) pairs whose K and V stay in L2 together
  float scale;           // of scores as they stand before the softmax; ln(2) where they come changed, in powers of two
  float scale_log2;      // scale * log2(e)
  // From here on: read by forward_features and forward_more.
  const int* page_table;       // [batch, pages_max], or null: K and V are contiguous
  const float* alibi_slopes;   // [num_q_heads], or null
  const float* sinks;          // [num_q_heads], or null
  const uint32_t* tree;        // [total_q, tree_words]: bit j of a row: it sees key seqlen_k - seqlen_q + j; or null
  int tree_words;
  int page_size;
  int pages_max;
  int box_rows;                // rows of K and V that one copy moves: the greatest common divisor of page and tile
  int left;                    // keys before a row's own position that it sees; 2^30 - 1 stands for all
  int right;                   // the same after it
  int chunk;                   // a row sees only keys of its own chunk; 0 is no chunks
  int top_left;                // the first row stands on the first key, instead of the last on the last
  int longest_first;           // later rows see more keys
  float softcap_log2;          // cap * log2(e); 0 is no cap
  float softcap_inner;         // 2 * softmax_scale * log2(e) / cap
  float dot_scale_log2;        // softmax_scale * log2(e)
  int change_scores;           // there is a cap, a slope or a bias: dot products become scores in powers of two before the softmax
  int pack_log2;               // of the query heads that share a kv head where rows are (token, head) and a tile has all of these heads; else 0:
                               // then group_size is 1 and seqlen_q_max counts rows, as a tile's len_q does
  // From here on: read by forward_more alone.
  const float* bias;           // natural; [sequence, query head, query token, key] under the strides, which may be 0; or null
  long long bias_seq_stride;
  long long bias_head_stride;
  long long bias_row_stride;
  uint32_t seed_low, seed_high;
  uint32_t first_seq, first_head, first_row, first_group;  // numbers of the call's first; a group is four keys
  uint32_t dropped_below;      // weights whose number is below it are dropped
  float kept_factor;           // of those that stay; 0 is no dropout
  int bias_key_stride;         // 0 or 1
  float split_share;           // 1 / gridDim.y: the grid's rows take equal parts of each tile's key tiles
  float* partial_o;            // [gridDim.y, num_q_heads, total_q, head_dim_v] where that is not 1: joined by forward_combine
  float* partial_lse;          // [gridDim.y, num_q_heads, total_q]
};

#ifdef Q_BUFFERS  // forward.cu; the numbers and their meanings are those of src/shapes.rs
struct Chosen {
  static constexpr int kNumWg = WARPGROUPS, kBn = KEYS, kStages = KV_STAGES, kQBufs = Q_BUFFERS, kToken = TOKEN;
  static constexpr bool kOverlap = OVERLAP;
};

template <int D, int DV> struct Layout {
  static constexpr int kNumWg = Chosen::kNumWg, kBn = Chosen::kBn, kStages = Chosen::kStages, kQBufs = Chosen::kQBufs;
  static constexpr int kChunks = (D + 63) / 64;        // 64-column chunks of 128 bytes; columns past D arrive as zeros
  static constexpr int kVChunks = (DV + 63) / 64;
  static constexpr int kQChunk = 64 * 128;             // bytes of one chunk of one warpgroup's rows
  static constexpr int kQWg = kChunks * kQChunk;
  static constexpr int kQBuf = kNumWg * kQWg;
  static constexpr int kKvChunk = kBn * 128;
  static constexpr int kKTile = kChunks * kKvChunk;
  static constexpr int kVTile = kVChunks * kKvChunk;
  static constexpr int kK = kQBufs * kQBuf;
  static constexpr int kV = kK + kStages * kKTile;
  static constexpr int kBars = kV + kStages * kVTile;
  static constexpr int kNumBars = 4 * kStages + 2 * kQBufs * kNumWg + 5;
  static constexpr int kSlots = (kBars + kNumBars * 8 + 15) / 16 * 16;  // two tiles in flight
  static constexpr int kZero = kSlots + 2 * 112;               // a float of shared memory that `not_negative` never writes
  static constexpr int kBytes = kZero + 16 + 1024;             // 1,024: the base is aligned by hand
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
};
#endif

// Key tiles of one warpgroup's rows: those that some row sees, and among them those that every row sees whole.
struct Part { int start, end, whole_start, whole_end; };

struct alignas(16) Tile {
  int row0;  // first query row, within the sequence, as len_q counts; negative where the first warpgroups have no rows
  int head;  // -1: no more tiles
  int kv_head, q0, k0, len_q, len_k, batch;
  int key_start, key_end;  // kFeatures: keys that some row of the tile sees lie between
  int unused[2];
  Part part[4];            // kFeatures
};
static_assert(sizeof(Tile) == 112, "as Layout has it");

struct Keys { int start, end; };  // empty where start = end

// Keys that `row` of a sequence sees: suanpan_base::Mask::visible. Neither end ever falls from one row to the next.
template <int MODE, class AnyTile> __device__ __forceinline__ Keys visible(const ForwardParams& p, const AnyTile& t, int row) {
  if (MODE == kFull) return {0, t.len_k};
  if (MODE == kCausal) return {0, max(0, min(t.len_k, t.len_k - t.len_q + row + 1))};
  const auto clip = [&](int x) { return max(0, min(x, t.len_k)); };
  const int centre = (row >> p.pack_log2) + (p.top_left ? 0 : t.len_k - (t.len_q >> p.pack_log2));
  int start = clip(centre - p.left), end = clip(centre + p.right + 1);
  if (p.chunk) {
    const int first = (centre >= 0 ? centre / p.chunk : -1) * p.chunk;  // no key lies before 0: any chunk down there is empty
    start = max(start, clip(first));
    end = min(end, clip(first + p.chunk));
  }
  return {min(start, end), end};
}

// Keys that some row of first..=last sees.
template <int MODE, class AnyTile>
__device__ __forceinline__ Keys visible_hull(const ForwardParams& p, const AnyTile& t, int first, int last) {
  const Keys a = visible<MODE>(p, t, first), b = visible<MODE>(p, t, last);
  return {min(a.start, b.end), b.end};
}

// Keys that some row of a tile of BM rows sees.
template <int BM, int MODE, class AnyTile> __device__ __forceinline__ Keys tile_keys(const ForwardParams& p, const AnyTile& t) {
  if (MODE == kFeatures) return {t.key_start, t.key_end};
  return {0, visible<MODE>(p, t, min(t.len_q, t.row0 + BM) - 1).end};
}

// Key tiles that cover `keys`, first and one past the last; none where there are no keys.
template <int BN, int MODE> __device__ __forceinline__ Keys key_tiles(const Keys& keys) {
  const int end = (keys.end + BN - 1) / BN;
  return {MODE != kFeatures ? 0 : keys.start < keys.end ? keys.start / BN : end, end};
}

template <int BN, int MODE, class AnyTile>
__device__ __forceinline__ Part part_of(const ForwardParams& p, const AnyTile& t, int row0, int rows) {
  const Keys some = key_tiles<BN, MODE>(visible_hull<MODE>(p, t, row0, row0 + rows - 1));
  int whole_end = visible<MODE>(p, t, row0).end / BN;
  const int whole_start = MODE == kFeatures ? (visible<MODE>(p, t, row0 + rows - 1).start + BN - 1) / BN : 0;
  if (MODE == kFeatures && p.tree) whole_end = min(whole_end, max(0, t.len_k - (t.len_q >> p.pack_log2)) / BN);
  return {some.start, some.end, whole_start, whole_end};
}

// Tile number -> tile; false when the sequence has no such tile. Order: sections whose K and V fit in L2 together. Where later
// rows see more, longest first inside a section, and the shortest quarter of all tiles is kept for the end (a sixteenth of the
// work), where it fills the gaps that the last long tiles leave; section by section too, or it would read K and V again for each row of tiles.
template <int NUM_WG, int BN, int MODE> __device__ __forceinline__ bool tile_at(const ForwardParams& p, int i, volatile Tile& t) {
  constexpr int BM = NUM_WG * 64;
  const bool longest_first = MODE == kCausal || (MODE == kFeatures && p.longest_first);
  const int num_m = (p.seqlen_q_max + BM - 1) / BM;
  const int all_units = p.batch * p.num_kv_heads;
  const int pack = MODE == kFeatures ? p.pack_log2 : 0;
  const int short_m = longest_first && 2 * (p.seqlen_q_max >> pack) > p.seqlen_k_max ? num_m / 4 : 0;  // behind a long history no tile is short
  const bool is_long = i < all_units * p.group_size * (num_m - short_m);
  if (!is_long) i -= all_units * p.group_size * (num_m - short_m);
  // Short tiles see a quarter of the keys at most: four times as many units fit.
  const int top = is_long ? num_m : short_m, per_unit = (is_long ? num_m - short_m : short_m) * p.group_size;
  const int section = is_long ? p.units_per_section : min(4 * p.units_per_section, all_units);
  const int first = i / (per_unit * section) * section, units = min(section, all_units - first);
  i -= first * per_unit;
  const int heads = units * p.group_size;
  const int rank = i / heads;
  const int h = i - rank * heads;
  const int m = longest_first ? top - 1 - rank : rank;
  const int unit = first + h / p.group_size;
  const int b = unit / p.num_kv_heads;
  const int kv_head = unit - b * p.num_kv_heads;
  t.batch = b;
  t.kv_head = kv_head;
  t.head = kv_head * p.group_size + h % p.group_size;
  int q0 = (b * p.seqlen_q_max) >> pack, len_q = p.seqlen_q_max, k0 = b * p.seqlen_k_max, len_k = p.seqlen_k_max;
  if (p.cu_q) { q0 = p.cu_q[b]; len_q = (p.cu_q[b + 1] - q0) << pack; }
  if (p.cu_k) { k0 = p.cu_k[b]; len_k = p.cu_k[b + 1] - k0; }
  t.q0 = q0;
  t.k0 = k0;
  t.len_q = len_q;
  t.len_k = len_k;
  const int mine = (len_q + BM - 1) / BM;
  // The tile that is not full is the first one: when causal it is also the shortest.
  const int row0 = m * BM - (longest_first ? (mine * BM - len_q) / 64 * 64 : 0);
  t.row0 = row0;
  if (m >= mine) return false;
  if (MODE == kFeatures) {
    const Keys keys = visible_hull<MODE>(p, t, max(0, t.row0), min(t.len_q, t.row0 + BM) - 1);
    t.key_start = keys.start;
    t.key_end = keys.end;
    if (MORE && gridDim.y > 1) {
      const Keys tiles = key_tiles<BN, MODE>(keys);
      const auto cut = [&](uint32_t split) {
        return split == gridDim.y ? tiles.end : tiles.start + __float2int_rd((tiles.end - tiles.start) * p.split_share * split);
      };
      const int from = cut(blockIdx.y), to = cut(blockIdx.y + 1);
      t.key_start = from < to ? max(keys.start, from * BN) : from * BN;
      t.key_end = from < to ? min(keys.end, to * BN) : from * BN;
    }
    const auto within = [&](int tile) { return MORE ? max(t.key_start / BN, min(tile, (t.key_end + BN - 1) / BN)) : tile; };
#pragma unroll 1
    for (int w = 0; w < NUM_WG; ++w) {
      const int first = t.row0 + 64 * w, rows = min(64, t.len_q - first);
      if (first < 0 || rows <= 0) continue;
      const Part part = part_of<BN, MODE>(p, t, first, rows);
      t.part[w].start = within(part.start);
      t.part[w].end = within(part.end);
      t.part[w].whole_start = within(part.whole_start);
      t.part[w].whole_end = within(part.whole_end);
    }
  }
  return true;
}

template <int STAGES> struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

}  // namespace suanpan
