// Collectives and messages between processes of one host, through memory that all of them have mapped.
//
// Every process has an arena, which it alone writes; the others read it. An operation is posted: its data is copied
// into the owner's arena and an entry in a ring says where. Nothing of that waits for other ranks, so that operations
// may be posted in any number and completed in any order. To complete an operation is to wait for the entries of the
// others and to read their data; sums are taken in the order of ranks, whatever arrives first. The owner uses a block
// again when all readers have counted down its entry.
//
// Pointers and sizes only, so that the caller needs no headers of ours. Functions that may have to wait do so for at
// most `slice` microseconds, and return so that the caller can look after signals, time limits and ranks that died.
#pragma once
#include <cstdint>

#include "common/interface.h"

namespace megatron {
// To be counted up whenever a function or what lies in an arena changes; megatron_core/parallel/host_memory.py reads it.
constexpr int64_t kTransport = 1;

enum Kind : int64_t { Barrier, AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast, Message };
// The floating-point types of common/interface.h, and these. Reading alone takes any other number.
enum Integer : int64_t { Int8 = 4, Int16 = 5, Int32 = 6, Int64 = 7, UInt8 = 8 };
enum Reduction : int64_t { Sum, Minimum, Maximum };

// What every member has to give alike.
struct Operation {
  int64_t kind, dtype, reduction, root;
};

// Results of functions that wait: 0 is done, 1 + member is who has not come within the slice, -1 - member is who has
// posted another operation than this rank.
constexpr int64_t kNoEntry = -1;   // of post: the ring is full, complete something first
constexpr int64_t kNoMemory = -2;  // of post: the arena is full
constexpr int64_t kOtherTag = -1, kOtherSize = -2;  // of receive
}  // namespace megatron

// kTransport, as the library was built with it.
MEGATRON_API int64_t megatron_transport_interface();

// This process, over its zeroed arena; waiting begins with `spin` microseconds that do not sleep.
MEGATRON_API void* megatron_transport_endpoint(void* arena, int64_t bytes, int64_t spin);

// Rings for a group of so many members, in this process's arena: its offset there, or kNoMemory.
MEGATRON_API int64_t megatron_transport_rings(void* endpoint, int64_t members);

// A group: each member's arena as it is mapped here, and the offset of its rings.
MEGATRON_API void* megatron_transport_group(void* endpoint, int64_t members, int64_t rank, const int64_t* arenas,
                                            const int64_t* rings);

// Posts this rank's part of a collective; its number, by which it is completed. `splits` are the bytes for each member
// of an all-to-all, null if they are equal. `waits`: the caller completes it before it does anything else.
MEGATRON_API int64_t megatron_transport_post(void* group, int64_t kind, int64_t dtype, int64_t reduction, int64_t root,
                                             const void* data, int64_t bytes, const int64_t* splits, int64_t waits);

// Completes a collective into `out`. `bytes` of it are one member's part (of all-reduce and broadcast all there is);
// `splits` are the bytes from each member of an all-to-all. Nothing is written before everything is there.
MEGATRON_API int64_t megatron_transport_complete(void* group, int64_t number, int64_t kind, int64_t dtype,
                                                 int64_t reduction, int64_t root, void* out, int64_t bytes,
                                                 const int64_t* splits, int64_t slice);

// Sends a message; kNoEntry if the receiver has not taken the last kEntries of them.
MEGATRON_API int64_t megatron_transport_send(void* group, int64_t receiver, int64_t tag, const void* data,
                                             int64_t bytes);

// Takes message `number` of a sender if it has this tag: 0, 1 if it has not come, kOtherTag or kOtherSize.
MEGATRON_API int64_t megatron_transport_receive(void* group, int64_t sender, int64_t number, int64_t tag, void* out,
                                                int64_t bytes, int64_t slice);

// What a member has posted as operation `number`, or sent as message `number` to this rank: its kind, dtype, reduction,
// root or tag, and bytes.
MEGATRON_API void megatron_transport_posted(void* group, int64_t member, int64_t message, int64_t number,
                                            int64_t* found);
