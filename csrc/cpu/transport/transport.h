// Collectives and messages between processes of one host, through shared memory.
//
// Every process has an arena, which only it writes and the others read. To post an operation, its data is copied into
// the owner's arena and an entry in a ring records its offset. Posting never waits for other ranks, so any number of
// operations may be posted and completed in any order. To complete an operation, a rank waits for the entries of the
// others and reads their data; sums are computed in rank order, independently of the order of arrival. The owner reuses
// a block once all readers have decremented the counter in its entry.
//
// The interface has only pointers and sizes, so the caller needs no headers. Functions that may wait do so for at most
// `slice` microseconds, and return so that the caller can check for signals, time limits and dead ranks.
#pragma once
#include <cstdint>

#include "common/interface.h"

namespace megatron {
// Increase it whenever a function or the layout of an arena changes; megatron_core/cpu_ranks/shared_memory/host.py
// checks it.
constexpr int64_t kTransport = 1;

enum Kind : int64_t { Barrier, AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast, Message };
// The floating-point types of common/interface.h, and these. Operations that only move data accept any other number.
enum Integer : int64_t { Int8 = 4, Int16 = 5, Int32 = 6, Int64 = 7, UInt8 = 8 };
enum Reduction : int64_t { Sum, Minimum, Maximum };

// Arguments that must be equal on all members.
struct Operation {
  int64_t kind, dtype, reduction, root;
};

// Results of functions that wait: 0: done; 1 + member: the member that did not join within the slice; -1 - member: the
// member that posted another operation.
constexpr int64_t kNoEntry = -1;   // of post: the ring is full; complete an operation first
constexpr int64_t kNoMemory = -2;  // of post: the arena is full
constexpr int64_t kOtherTag = -1, kOtherSize = -2;  // of receive
}  // namespace megatron

// kTransport of the built library.
MEGATRON_API int64_t megatron_transport_interface();

// This process, with its zeroed arena; a wait starts with `spin` microseconds of busy waiting.
MEGATRON_API void* megatron_transport_endpoint(void* arena, int64_t bytes, int64_t spin);

// Rings for a group of this many members, in this process's arena: its offset there, or kNoMemory.
MEGATRON_API int64_t megatron_transport_rings(void* endpoint, int64_t members);

// A group: the address of each member's arena in this process, and the offset of its rings.
MEGATRON_API void* megatron_transport_group(void* endpoint, int64_t members, int64_t rank, const int64_t* arenas,
                                            const int64_t* rings);

// Posts this rank's part of a collective; returns its number, by which it is completed. `splits` are the bytes for each
// member of an all-to-all, null if they are equal. `waits`: the caller completes it before any other operation.
MEGATRON_API int64_t megatron_transport_post(void* group, int64_t kind, int64_t dtype, int64_t reduction, int64_t root,
                                             const void* data, int64_t bytes, const int64_t* splits, int64_t waits);

// Completes a collective into `out`. `bytes` is the size of one member's part (of all-reduce and broadcast the whole
// size); `splits` are the bytes from each member of an all-to-all. Nothing is written before all data is available.
MEGATRON_API int64_t megatron_transport_complete(void* group, int64_t number, int64_t kind, int64_t dtype,
                                                 int64_t reduction, int64_t root, void* out, int64_t bytes,
                                                 const int64_t* splits, int64_t slice);

// Sends a message; kNoEntry if the receiver has not read the last kEntries messages.
MEGATRON_API int64_t megatron_transport_send(void* group, int64_t receiver, int64_t tag, const void* data,
                                             int64_t bytes);

// Takes message `number` of a sender if it has this tag: 0, 1 if it has not arrived, kOtherTag or kOtherSize.
MEGATRON_API int64_t megatron_transport_receive(void* group, int64_t sender, int64_t number, int64_t tag, void* out,
                                                int64_t bytes, int64_t slice);

// The operation that a member posted as `number`, or the message `number` that it sent to this rank: kind, dtype,
// reduction, root or tag, and bytes.
MEGATRON_API void megatron_transport_posted(void* group, int64_t member, int64_t message, int64_t number,
                                            int64_t* found);
