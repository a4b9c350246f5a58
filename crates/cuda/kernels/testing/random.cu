// Fills a 16-bit buffer with independent normal numbers, or any buffer with one word: inputs for tests and benches.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

__device__ uint64_t mix(uint64_t x) {  // a 64-bit finaliser: neighbouring counters give unrelated bits
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

extern "C" __global__ void fill_normal(uint16_t* out, unsigned long long n, unsigned long long seed, int fp16) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n / 2; i += gridDim.x * 256ull) {
    const uint64_t r = mix(i * 0x9e3779b97f4a7c15ull + mix(seed));
    const float radius = sqrtf(-2.f * logf(((uint32_t)r + 1.f) * 0x1p-32f));
    float s, c;
    sincospif((uint32_t)(r >> 32) * 0x1p-31f, &s, &c);
    if (fp16) ((half2*)out)[i] = __floats2half2_rn(radius * s, radius * c);
    else ((__nv_bfloat162*)out)[i] = __floats2bfloat162_rn(radius * s, radius * c);
  }
}

extern "C" __global__ void fill_word(uint32_t* out, unsigned long long n, uint32_t word) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) out[i] = word;
}

// Random bits under a mask: quantised numbers.
extern "C" __global__ void fill_bits(uint32_t* out, unsigned long long n, unsigned long long seed, uint32_t mask) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull)
    out[i] = (uint32_t)mix(i * 0x9e3779b97f4a7c15ull + mix(seed)) & mask;
}

// Reads a buffer once and writes next to nothing: what the memory gives.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* in, unsigned long long n, uint32_t* out) {
  uint32_t sum = 0;
  const unsigned long long step = gridDim.x * 512ull;
  unsigned long long i = blockIdx.x * 512ull + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __ldcs(in + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  for (; i < n; i += step) sum += in[i].x;
  if (sum == 0x12345678u) *out = sum;
}
