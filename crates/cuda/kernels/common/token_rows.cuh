// How kernels that go over all rows of K and V of packed tokens share them out: a warp takes a token, or one of `parts` of its rows where there are
// few tokens, and so finds sequence and page once for many rows. Not here: what is done with a row.
#pragma once

namespace suanpan {

// D / 8 lanes a row; row r of a token is of k below `heads`, of v from there on.
template <int D> struct TokenRows {
  static constexpr int kLanes = D / 8, kRows = 32 / kLanes, kAhead = 4;  // rows side by side in a warp, and loads on their way
  int token, first, rows, step;

  // The unit-th of tokens * parts.
  __device__ __forceinline__ TokenRows(int unit, int parts, int heads)
      : token(unit / parts), first(unit % parts * kRows), rows(2 * heads), step(parts * kRows) {}

  // load(n, row) for the next rows, then use(n, row), n < kAhead, in turn; `row` is at least `rows` for lanes that have none. The warp stays whole.
  template <class Load, class Use> __device__ __forceinline__ void each(const Load& load, const Use& use) const {
    const int mine = threadIdx.x % 32 / kLanes;
#pragma unroll 1
    for (int at = first; at < rows; at += kAhead * step) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) load(n, at + n * step + mine);
#pragma unroll
      for (int n = 0; n < kAhead; ++n)
        if (at + n * step < rows) use(n, at + n * step + mine);
    }
  }
};

}  // namespace suanpan
