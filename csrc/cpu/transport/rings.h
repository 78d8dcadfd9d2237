// The contents of an arena in addition to data: rings of entries, read by other processes.
#pragma once
#include <atomic>
#include <cstdint>

#include "cpu/transport/transport.h"

namespace megatron {

constexpr int64_t kEntries = 256;  // maximum number of pending operations per ring
constexpr int64_t kMembers = 256;  // of a group

// One posted operation, in a separate cache line.
struct alignas(64) Entry {
  Operation operation;
  int64_t offset, bytes;          // of the data, in its owner's arena
  std::atomic<uint32_t> readers;  // number of readers left
  std::atomic<uint32_t> reduced;  // whether the owner's part of an all-reduce follows the data
  int64_t waits;                  // whether the owner will certainly compute that part next
};
static_assert(sizeof(Entry) == 64, "one line of a cache");

// Operations of one rank in a group, or its messages to one other rank. Zeroed memory is an empty ring.
struct Ring {
  alignas(64) std::atomic<uint32_t> posted;  // number of operations so far
  std::atomic<uint32_t> events;              // futex of the waiters
  std::atomic<uint32_t> sleepers;
  Entry entries[kEntries];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "other processes share them");

}  // namespace megatron
