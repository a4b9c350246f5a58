// Decode for Hopper (sm_90a) of multi-head latent attention: one kv head of 576 elements, of which the first 512 are the values too, so
// that every key is read once. bf16, paged, split over the keys. Not here: absorbing the projections, quantised caches.
//
// A block takes 64 query rows (head, or token and head) over a part of a sequence's keys. A tile of 64 keys and the queries lie in
// shared memory (72 KB each, two tiles). Two warpgroups share each tile: each scores half of its keys, they swap maxima and
// probabilities through shared memory, and each sums up half of the 512 columns:
//
//   producer   | tile j+1 .................. | tile j+2 (into j's place) ...
//   warpgroup 0| q k[0:32]  max ⇄ exp P⇄ | P v[:, 0:256]   | q k[0:32] ..
//   warpgroup 1| q k[32:64] max ⇄ exp P⇄ | P v[:, 256:512] | ..
//
// Parts leave f32 partial results that decode_mla_merge, the next kernel on the stream, adds up in order: no bit depends on timing.
#include "../common/mma.cuh"
#include "../common/wgmma.cuh"

namespace suanpan {

// d (64 x 32) = or += a b^T over 16 columns, both K-major in shared memory.
__device__ __forceinline__ void wgmma_32(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate));
}

struct MlaParams {
  void* o;                // [batch * seqlen_q, num_q_heads, 512] bf16, contiguous
  float* lse;             // [num_q_heads, batch * seqlen_q], natural logarithm
  const int* seqlens_k;   // [batch]
  const int* page_table;  // [batch, pages_max]
  float* partial;         // [batch, parts, rows, 512 + 4]: o, maximum (base 2), sum, two unused; where parts > 1
  int batch;
  int seqlen_q;
  int num_q_heads;
  int page_size;          // tokens, a multiple of 16
  int pages_max;
  int piece_rows;         // rows that one copy brings: 64 when pages allow, else 16
  int parts;              // of a sequence's keys
  float scale_log2;
};

constexpr int DK = 576, DV = 512, BM = 64, BN = 64;
constexpr int kChunk = 64 * 128;            // bytes of 64 rows of 64 columns
constexpr int kTile = DK / 64 * kChunk;     // q, or a tile of keys
constexpr int kRecord = DV + 4;             // floats of a row's partial result
constexpr int kQ = 0, kKv = kTile, kP = kKv + 2 * kTile;  // P: [64 rows][64 keys] bf16, swizzled by 16-byte pieces
constexpr int kMax = kP + BM * 128;         // [2][64] f32: the warpgroups' maxima, then sums
constexpr int kBars = kMax + 2 * BM * 4;
constexpr int kBytes = kBars + 64 + 1024;
static_assert(kBytes <= 232448, "more shared memory than a block can have");

extern "C" __device__ const int decode_mla_tiling[2] = {BM, kBytes};

__device__ __forceinline__ uint32_t p_at(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) * 16); }

struct Part { int len, from, to; };  // tiles of this block
__device__ __forceinline__ Part part_of(const MlaParams& p, int b, int part) {
  Part x;
  x.len = max(0, p.seqlens_k[b]);
  const int tiles = (x.len + BN - 1) / BN;
  x.from = (int)((long long)tiles * part / p.parts);
  x.to = (int)((long long)tiles * (part + 1) / p.parts);
  return x;
}

__device__ void produce(const CUtensorMap& q_map, const CUtensorMap& kv_map, const MlaParams& p, uint32_t base, const Part& part, int b, int row0) {
  const int lane = threadIdx.x % 32;
  const uint32_t q_full = base + kBars;
  const auto full = [&](int s) { return base + kBars + 8 + 8 * s; };
  const auto empty = [&](int s) { return base + kBars + 24 + 8 * s; };
  if (lane == 0) {
    mbar_expect(q_full, kTile);
    for (int c = 0; c < DK / 64; ++c) tma_load_3d(base + kQ + c * kChunk, &q_map, q_full, c * 64, b * p.seqlen_q * p.num_q_heads + row0, 0);
  }
  const int pieces = BN / p.piece_rows, piece = lane % pieces;
  const int* const pages = p.page_table + (long long)b * p.pages_max;
  const auto token_of = [&](int tile) { return tile * BN + piece * p.piece_rows; };
  const auto page_of = [&](int tile) { return token_of(tile) < part.len ? pages[token_of(tile) / p.page_size] : 0; };
  int page = page_of(part.from);
  uint32_t phase = 0;
  for (int j = part.from; j < part.to; ++j) {
    const int next = j + 1 < part.to ? page_of(j + 1) : 0, stage = (j - part.from) & 1, token = token_of(j);
    const bool mine = token < part.len;
    const int used = min(pieces, (part.len - j * BN + p.piece_rows - 1) / p.piece_rows);
    mbar_wait(empty(stage), phase ^ 1);
    if (lane == 0) mbar_expect(full(stage), used * (DK / 64) * p.piece_rows * 128);
    __syncwarp();
    for (int i = lane; i < pieces * (DK / 64); i += 32) {
      const int c = i / pieces;
      if (mine)
        tma_load_3d(base + kKv + stage * kTile + c * kChunk + piece * p.piece_rows * 128, &kv_map, full(stage), c * 64, token % p.page_size, page);
    }
    page = next;
    phase ^= stage;
  }
}

