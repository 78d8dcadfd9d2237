#include "cpu/transport/transport.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "cpu/transport/reduce.h"
#include "cpu/transport/rings.h"

namespace megatron {
namespace {

int64_t now_in_microseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

// Signals an event in a ring. A waiter has either counted itself before this check, and is woken, or reads the new
// number of events before it sleeps.
void ring_bell(Ring& ring) {
  ring.events.fetch_add(1);
  if (ring.sleepers.load()) syscall(SYS_futex, &ring.events, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Whether `ready()` becomes true within the slice; after a short spin the thread yields its core. A signal ends the
// wait.
template <typename F> bool wait_for(Ring& ring, int64_t spin, int64_t slice, F ready) {
  if (ready()) return true;
  if (slice == 0) return false;
  const int64_t began = now_in_microseconds(), end = began + slice;
  while (now_in_microseconds() - began < spin) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause_briefly();
    }
    sched_yield();  // the awaited rank may be on this core
  }
  for (int64_t left; (left = end - now_in_microseconds()) > 0;) {
    const timespec limit{left / 1000000, left % 1000000 * 1000};
    ring.sleepers.fetch_add(1);
    const uint32_t seen = ring.events.load();
    const bool woken = ready() || syscall(SYS_futex, &ring.events, FUTEX_WAIT, seen, &limit, nullptr, 0) == 0 ||
                       errno == EAGAIN;
    ring.sleepers.fetch_sub(1);
    if (ready()) return true;
    if (!woken) return false;
  }
  return false;
}

bool has(const Ring& ring, uint32_t number) {
  return static_cast<int32_t>(ring.posted.load(std::memory_order_acquire) - number) > 0;
}

// The memory that this process shares: blocks of powers of two, so that a block is soon reused after it was read, while
// it is in a cache. Pages that are never written use no memory.
class Endpoint {
 public:
  Endpoint(char* arena, int64_t bytes, int64_t spin) : spin(spin), arena_(arena), bytes_(bytes) {}

  const int64_t spin;

  // Memory that was never written, and is therefore zero.
  int64_t take_new(int64_t bytes) {
    bytes = (bytes + 4095) / 4096 * 4096;
    if (bytes_ - top_ < bytes) return kNoMemory;
    top_ += bytes;
    return top_ - bytes;
  }

  int64_t take(int64_t bytes) {
    const int size = size_of(bytes);
    if (free_[size].empty()) return take_new(int64_t{1} << size);
    const int64_t block = free_[size].back();
    free_[size].pop_back();
    return block;
  }

  // Starts entry `number` of a ring of this process with a block of `bytes`; null on failure, with the reason in
  // `error`.
  Entry* begin(Ring& ring, uint32_t number, int64_t bytes, int64_t& error) {
    reclaim();
    Entry& entry = ring.entries[number % kEntries];
    error = kNoEntry;
    if (entry.readers.load(std::memory_order_acquire)) return nullptr;
    entry.offset = bytes ? take(bytes) : 0;
    error = kNoMemory;
    if (entry.offset < 0) return nullptr;
    if (bytes) lent_.push_back({&entry, entry.offset, bytes});
    return &entry;
  }

  char* at(int64_t offset) const { return arena_ + offset; }

  std::mutex mutex;

 private:
  static constexpr int kSmallest = 12;
  struct Lent { const Entry* entry; int64_t offset, bytes; };

  static int size_of(int64_t bytes) {
    int size = kSmallest;
    while (int64_t{1} << size < bytes) ++size;
    return size;
  }

  void reclaim() {
    size_t kept = 0;
    for (const Lent& lent : lent_) {
      if (lent.entry->readers.load(std::memory_order_acquire)) {
        lent_[kept++] = lent;
        continue;
      }
      free_[size_of(lent.bytes)].push_back(lent.offset);
    }
    lent_.resize(kept);
  }

  char* const arena_;
  const int64_t bytes_;
  int64_t top_ = 0;
  std::vector<int64_t> free_[63];
  std::vector<Lent> lent_;
};

class Group {
 public:
  Group(Endpoint& endpoint, int64_t members, int64_t rank, const int64_t* arenas, const int64_t* rings)
      : members_(members), rank_(rank), endpoint_(endpoint) {
    for (int64_t i = 0; i < members; ++i) {
      arenas_.push_back(reinterpret_cast<char*>(arenas[i]));
      rings_.push_back(reinterpret_cast<Ring*>(arenas_[i] + rings[i]));
    }
  }

