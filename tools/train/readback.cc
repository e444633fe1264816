#include "tools/train/readback.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr size_t kAlignment = 16;
// Short against a step, long against asking.
constexpr std::chrono::microseconds kPause(20);

}  // namespace

Readback::~Readback() {
  if (block_.data != nullptr) pool_->free(block_, {sent_});
}

size_t Readback::add(const Tensor& tensor) {
  CHECK(tensor.contiguous()) << "[readback] of a strided " << tensor;
  entries_.push_back({tensor, tensor.dtype(), tensor.elements(), bytes_});
  bytes_ += (static_cast<size_t>(tensor.bytes()) + kAlignment - 1) /
            kAlignment * kAlignment;
  return entries_.size() - 1;
}

void Readback::send() {
  if (!pinned() || bytes_ == 0) return;
  Stream& stream = device_->compute();
  block_ = pool_->allocate(bytes_, Tag::kOther, &stream);
  CHECK(block_.data != nullptr)
      << "no pinned memory for the " << bytes_ << " bytes of a step's numbers";
  for (const Entry& entry : entries_) {
    if (entry.elements == 0) continue;
    dispatch(entry.tensor.dtype(), [&]<class T>() {
      const auto from = read<T>(entry.tensor);
      stream.copy(block_.data + entry.at, from.view().data,
                  static_cast<size_t>(entry.tensor.bytes()));
    });
  }
  sent_ = stream.record();
  for (Entry& entry : entries_) entry.tensor = {};
}

void Readback::wait() const {
  while (!sent_.done()) std::this_thread::sleep_for(kPause);
}

void Readback::copy_out(const Entry& entry, void* to) const {
  std::memcpy(to, block_.data + entry.at,
              static_cast<size_t>(entry.elements) * size_of(entry.dtype));
}

double Readback::number(size_t i) const {
  if (entries_[i].dtype == DType::kF64) return values<double>(i)[0];
  return values<float>(i)[0];
}

}  // namespace tapeline
