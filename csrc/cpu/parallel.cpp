#include "cpu/parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "common/interface.h"

namespace megatron {
namespace {

// How compilers begin an OpenMP region, in GNU's and LLVM's runtime alike: body(data) on up to `threads` threads.
using Region = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Tasks {
  const std::function<void(int64_t)>& work;
  const int64_t count;
  std::atomic<int64_t> next{0};
};

void take(void* data) {
  Tasks& tasks = *static_cast<Tasks*>(data);
  for (int64_t i; (i = tasks.next++) < tasks.count;) tasks.work(i);
}

}  // namespace

void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)>& work) {
  // The OpenMP that the process has already, which is torch's: a second set of threads would wait for cores on which
  // the first one's still spin. Without one the caller does all.
  static const Region region = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  Tasks tasks{work, count};
  threads = std::min(threads, count);
  if (threads > 1 && region) {
    region(take, &tasks, static_cast<unsigned>(threads), 0);
  } else {
    take(&tasks);
  }
}

}  // namespace megatron

int megatron_interface() { return megatron::kInterface; }
