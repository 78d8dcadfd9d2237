// Parallel loops over threads.
#pragma once
#include <cstdint>

namespace megatron {

// Calls work(data, 0) ... work(data, count - 1), each once, on at most `threads` threads, including the caller.
void parallel_calls(int64_t count, int64_t threads, void (*work)(const void* data, int64_t number), const void* data);

// The same for a function object, work(0) ... work(count - 1). It outlives the calls, so a pointer to it is enough.
template <typename F> void parallel_for(int64_t count, int64_t threads, const F& work) {
  auto call = [](const void* data, int64_t number) { (*static_cast<const F*>(data))(number); };
  parallel_calls(count, threads, call, &work);
}

}  // namespace megatron
