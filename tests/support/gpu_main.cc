// main() of tests that run on a GPU: it is the current device, the heap is its
// as well (device_heap.h), and a launch returns when it has run. Exits with 3,
// and one line, where there is no GPU.
#include <cstdio>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "tests/support/device_heap.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // A forked child cannot use the GPU. What death tests check, contracts about
  // shapes, comes before a kernel chooses its device: the CPU tests have them.
  std::string& filter = testing::GTEST_FLAG(filter);
  filter += filter.find('-') == std::string::npos ? "-*Death*" : ":*Death*";
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  auto device = tapeline::make_cuda_device();
  if (!device.ok() || !tapeline::device_heap_works()) {
    std::fprintf(stderr, "no GPU: %s\n",
                 std::string(device.status().message()).c_str());
    return 3;
  }
  const tapeline::DeviceScope scope(**device);
  return RUN_ALL_TESTS();
}
