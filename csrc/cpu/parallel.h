// Work for several threads.
#pragma once
#include <cstdint>
#include <functional>

namespace megatron {
// Calls work(0) ... work(count - 1), each once, on at most `threads` threads, of which the caller is one.
void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)>& work);
}  // namespace megatron
