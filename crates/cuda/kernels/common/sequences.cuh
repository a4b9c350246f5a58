// Packed sequences: which one a token belongs to. Not here: what the kernels do with it.
#pragma once

namespace suanpan {

// The last of `batch` sequences that starts at or before `token`; starts: [batch + 1], ascending.
__device__ __forceinline__ int sequence_of(const int* starts, int batch, int token) {
  int low = 0, high = batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= token) low = middle; else high = middle - 1;
  }
  return low;
}

}  // namespace suanpan
