// Exact attention forward for Hopper (sm_90a): 16-bit q, k, v, f32 accumulation, o and natural-log lse out.
// Not here: the sum of parts (forward_combine.cu), FP8, backward. Built once per (HEAD_DIM, HEAD_DIM_V, DTYPE); each cubin holds a full kernel, a causal one
// and one with features (windows, chunks, tree masks, softcap, ALiBi, sinks, pages, a group's heads in one tile), which are switched at run time. With MORE the cubin holds one
// kernel that has bias, dropout and keys in parts besides, for which three warpgroups have too few registers.
//
// One persistent CUDA block per multiprocessor. The producer warpgroup has four working warps: K, V, one that loads q and
// stores o, and one that draws tiles from a counter. Each math warpgroup owns 64 query rows and runs S = q k^T,
// softmax, o += P v. Left alone, the warpgroups fall into step: all in products, then all in softmax with the matrix
// units idle. A token (named barriers) makes them issue q k^T one after another, so that one's softmax runs under the
// products of the others.
#include <type_traits>

#include "forward_math.cuh"

namespace suanpan {

// Switches known at compile time; where they are not, a plain bool stands in their place.
struct Yes { __device__ __forceinline__ operator bool() const { return true; } };
struct No { __device__ __forceinline__ operator bool() const { return false; } };

template <int D, int DV, class T, int MODE>
__device__ __forceinline__ void forward_body(const CUtensorMap* q_map, const CUtensorMap* k_map, const CUtensorMap* v_map,
                                             const CUtensorMap* o_map, const ForwardParams& p) {
  using L = Layout<D, DV>;
  constexpr int BM = L::kNumWg * 64, BN = L::kBn;
  constexpr int kToken = Chosen::kToken;
  // With one q buffer, o leaves from registers: the next q then comes in under the last softmax and P v of this tile.
  constexpr bool kDirect = L::kQBufs == 1;
  const int pack = MODE == kFeatures ? p.pack_log2 : 0;
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u;
  const uint32_t bars = base + L::kBars;
  const auto k_full = [&](int s) { return bars + 8 * s; };
  const auto k_empty = [&](int s) { return bars + 8 * (L::kStages + s); };
  const auto v_full = [&](int s) { return bars + 8 * (2 * L::kStages + s); };
  const auto v_empty = [&](int s) { return bars + 8 * (3 * L::kStages + s); };
  const auto q_full = [&](int b, int w) { return bars + 8 * (4 * L::kStages + b * L::kNumWg + w); };
  // q is no longer needed, and o lies in its place unless it leaves from registers.
  const auto q_done = [&](int b, int w) { return bars + 8 * (4 * L::kStages + (L::kQBufs + b) * L::kNumWg + w); };
  const auto slot_full = [&](int b) { return bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + b); };
  const auto slot_empty = [&](int b) { return bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + 2 + b); };
  const uint32_t draw = bars + 8 * (4 * L::kStages + 2 * L::kQBufs * L::kNumWg + 4);
  // The features need more of a tile than there are registers: they read it where it lies until the tile is done.
  constexpr bool kKeepSlot = MODE == kFeatures;
  using TileView = std::conditional_t<kKeepSlot, const volatile Tile&, const Tile>;
  using PartView = std::conditional_t<kKeepSlot, const volatile Part&, const Part>;
  Tile* slots = (Tile*)(smem_raw + (base - smem_addr(smem_raw)) + L::kSlots);

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      mbar_init(k_full(s), 1);
      mbar_init(v_full(s), 1);
      mbar_init(k_empty(s), 4 * L::kNumWg);
      mbar_init(v_empty(s), 4 * L::kNumWg);
    }
    for (int b = 0; b < L::kQBufs; ++b)
      for (int w = 0; w < L::kNumWg; ++w) { mbar_init(q_full(b, w), 1); mbar_init(q_done(b, w), 4); }
    for (int b = 0; b < 2; ++b) { mbar_init(slot_full(b), 1); mbar_init(slot_empty(b), 3 + 4 * L::kNumWg); }
    mbar_init(draw, 1);
    mbar_init_fence();
    tma_prefetch_map(q_map);
    tma_prefetch_map(k_map);
    tma_prefetch_map(v_map);
    tma_prefetch_map(o_map);
  }
  __syncthreads();

  if (warp < 4) {
    registers_down<(L::kNumWg == 2) ? 40 : 32>();
    Ring<2> slot;
    const auto stream = [&](auto is_key) {  // K or V of every tile; the whole warp where pages may have to be found
      constexpr bool kKey = decltype(is_key)::value;
      constexpr int chunks = kKey ? L::kChunks : L::kVChunks, bytes = kKey ? L::kKTile : L::kVTile;
      const CUtensorMap* map = kKey ? k_map : v_map;
      Ring<L::kStages> ring;
      for (;; slot.advance()) {
        mbar_wait(slot_full(slot.stage), slot.phase);
        TileView t = slots[slot.stage];
        if (!kKeepSlot) mbar_arrive(slot_empty(slot.stage));
        if (t.head < 0) break;
        const Keys tiles = key_tiles<BN, MODE>(tile_keys<BM, MODE>(p, t));
        int j = tiles.end - 1;
        const int draw_at = min(j, tiles.start + 2);
        if (kKey && j < tiles.start && lane == 0) mbar_arrive(draw);
        // This lane's box of tile j: `box_rows` tokens of one page. Boxes without a visible key are not copied: their page may be gone.
        const auto box_token = [&] { return j * BN + lane * p.box_rows; };
        const auto box_live = [&] {
          return lane * p.box_rows < BN && box_token() < t.key_end && box_token() + p.box_rows > t.key_start;
        };
        const auto page_id = [&] {
          return box_live() ? p.page_table[(long long)t.batch * p.pages_max + box_token() / p.page_size] : 0;
        };
        const bool paged = MODE == kFeatures && p.page_table;
        int id = 0;
        if (paged && j >= tiles.start) id = page_id();
#pragma unroll 1
        while (j >= tiles.start) {
          const uint32_t full = kKey ? k_full(ring.stage) : v_full(ring.stage);
          const uint32_t to = base + (kKey ? L::kK : L::kV) + ring.stage * bytes;
          mbar_wait(kKey ? k_empty(ring.stage) : v_empty(ring.stage), ring.phase ^ 1);
          if (paged) {
            const bool live = box_live();
            const int boxes = __popc(__ballot_sync(~0u, live));
            if (lane == 0) mbar_expect(full, boxes * p.box_rows * 128 * chunks);
            __syncwarp();
            if (live) {
              const int row = box_token() % p.page_size;
#pragma unroll
              for (int c = 0; c < chunks; ++c)
                tma_load_4d(to + c * L::kKvChunk + lane * p.box_rows * 128, map, full, c * 64, row, t.kv_head, id);
            }
          } else if (lane == 0) {
            mbar_expect(full, bytes);
#pragma unroll
            for (int c = 0; c < chunks; ++c)
              tma_load_3d(to + c * L::kKvChunk, map, full, c * 64, t.k0 + j * BN, t.kv_head);
          }
          ring.advance();
          // The next tile is drawn only now, a few K tiles ahead of the math: earlier would undo longest-first at the end.
          if (kKey && j == draw_at && lane == 0) mbar_arrive(draw);
          --j;
          if (paged && j >= tiles.start) id = page_id();
        }
        if (kKeepSlot) {
          __syncwarp();
          if (lane == 0) mbar_arrive(slot_empty(slot.stage));
        }
      }
    };
    if (warp == 3 && lane == 0) {  // draws tiles and works them out
      const int total = (p.seqlen_q_max + BM - 1) / BM * p.batch * p.num_kv_heads * p.group_size;
      int i = blockIdx.x;
      const auto counter = [&] { return MORE ? p.counter + 2 * blockIdx.y : p.counter; };
      for (uint32_t asked = 0;; asked ^= 1) {
        mbar_wait(slot_empty(slot.stage), slot.phase ^ 1);
        while (i < total && !tile_at<L::kNumWg, BN, MODE>(p, i, slots[slot.stage])) i = gridDim.x + atomicAdd(counter(), 1);
        if (i >= total) slots[slot.stage].head = -1;
        mbar_arrive(slot_full(slot.stage));
        slot.advance();
        if (i >= total) break;
        mbar_wait(draw, asked);
        i = gridDim.x + atomicAdd(counter(), 1);
      }
      if (atomicAdd(counter() + 1, 1) == (int)gridDim.x - 1) {  // every block has drawn its last
        counter()[0] = 0;
        counter()[1] = 0;
      }
    } else if (warp == 0 && (MODE == kFeatures || lane == 0)) {
      stream(std::true_type{});
    } else if (warp == 2 && (MODE == kFeatures || lane == 0)) {
      stream(std::false_type{});
    } else if (warp == 1 && lane == 0) {  // q and o
      Tile t;
      const auto next_tile = [&] {  // false at the end
        mbar_wait(slot_full(slot.stage), slot.phase);
        t = slots[slot.stage];
        mbar_arrive(slot_empty(slot.stage));
        slot.advance();
        return t.head >= 0;
      };
      const auto has_rows = [](const auto& tile, int w) { return tile.row0 + w * 64 >= 0 && tile.row0 + w * 64 < tile.len_q; };
      const auto load_q = [&](int b, int w) {
        if (!has_rows(t, w)) return;
        mbar_expect(q_full(b, w), L::kQWg);
#pragma unroll
        for (int c = 0; c < L::kChunks; ++c)
          tma_load_4d(base + b * L::kQBuf + w * L::kQWg + c * L::kQChunk, q_map, q_full(b, w), c * 64, 0, t.q0 + ((t.row0 + w * 64) >> pack), t.head);
      };
      struct { int row0, q0, len_q, head; } last = {};
      uint32_t done_phase = 0;  // bit (b, w): parity of q_done
      const auto store_o = [&](int b, int w) {
        if (!has_rows(last, w)) return;
        const int bit = b * L::kNumWg + w;
        mbar_wait(q_done(b, w), done_phase >> bit & 1);
        done_phase ^= 1u << bit;
        if constexpr (!kDirect) {
          const int row = last.row0 + w * 64;
          if (row + 64 > last.len_q || (MORE && gridDim.y > 1)) return;
#pragma unroll
          for (int c = 0; c < L::kVChunks; ++c)
            tma_store_4d(o_map, base + b * L::kQBuf + w * L::kQWg + c * L::kQChunk, c * 64, 0, last.q0 + (row >> pack), last.head);
          tma_store_commit();
          tma_store_wait_read();
        }
      };
      Ring<L::kQBufs> in, out;
#pragma unroll 1
      for (bool first = true, more = true; more; first = false) {
        more = next_tile();
        if constexpr (L::kQBufs > 1)
          for (int w = 0; w < L::kNumWg && more; ++w) load_q(in.stage, w);
        for (int w = 0; w < L::kNumWg; ++w) {
          if (!first) store_o(out.stage, w);
          if (L::kQBufs == 1 && more) load_q(in.stage, w);
        }
        if (!first) out.advance();
        in.advance();
        last = {t.row0, t.q0, t.len_q, t.head};
      }
    }
  } else {
    registers_up<L::kNumWg == 4 ? 112 : L::kNumWg == 3 ? 160 : 232>();
    const int wg = warp / 4 - 1;
    const int tid = threadIdx.x - 128 * (wg + 1);
    const int row_in_wg = (warp & 3) * 16 + lane / 4;
    Ring<L::kStages> k_ring, vr;
    // Without overlap K and V go in step; only the features are short of registers (the causal kernel is worse for it).
    Ring<L::kStages>& kr = MODE == kFeatures && !Chosen::kOverlap ? vr : k_ring;
    Ring<L::kQBufs> qring;
    Ring<2> slot;
    uint32_t q_phase = 0;  // bit b: parity of q buffer b, which is loaded only when the warpgroup has rows
    using M = Math<D, DV, T>;
    M m;
    const auto release = [&](uint32_t bar) { if (lane == 0) mbar_arrive(bar); };
    const auto take_token = [&] { if (kToken) named_sync(8 + wg, 256); };
    const auto pass_token = [&](int place) { if (kToken == place && kToken) named_arrive(8 + (wg + 1) % L::kNumWg, 256); };
    if (wg == L::kNumWg - 1) pass_token(kToken);
    for (;;) {
      mbar_wait(slot_full(slot.stage), slot.phase);
      TileView t = slots[slot.stage];
      if (!kKeepSlot) {
        __syncwarp();
        release(slot_empty(slot.stage));
      }
      slot.advance();
      if (t.head < 0) break;
      const int row0 = t.row0 + wg * 64;
      const int rows = row0 < 0 ? 0 : min(64, t.len_q - row0);
      const Keys all = key_tiles<BN, MODE>(tile_keys<BM, MODE>(p, t));
      int j = all.end - 1;
      const auto skip = [&] {  // a tile that none of this warpgroup's rows sees
        take_token();
        pass_token(kToken);
        mbar_wait(k_full(kr.stage), kr.phase);
        release(k_empty(kr.stage));
        if (&kr != &vr) kr.advance();
        mbar_wait(v_full(vr.stage), vr.phase);
        release(v_empty(vr.stage));
        vr.advance();
      };
      if (rows <= 0) {
#pragma unroll 1
        for (; j >= all.start; --j) skip();
      } else {
        const uint32_t q = base + qring.stage * L::kQBuf + wg * L::kQWg;
        PartView mine = [&]() -> PartView {
          if constexpr (MODE == kFeatures) return t.part[wg]; else return part_of<BN, MODE>(p, t, row0, rows);
        }();
        const auto v_at = [&] { return base + L::kV + vr.stage * L::kVTile; };
        const auto issue_scores = [&](auto width) {
          mbar_wait(k_full(kr.stage), kr.phase);
          take_token();
          m.template scores<decltype(width)::value>(q, base + L::kK + kr.stage * L::kKTile);
        };
        const auto scores_here = [&] {
          release(k_empty(kr.stage));
          if (&kr != &vr) kr.advance();
          if (kDirect && j == mine.start) release(q_done(qring.stage, wg));
        };
        const auto whole = std::integral_constant<int, BN>{};
        const auto change_scores = [&] {
          if (p.softcap_log2 != 0.f) m.softcap(p.softcap_inner, p.softcap_log2); else m.times(p.dot_scale_log2);
          if (MORE && p.bias) {
            const float* at = p.bias + t.batch * p.bias_seq_stride + t.head * p.bias_head_stride;
            const int first = j * BN + 2 * (lane & 3), row = row0 + row_in_wg;
            const auto of_row = [&](int r) { return at + min(r, t.len_q - 1) * p.bias_row_stride + first * p.bias_key_stride; };
            m.bias({of_row(row), of_row(row + 8)}, p.bias_key_stride, t.len_k - first);
          }
          if (p.alibi_slopes) {
            const int own = row0 + row_in_wg + (p.top_left ? 0 : t.len_k - t.len_q) - j * BN - 2 * (lane & 3);
            m.alibi(p.alibi_slopes[t.head] * kLog2E, {own, own + 8});
          }
        };
        const auto drop = [&](int from, int to) {
          const uint32_t row = p.first_row + row0 + row_in_wg;
          m.drop(from, to, p.first_group + j * (BN / 4) + ((lane & 2) >> 1), {row, row + 8}, p.first_head + t.head, p.first_seq + t.batch,
                 p.seed_low, p.seed_high, p.dropped_below, p.kept_factor, lane);
        };
        const auto mask_tree = [&] {
          for (int h = 0; h < 2; ++h) {
            const int row = min(row0 + row_in_wg + 8 * h, t.len_q - 1) >> pack;
            const uint32_t* bits = p.tree + (long long)(t.q0 + row) * p.tree_words;
            const auto word = [&](int w) { return w < 0 ? ~0u : w < p.tree_words ? bits[w] : 0u; };
#pragma unroll
            for (int block = 0; block < BN / 32; ++block) {
              const int bit = j * BN + 32 * block - (t.len_k - (t.len_q >> pack));
              const uint32_t seen = __funnelshift_r(word(bit >> 5), word((bit >> 5) + 1), bit & 31);
              m.mask_bits(block, h, seen >> 2 * (lane & 3));
            }
          }
        };
        const auto mask = [&](auto width) {
          const int column0 = j * BN + 2 * (lane & 3);
          int lo[2], hi[2];
          for (int h = 0; h < 2; ++h) {
            const Keys keys = visible<MODE>(p, t, row0 + row_in_wg + 8 * h);
            lo[h] = keys.start - column0;
            hi[h] = keys.end - column0;
          }
          if constexpr (MODE == kFeatures) {
            m.mask_between(lo, hi);
            if (p.tree) mask_tree();
          } else {
            m.template mask<decltype(width)::value>(hi);
          }
        };
        // Rows that no query of the tile sees may hold anything, and 0 * NaN is NaN. Outside kFeatures: rows past the sequence,
        // which only the first key tile can have.
        const auto clear_v = [&](int tile) {
          const int front = MODE == kFeatures ? max(0, t.key_start - tile * BN) : 0;
          const int tail = (MODE == kFeatures ? t.key_end : t.len_k) - tile * BN;
          if (front <= 0 && tail >= BN) return;
          mbar_wait(v_full(vr.stage), vr.phase);
          const auto clear = [&](int from, int to) {
            for (int i = from * 8 + tid; i < to * 8; i += 128)
              for (int c = 0; c < L::kVChunks; ++c)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_at() + c * L::kKvChunk + i * 16), "r"(0) : "memory");
          };
          if (MODE == kFeatures) clear(0, front);
          clear(tail, BN);
          fence_async_proxy();
          named_sync(1 + wg, 128);
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
          scores_here();
          if (MODE == kFeatures && p.change_scores) change_scores();
          if (masked) { mask(width); clear_v(j); }
          if (m.template new_max<W>(p.scale_log2)) { m.rescale_sum(); m.rescale_o(); }
          pass_token(4);
          m.offsets(off, p.scale_log2);
#pragma unroll
          for (int g = 0; g < M::kGroups; ++g) {  // the products of one piece run while the next piece's exponentials are taken
            constexpr int per = W / 2 / M::kGroups, steps = W / 16 / M::kGroups;
            m.exponentials(g * per, (g + 1) * per, off, p.scale_log2);
            if (MODE == kFeatures && MORE && p.kept_factor != 0.f) drop(g * per, (g + 1) * per);
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
          if (MODE == kFeatures && MORE && p.kept_factor != 0.f) drop(0, BN / 2);
        };
        const auto step_first = [&](auto masked) {
          issue_scores(whole);
          pass_token(1);
          wgmma_wait<0>();
          pin(m.s);
          pass_token(3);
          scores_here();
          if (MODE == kFeatures && p.change_scores) change_scores();
          if (masked) { mask(whole); clear_v(j); }
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
          scores_here();
          if (MODE == kFeatures && p.change_scores) change_scores();
          if (masked) mask(whole);
          const bool moved = m.new_max(p.scale_log2);
          pass_token(4);
          soften();
          not_negative(m.row_sum[0] + m.row_sum[1], base + L::kZero);
          wgmma_wait<0>();
          done_v();
          if (MODE == kFeatures && masked) clear_v(j);
          if (moved) m.rescale_o();
          m.pack(0, BN / 2);
        };
        const auto overlapped = [&] {  // kFeatures
          const int first = mine.start, whole_start = max(first, mine.whole_start), whole_end = max(first, mine.whole_end);
          step_first(j >= whole_end || j < whole_start);
          --j;
#pragma unroll 1
          for (; j >= whole_end; --j) step_overlap(Yes{});
#pragma unroll 1
          for (; j >= whole_start; --j) step_overlap(No{});
#pragma unroll 1
          for (; j >= first; --j) step_overlap(Yes{});
        };
        m.reset();
        if (MODE == kFeatures && p.sinks && (!MORE || blockIdx.y == 0)) {
          const float sink = p.sinks[t.head] * kLog2E;
          if (sink > -INFINITY) {
            m.row_max[0] = m.row_max[1] = sink / p.scale_log2;
            m.row_sum[0] = m.row_sum[1] = (lane & 3) == 0 ? 1.f : 0.f;  // the four threads of a row are added at the end
          }
        }
#pragma unroll 1
        for (; j >= mine.end; --j) skip();
        mbar_wait(q_full(qring.stage, wg), (q_phase >> qring.stage) & 1);
        q_phase ^= 1u << qring.stage;
        if (kDirect && j < mine.start) release(q_done(qring.stage, wg));
        if constexpr (Chosen::kOverlap) {
          if (j >= mine.start) {
            if constexpr (MODE == kFeatures) {
              overlapped();
            } else {
              if (j >= mine.whole_end) step_first(Yes{}); else step_first(No{});
              --j;
              for (; j >= mine.whole_end; --j) step_overlap(Yes{});
              for (; j >= 0; --j) step_overlap(No{});
            }
            mbar_wait(v_full(vr.stage), vr.phase);
            m.products(v_at(), 0, BN / 16);
            wgmma_wait<0>();
            done_v();
          }
        } else if constexpr (MODE == kFeatures) {
          const int first = mine.start, whole_start = max(first, mine.whole_start), whole_end = max(first, mine.whole_end);
#pragma unroll 1
          for (; j >= whole_end; --j) step_plain(Yes{}, whole);
#pragma unroll 1
          for (; j >= whole_start; --j) step_plain(No{}, whole);
#pragma unroll 1
          for (; j >= first; --j) step_plain(Yes{}, whole);
        } else {
          if constexpr (MODE == kCausal && BN == 128) {  // half a tile where the diagonal needs no more
            if (j >= mine.whole_end && visible<MODE>(p, t, row0 + rows - 1).end - j * BN <= BN / 2) {
              step_plain(Yes{}, std::integral_constant<int, BN / 2>{});
              --j;
            }
          }
          for (; j >= mine.whole_end; --j) step_plain(Yes{}, whole);
          for (; j >= 0; --j) step_plain(No{}, whole);
        }
        if constexpr (MODE == kFeatures) {
#pragma unroll 1
          for (; j >= all.start; --j) skip();
        }

        // o / sum: into the buffer that held this warpgroup's q, or straight to memory.
#if MORE
        const long long part = (long long)(blockIdx.y * p.num_kv_heads * p.group_size << pack) * p.total_q;  // rows of the parts before
        float* const lse = gridDim.y > 1 ? p.partial_lse + part : p.lse;
#else
        float* const lse = p.lse;
#endif
        float inv[2];
        const auto token_of = [&](int row) { return t.q0 + (row >> pack); };
        const auto head_of = [&](int row) { return (t.head << pack) + (row & ((1 << pack) - 1)); };
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = m.row_sum[h];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          const int row = row0 + row_in_wg + 8 * h;
          inv[h] = sum > 0.f ? 1.f / sum : 0.f;
          if ((lane & 3) == 0 && row < t.len_q)
            lse[(long long)head_of(row) * p.total_q + token_of(row)] =
                sum > 0.f ? m.row_max[h] * p.scale + logf(sum) : -INFINITY;
        }
#if MORE
        if (gridDim.y > 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = row0 + row_in_wg + 8 * h;
            float* const to = p.partial_o + (part + (long long)head_of(row) * p.total_q + token_of(row)) * DV + 2 * (lane & 3);
            if (row >= t.len_q) continue;
#pragma unroll
            for (int col = 0; col < DV; col += 8) {
              const int i = col / 2 + 2 * h;
              asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to + col), "f"(m.o[i] * inv[h]), "f"(m.o[i + 1] * inv[h]) : "memory");
            }
          }
        } else
