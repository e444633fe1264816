#include "dist/all_gather.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/status.h"
#include "runtime/tensor.h"

namespace tapeline {
namespace {

template <class T>
absl::Status reduce(Communicator& communicator, const std::string& name,
                    std::vector<T>& values, absl::Duration timeout) {
  if (values.empty()) return absl::OkStatus();
  const Tensor x = Tensor::from(values, {static_cast<int64_t>(values.size())});
  RETURN_IF_ERROR(
      communicator.all_reduce(everyone(communicator, name), x, timeout));
  values = x.to_vector<T>();
  return absl::OkStatus();
}

}  // namespace

Collective everyone(const Communicator& communicator, std::string name) {
  Collective out{std::move(name), {}};
  for (int r = 0; r < communicator.size(); ++r) out.ranks.push_back(r);
  return out;
}

absl::StatusOr<std::vector<std::string>> all_gather(Communicator& communicator,
                                                    const std::string& name,
                                                    const std::string& mine,
                                                    absl::Duration timeout) {
  const auto me = static_cast<size_t>(communicator.rank());
  std::vector<int64_t> bytes(static_cast<size_t>(communicator.size()), 0);
  bytes[me] = static_cast<int64_t>(mine.size());
  RETURN_IF_ERROR(reduce(communicator, name + ", sizes", bytes, timeout));
  constexpr int64_t kWord = sizeof(int64_t);
  std::vector<size_t> first;  // word of each rank
  size_t words = 0;
  for (const int64_t n : bytes) {
    first.push_back(words);
    words += static_cast<size_t>((n + kWord - 1) / kWord);
  }
  std::vector<int64_t> all(words, 0);
  if (!mine.empty()) std::memcpy(&all[first[me]], mine.data(), mine.size());
  RETURN_IF_ERROR(reduce(communicator, name, all, timeout));
  std::vector<std::string> out;
  for (size_t r = 0; r < bytes.size(); ++r) {
    out.emplace_back(static_cast<size_t>(bytes[r]), '\0');
    if (bytes[r] > 0) {
      std::memcpy(out.back().data(), &all[first[r]], out.back().size());
    }
  }
  return out;
}

absl::Status all_reduce(Communicator& communicator, const std::string& name,
                        std::vector<double>& values, absl::Duration timeout) {
  return reduce(communicator, name, values, timeout);
}

}  // namespace tapeline
