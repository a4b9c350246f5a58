// A bare loop of matrix products on random numbers, three warpgroups a multiprocessor: the rate that attention is held against.
// Not here: anything loaded or stored while it runs.
#include "../common/wgmma.cuh"

namespace suanpan {

constexpr int kWarpgroups = 3;

// FLOPs: grid x kWarpgroups x loops x 8 products of 64 x 128 x 16.
extern "C" __global__ void __launch_bounds__(kWarpgroups * 128, 1) matrix_peak(const uint32_t* random, int loops, float* out) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
  const int wg = threadIdx.x / 128;
  // A of each warpgroup (64 rows) and B (128 rows), two chunks of 64 columns: 16 KB each and 32 KB.
  for (int i = threadIdx.x; i < (kWarpgroups * 16 + 32) * 256; i += kWarpgroups * 128)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + 4 * i), "r"(random[i]) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint32_t a = desc_low(base + 32768 + wg * 16384, 0), b = desc_low(base, 0);
  float s[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = 0.f;
#pragma unroll 1
  for (int n = 0; n < loops; ++n) {
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 8; ++ks)
      Wgmma<128, Bf16>::ss(s, desc(a + ((ks / 4) * 8192 + (ks % 4) * 32) / 16), desc(b + ((ks / 4) * 16384 + (ks % 4) * 32) / 16), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += s[i];
  if (sum == 1.f) out[threadIdx.x] = sum;
}

}  // namespace suanpan
