#include "common/fixed_products.h"

#include <algorithm>
#include <new>

#include "cpu/rows.h"
#include "cpu/tiles.h"

namespace megatron {
namespace {

struct Operands {
  int64_t a_row, a_step, b_column, b_step, rows, columns;
  const InnerRange* ranges;
  int64_t num_ranges;
};

// Packs `count` <= width elements of x (`across` apart) for each of `length` inner indices (`step` apart) as
// [length, width] floats.
template <typename T>
void pack_floats(const T* x, int64_t across, int64_t step, int64_t count, int64_t width, int64_t length, float* out) {
  if (count < width) std::fill(out, out + length * width, 0.0f);
  if (across == 1) {
    for (int64_t k = 0; k < length; ++k)
      for (int64_t i = 0; i < count; ++i) out[k * width + i] = to_float(x[k * step + i]);
    return;
  }
  for (int64_t first = 0; first < length; first += 16) {  // whole cache lines of x
    const int64_t last = std::min(first + 16, length);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t k = first; k < last; ++k) out[k * width + i] = to_float(x[i * across + k * step]);
  }
}

#ifdef MEGATRON_WIDER
// out[k][i] = rows[i][k] for 16 x 16 words: blocks of 8 x 8 are exchanged, then the blocks of 4 x 4 in them, and so on.
typedef uint32_t Words __attribute__((vector_size(64)));
template <int kSize> MEGATRON_AVX512 inline __attribute__((always_inline)) void exchange_blocks(Words* rows) {
  Words from_first, from_last;
  for (uint32_t j = 0; j < 16; ++j) {
    from_first[j] = j & kSize ? 16 + (j ^ kSize) : j;
    from_last[j] = j & kSize ? 16 + j : j ^ kSize;
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & kSize) continue;
    const Words first = rows[i], last = rows[i + kSize];
    rows[i] = __builtin_shuffle(first, last, from_first);
    rows[i + kSize] = __builtin_shuffle(first, last, from_last);
  }
}
MEGATRON_AVX512 void transpose_words(const void* from, int64_t stride, void* out) {
  Words rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(&rows[i], static_cast<const char*>(from) + i * stride, 64);
  exchange_blocks<8>(rows);
  exchange_blocks<4>(rows);
  exchange_blocks<2>(rows);
  exchange_blocks<1>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(out) + i * 64, &rows[i], 64);
}

// Packs 32 inner indices of 16 elements: rows of 32 for the first operand, else 16 pairs of inner indices x 16 x 2.
template <bool kFirst> void pack_tile(const bf16* x, int64_t across, int64_t step, int64_t count, int64_t length,
                                      uint16_t* tile) {
  if (count == 16 && length == 32 && step == 1) {
    if (!kFirst) return transpose_words(x, 2 * across, tile);
    for (int64_t i = 0; i < 16; ++i) std::memcpy(tile + i * 32, x + i * across, 64);
    return;
  }
  alignas(64) uint16_t pairs[512] = {};
  uint16_t* to = kFirst ? pairs : tile;
  if (count == 16 && length == 32 && across == 1) {
    for (int64_t k = 0; k < 32; k += 2, to += 32)
      for (int64_t i = 0; i < 16; ++i) to[2 * i] = x[k * step + i].bits, to[2 * i + 1] = x[(k + 1) * step + i].bits;
  } else {
    std::fill(to, to + 512, uint16_t(0));
    for (int64_t i = 0; i < count; ++i)
      for (int64_t k = 0; k < length; ++k) to[k / 2 * 32 + 2 * i + k % 2] = x[i * across + k * step].bits;
  }
  if (kFirst) transpose_words(pairs, 64, tile);
}

template <bool kFirst>
void pack_tiles(const bf16* x, int64_t across, int64_t step, int64_t count, int64_t length, uint16_t* out) {
  for (int64_t k = 0; k < length; k += 32) {
    for (int64_t first = 0; first < 32; first += 16, out += 512) {
      const int64_t rest = std::min<int64_t>(16, std::max<int64_t>(0, count - first));
      pack_tile<kFirst>(x + first * across + k * step, across, step, rest, std::min<int64_t>(32, length - k), out);
    }
  }
}
#endif

template <bool kFirst, typename T>
void pack(const Kernel& kernel, const T* x, int64_t across, int64_t step, int64_t count, int64_t length, void* out) {
#ifdef MEGATRON_WIDER
  if constexpr (sizeof(T) == 2) {
    if (kernel.uses_amx) return pack_tiles<kFirst>(x, across, step, count, length, static_cast<uint16_t*>(out));
  }
#endif
  pack_floats(x, across, step, count, kFirst ? kernel.rows : kernel.columns, length, static_cast<float*>(out));
}