__device__ void consume(const MlaParams& p, uint8_t* smem, uint32_t base, const Part& part, int b, int row0) {
  const int w = threadIdx.x / 128 - 1, tid = threadIdx.x % 128, warp = tid / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;  // and row + 8
  const uint32_t q_full = base + kBars;
  const auto full = [&](int s) { return base + kBars + 8 + 8 * s; };
  const auto empty = [&](int s) { return base + kBars + 24 + 8 * s; };
  float* const maxima = (float*)(smem + kMax);
  float o[DV / 4], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < DV / 4; ++i) o[i] = 0.f;
  int seen[2];  // keys that this thread's rows see
  const int rows = p.seqlen_q * p.num_q_heads;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row0 + row + 8 * h;
    seen[h] = r < rows ? part.len - p.seqlen_q + r / p.num_q_heads + 1 : 0;
  }
  mbar_wait(q_full, 0);
  uint32_t phase = 0;
  for (int j = part.from; j < part.to; ++j) {
    const int stage = (j - part.from) & 1;
    const uint32_t kv = base + kKv + stage * kTile;
    float s[16];
    mbar_wait(full(stage), phase);
    {
      const uint32_t qd = desc_low(base + kQ, 0), kd = desc_low(kv + w * 32 * 128, 0);
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int ks = 0; ks < DK / 16; ++ks) {
        const uint32_t step = ((ks / 4) * kChunk + (ks % 4) * 32) / 16;
        wgmma_32(s, desc(qd + step), desc(kd + step), ks > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
    }
    const int key = j * BN + w * 32 + 2 * (lane & 3);
    if (j * BN + BN > part.len - p.seqlen_q + 1) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (key + (i / 4) * 8 + (i & 1) >= seen[(i >> 1) & 1]) s[i] = -INFINITY;
    }
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = s[2 * h];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (((i >> 1) & 1) == h) m = fmaxf(m, s[i]);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      top[h] = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      if ((lane & 3) == 0) maxima[w * BM + row + 8 * h] = top[h];
    }
    named_sync(1, 256);  // both halves are scored, and their maxima known; P of the tile before has been read
    bool moved = false;
    float corr[2], off[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = fmaxf(top[h], maxima[(1 - w) * BM + row + 8 * h]);
      const bool up = (m - row_max[h]) * p.scale_log2 > 8.f;  // rescale rarely: see forward.cu; both warpgroups decide alike
      corr[h] = up ? exp2_fast((row_max[h] - m) * p.scale_log2) : 1.f;
      row_max[h] = up ? m : row_max[h];
      off[h] = row_max[h] == -INFINITY ? 0.f : row_max[h] * p.scale_log2;
      row_sum[h] *= corr[h];
      moved |= up;
    }
    uint32_t own[8];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const int h = (i >> 1) & 1;
      const float a = exp2_fast(fmaf(s[i], p.scale_log2, -off[h])), c = exp2_fast(fmaf(s[i + 1], p.scale_log2, -off[h]));
      row_sum[h] += a + c;
      own[i / 2] = pack_bf16(a, c);
      *(uint32_t*)(smem + kP + p_at(row + 8 * h, w * 4 + i / 4) + (lane & 3) * 4) = own[i / 2];
    }
    const int tail = part.len - j * BN;
    if (tail < BN) {  // rows past the keys hold anything, and 0 * NaN is NaN
      for (int i = tail * 8 + tid; i < BN * 8; i += 128)
        for (int c = 4 * w; c < 4 * w + 4; ++c) *(uint4*)(smem + (kv - base) + c * kChunk + i * 16) = uint4{0, 0, 0, 0};
      fence_async_proxy();
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int i = 0; i < DV / 4; ++i) o[i] *= corr[(i >> 1) & 1];
    }
    named_sync(2, 256);  // all of P is there
    uint32_t pk[16];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t r[4];
      load_matrices(r, base + kP + p_at(warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
      for (int i = 0; i < 4; ++i) pk[4 * k + i] = r[i];
    }
    const uint32_t vd = desc_low(kv + 4 * w * kChunk, kChunk);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BN / 16; ++k) Wgmma<256, Bf16>::rs(o, pk + 4 * k, desc(vd + k * (2048 / 16)), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    if (tid == 0) mbar_arrive(empty(stage));
    phase ^= stage;
  }

  // The warpgroups' sums of their halves of the keys.
  named_sync(1, 256);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = row_sum[h];
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    if ((lane & 3) == 0) maxima[w * BM + row + 8 * h] = x;
  }
  named_sync(2, 256);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row0 + row + 8 * h;
    if (r >= rows) continue;
    const float sum = maxima[row + 8 * h] + maxima[BM + row + 8 * h], m = row_max[h] * p.scale_log2;
    const int token = b * p.seqlen_q + r / p.num_q_heads, head = r % p.num_q_heads, column = w * 256 + 2 * (lane & 3);
    if (p.parts == 1) {
      const float inv = sum > 0.f ? 1.f / sum : 0.f;
      uint16_t* out = (uint16_t*)p.o + ((long long)token * p.num_q_heads + head) * DV + column;
#pragma unroll
      for (int i = 0; i < 32; ++i) *(uint32_t*)(out + 8 * i) = pack_bf16(o[4 * i + 2 * h] * inv, o[4 * i + 2 * h + 1] * inv);
      if (w == 0 && (lane & 3) == 0)
        p.lse[(long long)head * p.batch * p.seqlen_q + token] = sum > 0.f ? (m + log2f(sum)) * 0.6931471805599453f : -INFINITY;
    } else {
      float* out = p.partial + (((long long)b * p.parts + blockIdx.x) * rows + r) * kRecord;
#pragma unroll
      for (int i = 0; i < 32; ++i) __stcg((float2*)(out + column + 8 * i), float2{o[4 * i + 2 * h], o[4 * i + 2 * h + 1]});
      if (w == 0 && (lane & 3) == 0) __stcg((float2*)(out + DV), float2{m, sum});
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
decode_mla(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ MlaParams p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u;
  uint8_t* const smem = smem_raw + (base - smem_addr(smem_raw));
  const int b = blockIdx.z, row0 = blockIdx.y * BM;
  if (threadIdx.x == 0) {
    mbar_init(base + kBars, 1);
    for (int s = 0; s < 2; ++s) {
      mbar_init(base + kBars + 8 + 8 * s, 1);
      mbar_init(base + kBars + 24 + 8 * s, 2);
    }
    mbar_init_fence();
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&kv_map);
  }
  const Part part = part_of(p, b, blockIdx.x);
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x < 32) produce(q_map, kv_map, p, base, part, b, row0);
  } else {
    registers_up<240>();
    consume(p, smem, base, part, b, row0);
  }
}

