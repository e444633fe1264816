// main() of tests that run on a GPU: it is the current device, the heap is its
// as well (device_heap.h), and a launch returns when it has run. Exits with 3,
// and one line, where there is no GPU.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "tests/support/device_heap.h"

namespace {

// Tables of cases hold tensors of the device until the process ends: neither
// they nor the device are destroyed, which would need a CUDA that still runs.
[[noreturn]] void end(int code) {
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace

int main(int argc, char** argv) {
  auto device = tapeline::make_cuda_device();
  std::optional<tapeline::DeviceScope> scope;
  if (device.ok()) scope.emplace(**device);
  // Tables of cases are made here, with their tensors.
  testing::InitGoogleTest(&argc, argv);
  // A forked child cannot use the GPU. What death tests check, contracts about
  // shapes, comes before a kernel chooses its device; the orderings that
  // EdgeTest drops are those of fake streams; and a call of CUDA needs more
  // than a small stack. The CPU tests have all three.
  std::string& filter = testing::GTEST_FLAG(filter);
  const bool has_negative = filter.find('-') != std::string::npos;
  filter += std::string(has_negative ? ":" : "-") +
            "*Death*:*/EdgeTest*:"
            "Muon.RowBlocksRepeatTheirHeights:*NeedNoDeepStack*";
  if (testing::GTEST_FLAG(list_tests)) end(RUN_ALL_TESTS());
  if (!device.ok() || !tapeline::device_heap_works()) {
    std::fprintf(stderr, "no GPU: %s\n",
                 std::string(device.status().message()).c_str());
    end(3);
  }
  end(RUN_ALL_TESTS());
}
