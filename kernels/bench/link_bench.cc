// Copies between the device and pinned memory, as offload queues them: on the
// device's two copy streams.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/bench/bench.h"

namespace tapeline::bench {
namespace {

// Pinned memory of the current device.
struct Pinned {
  explicit Pinned(int64_t bytes)
      : device(&Device::current()),
        block(device->pinned().allocate(static_cast<size_t>(bytes), Tag::kOther,
                                        &device->compute())) {
    const std::string what =
        "out of memory: " + std::to_string(bytes) + " bytes of pinned memory";
    if (!block.data && out_of_memory) out_of_memory(what);
    CHECK(block.data != nullptr) << what;
  }
  ~Pinned() { device->pinned().free(block, {device->compute().record()}); }
  Device* device;
  Block block;
};

enum class Direction { kIn, kOut, kBoth };

struct Data {
  Data(int64_t bytes, Direction direction)
      : n(direction == Direction::kBoth ? ceil_div(bytes, 2) : bytes),
        direction(direction),
        from_host(n),
        to_host(n),
        in(n),
        out(normal<float>(ceil_div(n, 4), 1)) {
    for (int64_t i = 0; i < n; ++i) {
      from_host.block.data[i] = static_cast<std::byte>(i * 31 % 251);
    }
  }
  void launch() {
    Device& device = *from_host.device;
    const auto size = static_cast<size_t>(n);
    const Event begin = device.compute().record();
    if (direction != Direction::kOut) {
      device.copy_in().wait(begin);
      device.copy_in().copy(in.data(), from_host.block.data, size);
      device.compute().wait(device.copy_in().record());
    }
    if (direction != Direction::kIn) {
      device.copy_out().wait(begin);
      device.copy_out().copy(to_host.block.data, out.data(), size);
      device.compute().wait(device.copy_out().record());
    }
  }
  void verify(Verifier& verifier) const {
    const int64_t size = std::min<int64_t>(n, 4096);
    for (int64_t block : sampled_rows(n / size)) {
      std::vector<float> got;
      std::vector<double> expected;
      const int64_t at = block * size;
      for (int64_t i = at; i < at + size && direction != Direction::kOut; ++i) {
        got.push_back(static_cast<float>(in[i]));
        expected.push_back(static_cast<double>(i * 31 % 251));
      }
      const auto* sent = reinterpret_cast<const std::byte*>(
          out.host(at / 4, ceil_div(size, 4)));
      for (int64_t i = 0; i < size && direction != Direction::kIn; ++i) {
        got.push_back(static_cast<float>(to_host.block.data[at + i]));
        expected.push_back(static_cast<double>(sent[i]));
      }
      verifier.row(
          View<const float>(got.data(), {static_cast<int64_t>(got.size())}),
          expected);
    }
  }

  int64_t n;
  Direction direction;
  Pinned from_host, to_host;
  Array<std::byte> in;
  Array<float> out;
};

template <Direction kDirection>
Run make(const Arguments& a) {
  auto data = std::make_shared<Data>(a.dims[0], kDirection);
  return {.launch = [data] { data->launch(); },
          .cost = {.bytes = static_cast<double>(a.dims[0])},
          .verify = [data](Verifier& verifier) { data->verify(verifier); },
          .on_device = false};
}

const std::vector<std::vector<int64_t>> kShapes = {{1 << 20}};
const Limits kLimits = {.dtypes = {}};  // bytes
const bool added = add({"link",
                        "h2d_pinned",
                        {"bytes"},
                        kShapes,
                        make<Direction::kIn>,
                        {{536870912}}},
                       kLimits) &&
                   add({"link",
                        "d2h_pinned",
                        {"bytes"},
                        kShapes,
                        make<Direction::kOut>,
                        {{536870912}}},
                       kLimits) &&
                   add({"link",
                        "h2d_d2h_both",
                        {"bytes"},
                        kShapes,
                        make<Direction::kBoth>,
                        {{1073741824}}},
                       kLimits);

}  // namespace
}  // namespace tapeline::bench
