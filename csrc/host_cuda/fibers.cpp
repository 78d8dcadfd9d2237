#include <ucontext.h>

#include <memory>
#include <vector>

#include "common/interface.h"
#include "host_cuda/platform.h"

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace megatron {
namespace {

constexpr int kStackBytes = 64 * 1024, kWarp = 32;
enum class State { kRuns, kAtBarrier, kAtShuffle, kEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state;
  float offered[2];  // two slots in turn, so that a lane may offer its next value before all have read the last one
  int shuffles;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
unsigned current;
const std::function<void()>* running_kernel;
std::string error;
bool last_thread_first = false;
int64_t launches = 0;

void pause(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

void fiber_main() {
  try {
    (*running_kernel)();
  } catch (const std::exception& wrong) {
    error = std::string(wrong.what()) + " (block " + std::to_string(blockIdx.x) + ", thread " +
            std::to_string(threadIdx.x) + ")";
  }
  pause(State::kEnded);
}

void start(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.state = State::kRuns;
  fiber.shuffles = 0;
  makecontext(&fiber.context, fiber_main, 0);
}

unsigned count(unsigned begin, unsigned end, State state) {
  unsigned found = 0;
  for (unsigned i = begin; i < end; ++i) found += fibers[i].state == state;
  return found;
}

// Resumes these threads if all of them wait for each other in the state `waiting`; returns whether it did.
bool release(unsigned begin, unsigned end, State waiting) {
  if (count(begin, end, waiting) != end - begin) return false;
  for (unsigned i = begin; i < end; ++i) fibers[i].state = State::kRuns;
  return true;
}

void run_block() {
  for (unsigned i = 0; i < blockDim.x; ++i) start(fibers[i]);
  while (count(0, blockDim.x, State::kEnded) < blockDim.x) {
    for (unsigned i = 0; i < blockDim.x && error.empty(); ++i) {
      current = threadIdx.x = last_thread_first ? blockDim.x - 1 - i : i;
      if (fibers[current].state == State::kRuns) swapcontext(&scheduler, &fibers[current].context);
    }
    if (!error.empty()) return;
    bool moved = release(0, blockDim.x, State::kAtBarrier) || count(0, blockDim.x, State::kEnded) == blockDim.x;
    for (unsigned warp = 0; warp < blockDim.x; warp += kWarp) {
      moved |= release(warp, warp + kWarp, State::kAtShuffle);
    }
    if (!moved) error = "threads of block " + std::to_string(blockIdx.x) + " wait for others that do not come";
  }
}

}  // namespace

const char* run_blocks(int64_t blocks, int64_t threads, const std::function<void()>& kernel) {
  static std::string reported;
  ++launches;
  if (blocks < 1 || threads < 1 || threads > 1024 || threads % kWarp) return "invalid configuration argument";
  if (fibers.size() < size_t(threads)) fibers = std::vector<Fiber>(threads);
  running_kernel = &kernel;
  error.clear();
  gridDim.x = unsigned(blocks);
  blockDim.x = unsigned(threads);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x && error.empty(); ++blockIdx.x) run_block();
  reported = error;
  return reported.empty() ? nullptr : reported.c_str();
}

}  // namespace megatron

void __syncthreads() { megatron::pause(megatron::State::kAtBarrier); }

float __shfl_xor_sync(unsigned mask, float value, int lane) {
  using namespace megatron;
  require(mask == 0xffffffffu, "shuffle of a part of a warp");
  const unsigned own = current, turn = fibers[own].shuffles++ % 2;
  fibers[own].offered[turn] = value;
  pause(State::kAtShuffle);
  return fibers[own ^ unsigned(lane)].offered[turn];
}

// The number of kernels launched so far.
MEGATRON_API int64_t megatron_launches() { return megatron::launches; }

// The order in which a block's threads run: a result that depends on it reveals a missing barrier.
MEGATRON_API void megatron_last_thread_first(int64_t yes) { megatron::last_thread_first = yes != 0; }
