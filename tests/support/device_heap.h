// The heap of a GPU test: linked in, operator new takes memory that kernels can
// read and write at the same addresses as the host, so that a test written on
// std::vector runs on a GPU as it is.
//
// Pinned memory, in chunks that small blocks are cut from; its blocks go back
// to free lists by size, never to the system. With TAPELINE_TEST_EXACT=1 every
// block of 64 bytes or more is an allocation of its own, so that
// compute-sanitizer sees an access beyond its end. Without a GPU it is the
// ordinary heap. Thread-safe. A forked child must not touch it: death tests are
// for the CPU.
#pragma once

namespace tapeline {

// Whether operator new gives memory that kernels can use.
bool device_heap_works();

}  // namespace tapeline