#endif
        if (!kDirect && rows == 64) {
          // All four warps have read q: each wrote its own rows only after its own last product, but q rows of a warp are
          // read by that warp's products alone, so no barrier is needed before writing.
#pragma unroll
          for (int i = 0; i < DV / 2; i += 2) {
            const int h = (i >> 1) & 1, col = (i / 4) * 8, r = row_in_wg + 8 * h;
            const uint32_t dst = q + (col / 64) * L::kQChunk + r * 128 + ((((col % 64) / 8) ^ (r & 7)) * 16) + (lane & 3) * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(pack16<T>(m.o[i] * inv[h], m.o[i + 1] * inv[h])) : "memory");
          }
          fence_async_proxy();
        } else {  // also where the next rows belong to another sequence
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = row0 + row_in_wg + 8 * h;
            uint16_t* to = (uint16_t*)p.o + (long long)token_of(row) * p.o_token_stride + head_of(row) * p.o_head_stride + 8 * (lane & 3);
#pragma unroll
            for (int col = 0; col < DV; col += 32) {
              uint32_t w[4];
#pragma unroll
              for (int b = 0; b < 4; ++b) {
                const int i = (col / 8 + b) * 4 + 2 * h;
                w[b] = pack16<T>(m.o[i] * inv[h], m.o[i + 1] * inv[h]);
              }
              transpose_quad(w, lane);
              if (row < t.len_q)
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + col), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
            }
          }
        }
        if (!kDirect) {
          __syncwarp();
          release(q_done(qring.stage, wg));
        }
      }
      qring.advance();
      if (kKeepSlot) {
        __syncwarp();
        release(slot_empty(slot.stage ^ 1));
      }
    }
  }
}

// What the host must know of this build: math warpgroups, keys a tile, bytes of shared memory.
extern "C" __device__ const int forward_tiling[3] = {Layout<HEAD_DIM, HEAD_DIM_V>::kNumWg, Layout<HEAD_DIM, HEAD_DIM_V>::kBn,
                                                     Layout<HEAD_DIM, HEAD_DIM_V>::kBytes};

#define FORWARD_KERNEL(NAME, MODE)                                                                                            \
  extern "C" __global__ void __launch_bounds__((Chosen::kNumWg + 1) * 128, 1)                                                 \
      NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,                              \
           const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,                              \
           const __grid_constant__ ForwardParams p) {                                                                         \
    forward_body<HEAD_DIM, HEAD_DIM_V, DTYPE, MODE>(&q_map, &k_map, &v_map, &o_map, p);                                       \
  }
#if MORE
FORWARD_KERNEL(forward_more, kFeatures)
#else
FORWARD_KERNEL(forward_full, kFull)
FORWARD_KERNEL(forward_causal, kCausal)
FORWARD_KERNEL(forward_features, kFeatures)
#endif

}  // namespace suanpan
