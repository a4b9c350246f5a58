// What decode_cluster.cu is launched with, and how it lays out a block's shared memory. Built once per HEAD_DIM and KV type.
#pragma once
#include "decode_tile.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_TYPE
#define KV_TYPE 0
#endif

namespace suanpan {

struct ClusterParams {
  const int* seqlens_k;   // [batch]
  const int* page_table;  // [batch, pages_max]
  int batch;
  int seqlen_q;           // row = token * group_size + head in group
  int page_size;          // tokens, a multiple of 16
  uint32_t page_inverse;  // 2^32 / (page_size / 16), rounded down, below 2^32
  int pages_max;          // per sequence
  int parts;              // clusters that share a kv head: grid (parts * ranks, num_kv_heads, groups of 8 NT rows)
  int line;               // 1: parts of one line of all tiles; 0: every part takes its tiles of every sequence
  int left;               // keys before a row's own that it sees, or -1: all
  char *k, *v;            // [pages, page_size, num_kv_heads, head_dim], the same strides in bytes
  long long page_stride, token_stride, head_stride;
  const float *k_scale, *v_scale;  // of quantised numbers: [pages, page_size, num_kv_heads], strides in elements, which may be 0
  long long scale_page_stride, scale_token_stride, scale_head_stride;
  const char* q;          // [batch * seqlen_q, num_q_heads, head_dim] bf16, strides in bytes
  long long q_token_stride, q_head_stride;
  int num_kv_heads;
  int group_size;
  int group_inverse;      // 65536 / group_size + 1
  float scale;            // of the scores
  float softcap;          // 0: none
  int causal;             // 1: a row sees the keys up to its own; 0: all
  void* o;                // [batch * seqlen_q, num_q_heads, head_dim] bf16, or f32 where wide, contiguous
  float* lse;             // [num_q_heads, lse_row], natural logarithm, the first batch * seqlen_q of each row
  float* partial;         // [records, rows * head_dim / 2, 4], of a row's pair: o, maximum, sum; all bits one, left so.
                          // Records: line [row groups, num_kv_heads, parts, 2: a part's first sequence, its last],
                          // else [batch, row groups, num_kv_heads, parts - 1]
  const float* slopes;    // [num_q_heads] or null
  const float* sinks;     // [num_q_heads] or null
  const float *prior_o, *prior_lse;  // a result over other keys that joins this one: shaped as o (f32) and lse; or null
  int wide;                          // o is f32
  int rotary;                        // elements of a head that turn, 0: none; a power of two from 16 up
  int interleaved;                   // pairs are neighbours, else half of `rotary` apart
  int lse_row;
  int table_row;                     // entries from a sequence's pages to the next one's
  int shared;                        // every sequence has the first one's length and pages
  const char *k_new, *v_new;         // [batch * seqlen_q, num_kv_heads, head_dim] bf16, contiguous: the last keys, put into the pages; or null
  const float *cos, *sin;            // [positions, rotary / 2]
};

constexpr int D = HEAD_DIM, KV = KV_TYPE;
constexpr float kLog2e = 1.4426950408889634f;
constexpr uint32_t kEmpty = 0xFFFFFFFFu;  // a NaN that hardware never writes (its own is 0x7FFFFFFF)
constexpr int kRanksMax = 16;
using Tile = KvTile<D, KV>;

constexpr int kGroupBytes = 16 * Tile::kRow;
constexpr int MT = kGroupBytes >= 4096 || D == 256 ? 1 : kGroupBytes == 2048 ? 2 : 4;  // groups of 16 keys: a tile is 4 KB where it can be
constexpr int TK = 16 * MT;
constexpr int kHalf = MT * kGroupBytes;                          // K or V of a tile
constexpr int kSlot = kHalf + (KV == kBf16 ? 0 : TK * 4);        // with its scales
constexpr int kLanesOfRow = Tile::kPieces, kRowsAtOnce = 32 / kLanesOfRow;
constexpr int kQPitch = 2 * D + 16;

// Shared memory of a block with NT * 8 query rows.
template <int NT, bool EXTRA> struct Layout {
  // Warps: as many as the registers of their sums allow.
  static constexpr int W = D == 256 ? (EXTRA ? 4 : 8) : KV == kBf16 || D != 128 || NT == 2 || EXTRA ? 8 : 12;
  static constexpr int kRows = 8 * NT;
  static constexpr int kPasses = D == 256 ? W * NT / 4 : 1;              // warps' results are merged so many columns at a time
  static constexpr int kMergePitch = D / kPasses + 4;                    // floats: a row's columns spread over the banks
  static constexpr int kMerge = 0;                                       // [W][kRows][kMergePitch] f32
  static constexpr int kWarpSums = kMerge + W * kRows * kMergePitch * 4;  // [W][kRows] (maximum, sum)
  static constexpr int kReceived = kWarpSums + W * kRows * 8;            // [2][kRows * D] f32, slices by rank
  static constexpr int kRankSums = kReceived + 2 * kRows * D * 4;        // [2][ranks][kRows] (maximum, sum)
  static constexpr int kQ = kRankSums + 2 * kRanksMax * kRows * 8;       // [kRows][kQPitch]
  static constexpr int kQRows = kQ + kRows * kQPitch;                    // [kRows] what q_of_quantised says of a row
  static constexpr int kBars = kQRows + (KV == kBf16 ? 0 : kRows * 8);
  static constexpr int kRing = (kBars + 40 + 127) / 128 * 128;           // [W][R] slots
  static constexpr int kLeft = (232448 - kRing) / (W * kSlot);
  static constexpr int R = kLeft < 8 ? kLeft : 8;                        // halves in flight a warp
  static constexpr int kBytes = kRing + W * R * kSlot;
  static_assert(R >= 2, "no room for a ring");
};

}  // namespace suanpan
