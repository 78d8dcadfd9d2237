#include "cpu/parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "common/interface.h"

namespace megatron {
namespace {

// The entry point of OpenMP regions in GNU's and LLVM's runtimes: body(data) on up to `threads` threads.
using Region = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Tasks {
  void (*const work)(const void*, int64_t);
  const void* const data;
  const int64_t count;
  std::atomic<int64_t> next{0};
};

void take(void* shared) {
  Tasks& tasks = *static_cast<Tasks*>(shared);
  for (int64_t i; (i = tasks.next++) < tasks.count;) tasks.work(tasks.data, i);
}

}  // namespace

void parallel_calls(int64_t count, int64_t threads, void (*work)(const void*, int64_t), const void* data) {
  // Use the OpenMP runtime that the process has loaded, which is torch's: a second pool of threads would compete for
  // cores with the spinning threads of the first. Without one the caller does all work.
  static const Region region = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  Tasks tasks{work, data, count};
  threads = std::min(threads, count);
  if (threads > 1 && region) {
    region(take, &tasks, static_cast<unsigned>(threads), 0);
  } else {
    take(&tasks);
  }
}

}  // namespace megatron

int megatron_interface() { return megatron::kInterface; }
