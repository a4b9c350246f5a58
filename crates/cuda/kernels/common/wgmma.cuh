// Warpgroup matrix multiply (wgmma), sums in f32 or 32-bit integers: descriptors, fences, one wrapper for all widths and operand types.
// Not here: any tiling or softmax. Operand layouts are the 128-byte swizzle that the copy engine writes.
#pragma once
#include <cstdint>

namespace suanpan {

struct Bf16 {};  // tags that choose the operand type inside the instruction text
struct Fp16 {};
struct E4m3 {};
struct S8 {};

// Shared-memory matrix descriptor, 128-byte swizzle. `lead` is the distance in bytes between 64-element chunks of an
// MN-major operand (ignored for a K-major one); 1,024 is the distance between groups of eight 128-byte rows. Shared memory
// is small enough for `addr` to need no masking, so a step through an operand is one 32-bit add on the low word.
__device__ __forceinline__ uint32_t desc_low(uint32_t addr, uint32_t lead) { return (addr >> 4) | (lead >> 4 << 16); }
__device__ __forceinline__ uint64_t desc(uint32_t low) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "n"((1024 >> 4) | (1 << 30)));
  return d;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler does not know that an accumulator changes between issue and wait: an empty asm that claims to rewrite it
// keeps reads below the wait and writes above the issue.
template <int N> __device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N> __device__ __forceinline__ void pin(int (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// The wrapper, spelled once. WG_TEXT_n names n accumulators in the instruction, WG_LIST_n hands them over (c: "+f" in and out, "=f" out).
#define WG_T8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define WG_L8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define WG_TEXT_32                                                                                                                  \
  WG_T8(0, 1, 2, 3, 4, 5, 6, 7) ", " WG_T8(8, 9, 10, 11, 12, 13, 14, 15) ", " WG_T8(16, 17, 18, 19, 20, 21, 22, 23) ", "            \
  WG_T8(24, 25, 26, 27, 28, 29, 30, 31)
#define WG_LIST_32(c, d)                                                                                                            \
  WG_L8(c, d, 0), WG_L8(c, d, 8), WG_L8(c, d, 16), WG_L8(c, d, 24)
#define WG_TEXT_40                                                                                                                  \
  WG_TEXT_32 ", " WG_T8(32, 33, 34, 35, 36, 37, 38, 39)
#define WG_LIST_40(c, d)                                                                                                            \
  WG_LIST_32(c, d), WG_L8(c, d, 32)
#define WG_TEXT_48                                                                                                                  \
  WG_TEXT_40 ", " WG_T8(40, 41, 42, 43, 44, 45, 46, 47)
#define WG_LIST_48(c, d)                                                                                                            \
  WG_LIST_40(c, d), WG_L8(c, d, 40)
#define WG_TEXT_64                                                                                                                  \
  WG_TEXT_48 ", " WG_T8(48, 49, 50, 51, 52, 53, 54, 55) ", " WG_T8(56, 57, 58, 59, 60, 61, 62, 63)
#define WG_LIST_64(c, d)                                                                                                            \
  WG_LIST_48(c, d), WG_L8(c, d, 48), WG_L8(c, d, 56)
#define WG_TEXT_96                                                                                                                  \
  WG_TEXT_64 ", " WG_T8(64, 65, 66, 67, 68, 69, 70, 71) ", " WG_T8(72, 73, 74, 75, 76, 77, 78, 79) ", "                             \
  WG_T8(80, 81, 82, 83, 84, 85, 86, 87) ", " WG_T8(88, 89, 90, 91, 92, 93, 94, 95)
#define WG_LIST_96(c, d)                                                                                                            \
  WG_LIST_64(c, d), WG_L8(c, d, 64), WG_L8(c, d, 72), WG_L8(c, d, 80), WG_L8(c, d, 88)
#define WG_TEXT_128                                                                                                                 \
  WG_TEXT_96 ", " WG_T8(96, 97, 98, 99, 100, 101, 102, 103) ", " WG_T8(104, 105, 106, 107, 108, 109, 110, 111) ", "                 \
  WG_T8(112, 113, 114, 115, 116, 117, 118, 119) ", " WG_T8(120, 121, 122, 123, 124, 125, 126, 127)
#define WG_LIST_128(c, d)                                                                                                           \
  WG_LIST_96(c, d), WG_L8(c, d, 96), WG_L8(c, d, 104), WG_L8(c, d, 112), WG_L8(c, d, 120)

// One instruction. `accumulate` is the text of a register or of 0: whether the sum starts from what is there.
#define WG_ISSUE(N, REGS, SHAPE, A, B, accumulate, flags, c, ...)                                                                   \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate ", 0;\n"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" WG_TEXT_##REGS "}, " A ", " B ", p, 1, 1" flags "; }"              \
               : WG_LIST_##REGS(c, d) : __VA_ARGS__)

// ss: A and B from shared memory, B K-major. rs: A from registers, B MN-major (8-bit: K-major). REGS accumulators a thread; r0.. the
// numbers that follow theirs.
#define WG_ROWS(N, REGS, SHAPE, ss_flags, rs_flags, r0, r1, r2, r3, r4, r5)                                                         \
  __device__ __forceinline__ static void ss(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) {                             \
    WG_ISSUE(N, REGS, SHAPE, "%" #r0, "%" #r1, "%" #r2, ss_flags, "+f", "l"(a), "l"(b), "r"(accumulate));                           \
  }                                                                                                                                 \
  __device__ __forceinline__ static void rs(float (&d)[REGS], const uint32_t* a, uint64_t b, int accumulate) {                      \
    WG_ISSUE(N, REGS, SHAPE, "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}", "%" #r4, "%" #r5, rs_flags, "+f",                          \
             "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                                  \
  }
// The same from zero, so that the accumulators need not live before.
#define WG_FIRST_ROWS(N, REGS, SHAPE, r0, r1, r2, r3, r4)                                                                           \
  __device__ __forceinline__ static void ss_first(float (&d)[REGS], uint64_t a, uint64_t b) {                                       \
    WG_ISSUE(N, REGS, SHAPE, "%" #r0, "%" #r1, "0", "", "=f", "l"(a), "l"(b));                                                      \
  }                                                                                                                                 \
  __device__ __forceinline__ static void rs_first(float (&d)[REGS], const uint32_t* a, uint64_t b) {                                \
    WG_ISSUE(N, REGS, SHAPE, "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}", "%" #r4, "0", "", "=f",                                    \
             "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                                   \
  }

template <int N, class T> struct Wgmma;

#define WG_16BIT(N, REGS, ...)                                                                                                      \
  template <> struct Wgmma<N, Bf16> { WG_ROWS(N, REGS, "k16.f32.bf16.bf16", ", 0, 0", ", 1", __VA_ARGS__) };                        \
  template <> struct Wgmma<N, Fp16> { WG_ROWS(N, REGS, "k16.f32.f16.f16", ", 0, 0", ", 1", __VA_ARGS__) };
#define WG_8BIT(N, REGS, r0, r1, r2, r3, r4, r5)                                                                                    \
  template <> struct Wgmma<N, E4m3> {                                                                                               \
    WG_ROWS(N, REGS, "k32.f32.e4m3.e4m3", "", "", r0, r1, r2, r3, r4, r5)                                                           \
    WG_FIRST_ROWS(N, REGS, "k32.f32.e4m3.e4m3", r0, r1, r2, r3, r4)                                                                 \
  };
// 8-bit integers in two's complement, both operands from shared memory, K-major; sums are exact in 32 bits up to 2^17 products.
#define WG_INT(N, REGS, r0, r1)                                                                                                     \
  template <> struct Wgmma<N, S8> {                                                                                                 \
    __device__ __forceinline__ static void ss(int (&d)[REGS], uint64_t a, uint64_t b) {                                             \
      WG_ISSUE_INT(N, REGS, "%" #r0, "%" #r1, "1", "+r", "l"(a), "l"(b));                                                           \
    }                                                                                                                               \
    __device__ __forceinline__ static void ss_first(int (&d)[REGS], uint64_t a, uint64_t b) {                                       \
      WG_ISSUE_INT(N, REGS, "%" #r0, "%" #r1, "0", "=r", "l"(a), "l"(b));                                                           \
    }                                                                                                                               \
  };
#define WG_ISSUE_INT(N, REGS, A, B, accumulate, c, ...)                                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate ", 0;\n"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" WG_TEXT_##REGS "}, " A ", " B ", p; }"                      \
               : WG_LIST_##REGS(c, d) : __VA_ARGS__)
WG_16BIT(64, 32, 32, 33, 34, 35, 36, 37)
WG_16BIT(80, 40, 40, 41, 42, 43, 44, 45)
WG_16BIT(96, 48, 48, 49, 50, 51, 52, 53)
WG_16BIT(128, 64, 64, 65, 66, 67, 68, 69)
WG_16BIT(192, 96, 96, 97, 98, 99, 100, 101)
WG_16BIT(256, 128, 128, 129, 130, 131, 132, 133)
WG_8BIT(64, 32, 32, 33, 34, 35, 36, 37)
WG_8BIT(128, 64, 64, 65, 66, 67, 68, 69)
WG_INT(128, 64, 64, 65)

}  // namespace suanpan