  int64_t post(Operation operation, const void* data, int64_t bytes, const int64_t* splits, bool waits) {
    const std::lock_guard<std::mutex> lock(endpoint_.mutex);
    Ring& ring = *rings_[rank_];
    const uint32_t number = ring.posted.load();
    const bool sends = operation.kind != Barrier && (operation.kind != Broadcast || operation.root == rank_);
    // Parts are aligned to cache lines: copies from unaligned addresses take several times as long on some processors.
    const int64_t table = operation.kind == AllToAll ? aligned((members_ + 1) * sizeof(int64_t)) : 0;
    const int64_t part = in_parts(operation, bytes) ? longest_part(bytes) : 0;
    int64_t error;
    Entry* entry = endpoint_.begin(ring, number, sends ? table + aligned(bytes) + part : 0, error);
    if (!entry) return error;
    entry->operation = operation;
    entry->bytes = bytes;
    entry->waits = waits;
    entry->reduced.store(0, std::memory_order_relaxed);
    if (sends) {
      char* block = endpoint_.at(entry->offset);
      if (table) write_table(reinterpret_cast<int64_t*>(block), bytes, splits, table);
      if (bytes) std::memcpy(block + table, data, bytes);
      // A rank also reads its own part on completion, except of a broadcast.
      entry->readers.store(members_ - (operation.kind == Broadcast), std::memory_order_relaxed);
    }
    ring.posted.store(number + 1, std::memory_order_release);
    ring_bell(ring);
    return number;
  }

  int64_t complete(uint32_t number, Operation operation, char* out, int64_t bytes, const int64_t* splits,
                   int64_t slice) {
    const bool broadcast = operation.kind == Broadcast;
    if (broadcast && operation.root == rank_) return 0;
    for (int64_t member = 0; member < members_; ++member) {
      if (member == rank_ || (broadcast && member != operation.root)) continue;
      Ring& ring = *rings_[member];
      if (!wait_for(ring, endpoint_.spin, slice, [&] { return has(ring, number); })) return 1 + member;
      if (operation.kind != Barrier && !fits(member, number, operation, bytes, splits)) return -1 - member;
    }
    if (operation.kind == Barrier) return 0;
    switch (operation.kind) {
      case AllReduce: {
        const int64_t missing = all_reduce(number, operation, out, bytes, slice);
        if (missing) return missing;
        break;
      }
      case ReduceScatter: reduce_members(number, operation, rank_ * bytes, out, bytes); break;
      case AllGather: gather(number, out, bytes); break;
      case AllToAll: exchange(number, out); break;
      case Broadcast: std::memcpy(out, data_of(operation.root, number), bytes); break;
    }
    for (int64_t member = 0; member < members_; ++member) {
      if (broadcast && member != operation.root) continue;
      entry_of(member, number).readers.fetch_sub(1, std::memory_order_release);
    }
    return 0;
  }

  int64_t send(int64_t receiver, int64_t tag, const void* data, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(endpoint_.mutex);
    Ring& ring = rings_[rank_][1 + receiver];
    const uint32_t number = ring.posted.load();
    int64_t error;
    Entry* entry = endpoint_.begin(ring, number, bytes, error);
    if (!entry) return error;
    entry->operation = {Message, 0, 0, tag};
    entry->bytes = bytes;
    if (bytes) std::memcpy(endpoint_.at(entry->offset), data, bytes);
    entry->readers.store(1, std::memory_order_relaxed);
    ring.posted.store(number + 1, std::memory_order_release);
    ring_bell(ring);
    return number;
  }

  int64_t receive(int64_t sender, uint32_t number, int64_t tag, char* out, int64_t bytes, int64_t slice) {
    Ring& ring = rings_[sender][1 + rank_];
    if (!wait_for(ring, endpoint_.spin, slice, [&] { return has(ring, number); })) return 1;
    Entry& entry = ring.entries[number % kEntries];
    if (entry.operation.root != tag) return kOtherTag;
    if (entry.bytes != bytes) return kOtherSize;
    if (bytes) std::memcpy(out, arenas_[sender] + entry.offset, bytes);
    entry.readers.fetch_sub(1, std::memory_order_release);
    return 0;
  }

  const Entry& posted(int64_t member, bool message, uint32_t number) const {
    return rings_[member][message ? 1 + rank_ : 0].entries[number % kEntries];
  }

 private:
  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  // Large sums over more than two ranks are divided: each member computes one part, and the results are exchanged.
  bool in_parts(Operation operation, int64_t bytes) const {
    return operation.kind == AllReduce && members_ > 2 && bytes >= kInParts;
  }
  int64_t longest_part(int64_t bytes) const { return aligned((bytes + members_ - 1) / members_); }

  Entry& entry_of(int64_t member, uint32_t number) const { return rings_[member]->entries[number % kEntries]; }
  const char* data_of(int64_t member, uint32_t number) const {
    return arenas_[member] + entry_of(member, number).offset;
  }

  // The start of each member's part, and the end of the last one.
  void write_table(int64_t* begins, int64_t bytes, const int64_t* splits, int64_t table) const {
    begins[0] = table;
    for (int64_t i = 0; i < members_; ++i) begins[i + 1] = begins[i] + (splits ? splits[i] : bytes / members_);
  }

  // Whether a member has posted the same operation, with the expected amount of data for this rank.
  bool fits(int64_t member, uint32_t number, Operation operation, int64_t bytes, const int64_t* splits) const {
    const Entry& entry = entry_of(member, number);
    const Operation& other = entry.operation;
    if (other.kind != operation.kind || other.dtype != operation.dtype || other.reduction != operation.reduction ||
        other.root != operation.root) {
      return false;
    }
    if (operation.kind == ReduceScatter) return entry.bytes == bytes * members_;
    if (operation.kind != AllToAll) return entry.bytes == bytes;
    const int64_t* begins = reinterpret_cast<const int64_t*>(data_of(member, number));
    return begins[rank_ + 1] - begins[rank_] == (splits ? splits[member] : bytes);
  }