// The sum over ranges in the order of `additions`, at the beginning of `stack`.
template <typename T> class TreeOutput {
 public:
  TreeOutput(T* out, int64_t stride) : out_(out), stride_(stride) {}
  void begin(const Kernel& kernel) { size_ = kernel.rows * kernel.columns, depth_ = 0; }
  float* next() { return stack_ + size_ * depth_++; }
  void add(const Kernel& kernel, const InnerRange& range) {
    constexpr bool kRounds = sizeof(T) == 2;
    if (kRounds) kernel.elements.round(stack_ + size_ * (depth_ - 1), size_);
    for (int64_t n = 0; n < range.additions; ++n, --depth_) {
      float* total = stack_ + size_ * (depth_ - 2);
      (kRounds ? kernel.elements.add_rounded : kernel.elements.add)(total, total + size_, size_);
    }
  }
  void end(const Kernel& kernel, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    for (int64_t m = 0; m < rows; ++m) {
      T* to = out_ + (row + m) * stride_ + column;
      for_row<T>(columns, [=](int64_t i, auto n) { store(to + i, load(stack_ + m * kernel.columns + i, n), n); });
    }
  }

 private:
  T* out_;
  int64_t stride_, size_ = 0;
  int depth_ = 0;
  alignas(64) float stack_[kMostTile * kMostStack];
};

class ExactOutput {
 public:
  ExactOutput(double* total, int64_t stride, double unit, double limit)
      : total_(total), stride_(stride), shift_(0x1.8p52 * unit), limit_(limit) {}
  void begin(const Kernel& kernel) { std::fill(sums_, sums_ + kernel.rows * kernel.columns, 0.0); }
  float* next() { return own_; }
  void add(const Kernel& kernel, const InnerRange&) {
    kernel.elements.add_exact(own_, sums_, kernel.rows * kernel.columns, shift_, limit_);
  }
  void end(const Kernel& kernel, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    for (int64_t m = 0; m < rows; ++m) {
      double* to = total_ + (row + m) * stride_ + column;
      for (int64_t i = 0; i < columns; ++i) to[i] += sums_[m * kernel.columns + i];
    }
  }

 private:
  double* total_;
  int64_t stride_;
  double shift_, limit_;
  alignas(64) float own_[kMostTile];
  alignas(64) double sums_[kMostTile];
};

// Memory of a thread, at a multiple of 64 bytes. Up to kMostKept bytes, which contain the panels of most products, are
// kept between calls.
constexpr int64_t kMostKept = 32 << 20;
class Scratch {
 public:
  ~Scratch() { free(); }
  char* at_least(int64_t bytes) {
    if (size_ < bytes) {
      free();  // before the allocation; its contents are not needed
      memory_ = static_cast<char*>(::operator new(bytes, std::align_val_t(64)));
      size_ = bytes;
    }
    return memory_;
  }
  void shrink() {
    if (size_ > kMostKept) free();
  }

