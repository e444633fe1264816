// A Device: where tensors live and kernels run: a pool, a compute stream and,
// on the CPU, the threads that share a kernel's work.
//
// The current device is scoped per thread (DeviceScope); without a scope it is
// one shared CPU device. Rank threads of one process each open their own scope,
// so accounting stays apart. A Device outlives every tensor made on it, and the
// streams that its tensors were used on outlive the Device.
#pragma once

#include <memory>

#include "runtime/pool.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"

namespace tapeline {

enum class DeviceKind : uint8_t { kCpu, kCuda };

class Device {
 public:
  // A CPU device. With `compute` null it gets an immediate CpuStream; tests
  // pass a FakeStream. `threads` counts the calling thread.
  explicit Device(int threads, std::unique_ptr<Stream> compute = nullptr);

  DeviceKind kind() const { return DeviceKind::kCpu; }
  Pool& pool() { return pool_; }
  Stream& compute() { return *compute_; }
  ThreadPool& threads() { return *threads_; }
  // Between steps only: no kernel may be running.
  void set_threads(int threads);

  static Device& current();

 private:
  friend class DeviceScope;
  // Before the pool, which asks it about its blocks when it is destroyed.
  std::unique_ptr<Stream> compute_;
  Pool pool_;
  std::unique_ptr<ThreadPool> threads_;
};

// Makes `device` current on this thread until destroyed.
class DeviceScope {
 public:
  explicit DeviceScope(Device& device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  Device* previous_;
};

}  // namespace tapeline