  void gather(uint32_t number, char* out, int64_t bytes) const {
    for (int64_t member = 0; member < members_ && bytes; ++member) {
      std::memcpy(out + member * bytes, data_of(member, number), bytes);
    }
  }

  void exchange(uint32_t number, char* out) const {
    for (int64_t member = 0; member < members_; ++member) {
      const int64_t* begins = reinterpret_cast<const int64_t*>(data_of(member, number));
      const int64_t bytes = begins[rank_ + 1] - begins[rank_];
      if (bytes) std::memcpy(out, data_of(member, number) + begins[rank_], bytes);
      out += bytes;
    }
  }

  void reduce_members(uint32_t number, Operation operation, int64_t first, char* out, int64_t bytes) const {
    const char* inputs[kMembers];
    for (int64_t member = 0; member < members_; ++member) inputs[member] = data_of(member, number) + first;
    reduce(operation.dtype, operation.reduction, inputs, members_, out, bytes);
  }

  // This rank's part first, which the others copy. The part of a rank that may not be waiting is computed here instead:
  // it has the same bits.
  int64_t all_reduce(uint32_t number, Operation operation, char* out, int64_t bytes, int64_t slice) {
    if (!in_parts(operation, bytes)) {
      reduce_members(number, operation, 0, out, bytes);
      return 0;
    }
    const int64_t longest = longest_part(bytes), behind = aligned(bytes);
    for (int64_t i = 0; i < members_; ++i) {
      const int64_t member = (rank_ + i) % members_, first = std::min(bytes, member * longest);
      const int64_t part = std::min(bytes, first + longest) - first;
      Entry& entry = entry_of(member, number);
      Ring& ring = *rings_[member];
      auto reduced = [&] { return entry.reduced.load(std::memory_order_acquire) != 0; };
      if (member != rank_ && entry.waits && !wait_for(ring, endpoint_.spin, slice, reduced)) return 1 + member;
      if (member != rank_ && reduced()) {
        std::memcpy(out + first, data_of(member, number) + behind, part);
        continue;
      }
      reduce_members(number, operation, first, out + first, part);
      if (member != rank_ || reduced()) continue;
      std::memcpy(endpoint_.at(entry.offset) + behind, out + first, part);
      entry.reduced.store(1, std::memory_order_release);
      ring_bell(ring);
    }
    return 0;
  }

  static constexpr int64_t kInParts = 1 << 16;
  const int64_t members_, rank_;
  Endpoint& endpoint_;
  std::vector<char*> arenas_;
  std::vector<Ring*> rings_;
};

Group* group_of(void* group) { return static_cast<Group*>(group); }

}  // namespace
}  // namespace megatron

using namespace megatron;

int64_t megatron_transport_interface() { return kTransport; }

void* megatron_transport_endpoint(void* arena, int64_t bytes, int64_t spin) {
  return new Endpoint(static_cast<char*>(arena), bytes, spin);
}

int64_t megatron_transport_rings(void* endpoint, int64_t members) {
  if (members > kMembers) return kNoMemory;
  Endpoint& own = *static_cast<Endpoint*>(endpoint);
  const std::lock_guard<std::mutex> lock(own.mutex);
  return own.take_new((1 + members) * sizeof(Ring));
}

void* megatron_transport_group(void* endpoint, int64_t members, int64_t rank, const int64_t* arenas,
                               const int64_t* rings) {
  return new Group(*static_cast<Endpoint*>(endpoint), members, rank, arenas, rings);
}

int64_t megatron_transport_post(void* group, int64_t kind, int64_t dtype, int64_t reduction, int64_t root,
                                const void* data, int64_t bytes, const int64_t* splits, int64_t waits) {
  return group_of(group)->post({kind, dtype, reduction, root}, data, bytes, splits, waits);
}

int64_t megatron_transport_complete(void* group, int64_t number, int64_t kind, int64_t dtype, int64_t reduction,
                                    int64_t root, void* out, int64_t bytes, const int64_t* splits, int64_t slice) {
  return group_of(group)->complete(number, {kind, dtype, reduction, root}, static_cast<char*>(out), bytes, splits,
                                   slice);
}

int64_t megatron_transport_send(void* group, int64_t receiver, int64_t tag, const void* data, int64_t bytes) {
  return group_of(group)->send(receiver, tag, data, bytes);
}

int64_t megatron_transport_receive(void* group, int64_t sender, int64_t number, int64_t tag, void* out, int64_t bytes,
                                   int64_t slice) {
  return group_of(group)->receive(sender, number, tag, static_cast<char*>(out), bytes, slice);
}

void megatron_transport_posted(void* group, int64_t member, int64_t message, int64_t number, int64_t* found) {
  const Entry& entry = group_of(group)->posted(member, message, number);
  std::memcpy(found, &entry.operation, sizeof entry.operation);
  found[4] = entry.bytes;
}