// Adds up the parts of a row: grid (rows, batch), 128 threads of four columns each.
extern "C" __global__ void __launch_bounds__(128) decode_mla_merge(const __grid_constant__ MlaParams p) {
  const int rows = p.seqlen_q * p.num_q_heads, r = blockIdx.x, b = blockIdx.y, column = threadIdx.x * 4;
  const auto record = [&](int i) { return p.partial + (((long long)b * p.parts + i) * rows + r) * kRecord; };
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < p.parts; ++i) top = fmaxf(top, record(i)[DV]);
  const float low = top == -INFINITY ? 0.f : top;
  float4 acc = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int i = 0; i < p.parts; ++i) {
    const float2 of = *(const float2*)(record(i) + DV);
    const float4 x = *(const float4*)(record(i) + column);
    const float f = exp2_fast(of.x - low);
    sum += f * of.y;
    acc.x += f * x.x;
    acc.y += f * x.y;
    acc.z += f * x.z;
    acc.w += f * x.w;
  }
  const float inv = sum > 0.f ? 1.f / sum : 0.f;
  const int token = b * p.seqlen_q + r / p.num_q_heads, head = r % p.num_q_heads;
  *(uint2*)((uint16_t*)p.o + ((long long)token * p.num_q_heads + head) * DV + column) =
      uint2{pack_bf16(acc.x * inv, acc.y * inv), pack_bf16(acc.z * inv, acc.w * inv)};
  if (threadIdx.x == 0)
    p.lse[(long long)head * p.batch * p.seqlen_q + token] = sum > 0.f ? (top + log2f(sum)) * 0.6931471805599453f : -INFINITY;
}

}  // namespace suanpan
