// Injected failures of calls that change files, for crash tests.
//
// Every write, fsync, rename and unlink of file.cc passes one numbered point
// (1, 2, ... in process order). The environment variable
// TAPELINE_FAULT=<kind>:<K>[+] acts at the K-th, with "+" at every later one
// too:
//   kill    half of the write happens, then SIGKILL
//   eio     the call fails with EIO
//   enospc  the call fails with ENOSPC (half of a write happens first)
//   eintr   the call fails with EINTR: the caller must repeat it
//   short   a write stores one byte only: the caller must go on
// Without the variable a point costs one atomic add. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tapeline {

// What a point asks of the call it stands before.
struct Fault {
  int error = 0;      // errno to fail with; 0: go on
  size_t bytes = 0;   // how many bytes a write stores, at most
  bool kill = false;  // raise SIGKILL once those bytes are stored
};
Fault next_fault(size_t write_bytes);

// Points passed by this process so far.
int64_t fault_points();
// Sets the fault and restarts the count, as if the process had just begun;
// "" means none. False: not understood. For tests within one process.
bool set_fault(std::string_view specification);

}  // namespace tapeline
