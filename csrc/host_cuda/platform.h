// Implements cuda/platform.cuh on the CPU, for tests: a block's threads are fibers that run in turn; every access to a
// tensor or to shared memory is checked, and that all threads reach the same barriers.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "common/half.h"

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim { unsigned x; };
extern Dim threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
float __shfl_xor_sync(unsigned mask, float value, int lane);
inline unsigned atomicMax(unsigned* p, unsigned v) {
  const unsigned old = *p;
  if (v > old) *p = v;
  return old;
}

namespace megatron {

// Runs all blocks sequentially; returns null, or the first error of a thread.
const char* run_blocks(int64_t blocks, int64_t threads, const std::function<void()>& kernel);
inline void require(bool right, const std::string& wrong) {
  if (!right) throw std::runtime_error(wrong);
}

template <typename T> T of_bits(uint16_t bits) { return {bits}; }
template <typename T> uint16_t bits_of(T v) { return v.bits; }
inline float fast_exp(float v) { return std::exp(v); }

template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T of[N]; };

template <typename T> struct Array {
  T* p;
  int64_t size;
  Array(const void* pointer, int64_t size) : p(static_cast<T*>(const_cast<void*>(pointer))), size(p ? size : 0) {}
  explicit operator bool() const { return p != nullptr; }
  T get(int64_t i) const { return *checked(i, 1); }
  void set(int64_t i, T v) const { *checked(i, 1) = v; }
  template <int N> Pack<T, N> load(int64_t i) const { return *reinterpret_cast<const Pack<T, N>*>(checked(i, N)); }
  template <int N> void store(int64_t i, Pack<T, N> v) const { *reinterpret_cast<Pack<T, N>*>(checked(i, N)) = v; }

 private:
  // Messages are formatted only on errors, because formatting took most of the time.
  T* checked(int64_t i, int count) const {
    if (i < 0 || i + count > size) {
      require(false, "access to [" + std::to_string(i) + ", " + std::to_string(i + count) + ") of a tensor of " +
                         std::to_string(size) + " elements");
    }
    if (reinterpret_cast<uintptr_t>(p + i) % (count * sizeof(T))) require(false, "access that is not aligned");
    return p + i;
  }
};

template <typename T, int N> struct Shared {
  T of[N];
  T& operator[](int i) {
    if (i < 0 || i >= N) {
      require(false, "access to element " + std::to_string(i) + " of " + std::to_string(N) + " in shared memory");
    }
    return of[i];
  }
};

}  // namespace megatron

#define LAUNCH(kernel, blocks, threads, stream, ...) \
  ((void)(stream), megatron::run_blocks(blocks, threads, [=] { kernel(__VA_ARGS__); }))