 private:
  void free() {
    ::operator delete(memory_, std::align_val_t(64));
    memory_ = nullptr, size_ = 0;
  }
  char* memory_ = nullptr;
  int64_t size_ = 0;
};
// Frees what is not kept at the end of a scope.
class ScratchScope {
 public:
  explicit ScratchScope(Scratch& scratch) : scratch_(scratch) {}
  ~ScratchScope() { scratch_.shrink(); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;
  char* at_least(int64_t bytes) { return scratch_.at_least(bytes); }

 private:
  Scratch& scratch_;
};
thread_local Scratch scratch_a, scratch_b;

// Packs each group of b's panels and, for each block of rows, a; then computes the tiles of the block. `output()` makes a
// task's output.
template <typename T, typename F>
void multiply(const Operands& by, const T* a, const T* b, int64_t threads, F output) {
  if (by.rows < 1 || by.columns < 1) return;
  const Kernel& kernel = kernel_of(sizeof(T) == 2);
  const int64_t element = kernel.uses_amx ? 2 : 4;
  int64_t depth = 0;
  for (int64_t r = 0; r < by.num_ranges; ++r) depth += kernel.padded(by.ranges[r].length);
  const int64_t panel = depth * kernel.columns * element, tile = depth * kernel.rows * element;
  const int64_t panels = (by.columns + kernel.columns - 1) / kernel.columns;
  const int64_t most = std::min(panels, std::max<int64_t>(8, kMostKept / std::max<int64_t>(panel, 1)));
  const int64_t block = 8 * kernel.rows, blocks = (by.rows + block - 1) / block;
  ScratchScope of_b(scratch_b);
  char* packed_b = of_b.at_least(most * panel);
  for (int64_t begin = 0; begin < panels; begin += most) {
    const int64_t end = std::min(begin + most, panels);
    parallel_for(end - begin, threads, [&](int64_t number) {
      char* to = packed_b + number * panel;
      const int64_t column = (begin + number) * kernel.columns;
      const int64_t count = std::min(kernel.columns, by.columns - column);
      for (int64_t r = 0; r < by.num_ranges; ++r) {
        const InnerRange& range = by.ranges[r];
        pack<false>(kernel, b + range.b + column * by.b_column, by.b_column, by.b_step, count, range.length, to);
        to += kernel.padded(range.length) * kernel.columns * element;
      }
    });
    const int64_t group = threads == 1 ? end - begin : 8, groups = (end - begin + group - 1) / group;
    parallel_for(blocks * groups, threads, [&](int64_t task) {
      const int64_t first = task % blocks * block, last = std::min(first + block, by.rows);
      ScratchScope of_a(scratch_a);
      char* packed_a = of_a.at_least(8 * tile);
      for (int64_t row = first; row < last; row += kernel.rows) {
        char* to = packed_a + (row - first) / kernel.rows * tile;
        for (int64_t r = 0; r < by.num_ranges; ++r) {
          const InnerRange& range = by.ranges[r];
          const int64_t count = std::min(kernel.rows, last - row);
          pack<true>(kernel, a + range.a + row * by.a_row, by.a_row, by.a_step, count, range.length, to);
          to += kernel.padded(range.length) * kernel.rows * element;
        }
      }
      const AmxScope scope(kernel.uses_amx);
      auto own = output();
      const int64_t stop = std::min(begin + (task / blocks + 1) * group, end);
      for (int64_t number = begin + task / blocks * group; number < stop; ++number) {
        for (int64_t row = first; row < last; row += kernel.rows) {
          const char *from_a = packed_a + (row - first) / kernel.rows * tile, *from_b = packed_b;
          from_b += (number - begin) * panel;
          own.begin(kernel);
          for (int64_t r = 0; r < by.num_ranges; ++r) {
            const int64_t length = kernel.padded(by.ranges[r].length);
            kernel.product(from_a, from_b, length, own.next());
            own.add(kernel, by.ranges[r]);
            from_a += length * kernel.rows * element;
            from_b += length * kernel.columns * element;
          }
          const int64_t column = number * kernel.columns;
          const int64_t columns = std::min(kernel.columns, by.columns - column);
          own.end(kernel, row, column, std::min(kernel.rows, by.rows - row), columns);
        }
      }
    });
  }
}

template <typename F> const char* with_float_or_bf16(int64_t dtype, F f) {
  if (dtype == Float32) return f(float{}), nullptr;
  if (dtype == BFloat16) return f(bf16{}), nullptr;
  return kWrongDType;
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_fixed_products(int64_t dtype, void* out, int64_t out_row, const void* a, int64_t a_row,
                                    int64_t a_step, const void* b, int64_t b_column, int64_t b_step, int64_t rows,
                                    int64_t columns, const void* ranges, int64_t num_ranges, int64_t threads, void*) {
  const Operands by{a_row, a_step, b_column, b_step, rows, columns, at<InnerRange>(ranges), num_ranges};
  int64_t depth = 0, most = 0;
  for (int64_t r = 0; r < num_ranges; ++r) {
    most = std::max(most, ++depth);
    depth -= by.ranges[r].additions;
    if (depth < 1) return "more additions than values";
  }
  if (depth != 1 || most > kMostStack) return "the additions do not leave one value, or need too many at a time";
  return with_float_or_bf16(dtype, [=](auto type) {
    using T = decltype(type);
    multiply(by, at<const T>(a), at<const T>(b), threads, [=] { return TreeOutput<T>(at<T>(out), out_row); });
  });
}

const char* megatron_add_exact_products(int64_t dtype, void* total, int64_t total_row, const void* a, int64_t a_row,
                                        int64_t a_step, const void* b, int64_t b_column, int64_t b_step, int64_t rows,
                                        int64_t columns, const void* ranges, int64_t num_ranges, double unit,
                                        double limit, int64_t threads, void*) {
  const Operands by{a_row, a_step, b_column, b_step, rows, columns, at<InnerRange>(ranges), num_ranges};
  return with_float_or_bf16(dtype, [=](auto type) {
    using T = decltype(type);
    multiply(by, at<const T>(a), at<const T>(b), threads,
             [=] { return ExactOutput(at<double>(total), total_row, unit, limit); });
  });
}

const char* megatron_fixed_kernel(int64_t dtype) {
  return dtype == Float32 || dtype == BFloat16 ? kernel_of(dtype == BFloat16).name : nullptr;
}

void megatron_limit_fixed_kernels(int64_t most) { most_kernel = most; }
