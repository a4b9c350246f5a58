// Joins what forward.cu made of parts of the keys: o and lse of every row, as if all keys had been read at once. A warp a row; parts are added
// in their order, so that no bit depends on when they came.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

namespace suanpan {

struct CombineParams {
  const float* partial_o;    // [splits, heads, total_q, head_dim_v]
  const float* partial_lse;  // [splits, heads, total_q], natural logarithm
  void* o;                   // [total_q, heads, head_dim_v] bf16 or fp16, strides in elements, even
  float* lse;                // [heads, total_q]
  long long o_token_stride;
  long long o_head_stride;
  int splits;
  int heads;
  int total_q;
  int head_dim_v;            // even
  int fp16;
};

extern "C" __global__ void __launch_bounds__(256) forward_combine(const __grid_constant__ CombineParams p) {
  const long long rows = (long long)p.heads * p.total_q, row = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float top = -INFINITY;
  for (int s = 0; s < p.splits; ++s) top = fmaxf(top, p.partial_lse[s * rows + row]);
  const float low = top == -INFINITY ? 0.f : top;
  float sum = 0.f;
  for (int s = 0; s < p.splits; ++s) sum += __expf(p.partial_lse[s * rows + row] - low);
  const float inverse = sum > 0.f ? 1.f / sum : 0.f;
  const int head = row / p.total_q, token = row % p.total_q;
  uint16_t* const to = (uint16_t*)p.o + token * p.o_token_stride + head * p.o_head_stride;
  for (int d = 2 * lane; d < p.head_dim_v; d += 64) {
    float2 x = {0.f, 0.f};
    for (int s = 0; s < p.splits; ++s) {
      const float w = __expf(p.partial_lse[s * rows + row] - low);
      const float2 part = *(const float2*)(p.partial_o + (s * rows + row) * p.head_dim_v + d);
      x.x += w * part.x;
      x.y += w * part.y;
    }
    x.x *= inverse;
    x.y *= inverse;
    if (p.fp16) *(__half2*)(to + d) = __float22half2_rn(x);
    else *(__nv_bfloat162*)(to + d) = __float22bfloat162_rn(x);
  }
  if (lane == 0) p.lse[row] = sum > 0.f ? top + logf(sum) : -INFINITY;
}

}  // namespace suanpan
