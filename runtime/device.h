// A Device: where tensors live and kernels run: a pool, a compute stream, one
// stream for copies to the host and one for copies back, pinned host memory,
// and, on the CPU, the threads that share a kernel's work.
//
// The current device is scoped per thread (DeviceScope); without a scope it is
// one shared CPU device. Rank threads of one process each open their own scope,
// so accounting stays apart. A Device outlives every tensor made on it, and the
// streams that its tensors were used on outlive the Device.
//
// A CUDA device is made by make_cuda_device (cuda_device.h) and used by one
// thread at a time, in its scope.
//
// A dry device has no memory and runs no kernels: a program run on it makes the
// same allocations in the same order, in no time. Values read from it are
// zero. It is what memory is planned with.
#pragma once

#include <functional>
#include <memory>

#include "runtime/pool.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"

namespace tapeline {

enum class DeviceKind : uint8_t { kCpu, kCuda };

// Null: immediate ones. Tests pass others.
struct DeviceStreams {
  std::unique_ptr<Stream> compute, copy_out, copy_in;
};

// What a device that is not the CPU brings. A dry one brings its kind alone.
struct DeviceBackend {
  DeviceKind kind = DeviceKind::kCpu;
  SystemMemory memory, pinned;
  // Called by the thread on which the device becomes current.
  std::function<void()> enter;
};

class Device {
 public:
  // A CPU device; `threads` counts the calling thread.
  explicit Device(int threads, DeviceStreams streams = {}, bool dry = false,
                  const DeviceBackend& backend = {});

  DeviceKind kind() const { return kind_; }
  bool dry() const { return dry_; }
  Pool& pool() { return pool_; }
  Pool& pinned() { return pinned_; }
  Stream& compute() { return *streams_.compute; }
  Stream& copy_out() { return *streams_.copy_out; }  // device to host
  Stream& copy_in() { return *streams_.copy_in; }    // host to device
  ThreadPool& threads() { return *threads_; }
  // Between steps only: no kernel may be running.
  void set_threads(int threads);

  static Device& current();

 private:
  friend class DeviceScope;
  const DeviceKind kind_;
  const std::function<void()> enter_;
  const bool dry_;
  // Before the pools: a pool ends what is queued on its blocks, copies between
  // them among it, when it is destroyed.
  DeviceStreams streams_;
  Pool pinned_, pool_;
  std::unique_ptr<ThreadPool> threads_;
};

// Makes `device` current on this thread until destroyed.
class DeviceScope {
 public:
  explicit DeviceScope(Device& device);
  ~DeviceScope() { make_current(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  static void make_current(Device* device);

  Device* previous_;
};

}  // namespace tapeline
