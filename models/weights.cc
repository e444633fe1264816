#include "models/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "runtime/access.h"
#include "runtime/device.h"
#include "runtime/random.h"
#include "runtime/status.h"

namespace tapeline {

void NameTable::add(std::string path_prefix, std::string name_prefix,
                    const std::vector<NameRule>& rules) {
  for (const NameRule& rule : rules) {
    std::vector<std::string> names;
    for (std::string_view name : rule.names) {
      names.push_back(name_prefix + std::string(name));
    }
    entries_.try_emplace(path_prefix + std::string(rule.path),
                         std::move(names));
  }
}

std::vector<std::string> NameTable::find(const std::string& path) const {
  const auto found = entries_.find(path);
  CHECK(found != entries_.end()) << "no file name is known for " << path;
  return found->second;
}

Tensor NamedTensor::block(const Tensor& of) const {
  return of.view_as({of.elements()})
      .slice(0, offset, offset + elements())
      .view_as(shape);
}

namespace internal {

void append_named(const std::string& path,
                  const std::vector<std::string>& names, const Shape& shape,
                  Parameter* parameter, Buffer* buffer,
                  std::vector<NamedTensor>& out) {
  const bool experts = names[0].find("{e}") != std::string::npos;
  const int64_t count = experts ? shape[0] : 1;
  Shape one;
  for (int d = experts ? 1 : 0; d < shape.rank(); ++d) one.push_back(shape[d]);
  const auto parts = static_cast<int64_t>(names.size());
  CHECK_EQ(one[0] % parts, 0) << path << " " << shape;
  one[0] /= parts;
  int64_t offset = 0;
  for (int64_t e = 0; e < count; ++e) {
    for (const std::string& name : names) {
      out.push_back({absl::StrReplaceAll(name, {{"{e}", absl::StrCat(e)}}), one,
                     offset, parameter, buffer});
      offset += one.elements();
    }
  }
}

}  // namespace internal

namespace {

// Makes the owner's memory once, however many blocks it has.
void allocate(const NamedTensor& t, DType dtype) {
  if (t.parameter != nullptr && !t.parameter->defined()) {
    t.parameter->set_value(
        t.name, Tensor::empty(t.parameter->shape, dtype, Tag::kParameter));
  }
  if (t.buffer != nullptr && !t.buffer->defined()) {
    t.buffer->set_value(Tensor::full(t.buffer->shape, DType::kF32,
                                     t.buffer->fill, Tag::kParameter));
  }
}

template <class A>
void assign(const std::vector<A>& from, const Tensor& to) {
  dispatch_float(to.dtype(), [&]<class B>() {
    std::vector<B> values(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
      values[i] = static_cast<B>(from[i]);
    }
    to.assign(values);
  });
}

// fill_normal() in parts, which the threads share.
template <class T>
void fill_normal_parts(std::vector<T>& out, float std, uint64_t seed,
                       std::string_view name) {
  constexpr int64_t kPart = 4096;
  Device::current().threads().parallel_for(
      static_cast<int64_t>(out.size()), kPart, [&](int64_t begin, int64_t end) {
        float part[kPart];
        for (int64_t at = begin; at < end; at += kPart) {
          const int64_t n = std::min(kPart, end - at);
          fill_normal(View<float>(part, {n}), std, seed, name,
                      static_cast<uint64_t>(at));
          for (int64_t i = 0; i < n; ++i) {
            out[static_cast<size_t>(at + i)] = static_cast<T>(part[i]);
          }
        }
      });
}

absl::Status check_finite(const NamedTensor& t, const Tensor& value) {
  return dispatch_float(value.dtype(), [&]<class T>() -> absl::Status {
    const std::vector<T> values = value.to_vector<T>();
    for (size_t i = 0; i < values.size(); ++i) {
      const double x = static_cast<double>(values[i]);
      if (std::isfinite(x)) continue;
      return absl::DataLossError(absl::StrCat(
          "tensor ", t.name, " element ", i, " is ", x,
          "; the file is damaged or was saved from a diverged run"));
    }
    return absl::OkStatus();
  });
}

}  // namespace

void initialize(const std::vector<NamedTensor>& tensors, DType dtype,
                uint64_t seed, double normal_std) {
  for (const NamedTensor& t : tensors) {
    allocate(t, dtype);
    if (t.parameter == nullptr || Device::current().dry()) continue;
    const Initializer& init = t.parameter->initializer;
    const auto value = static_cast<float>(init.value);
    const bool normal = init.kind == Initializer::Kind::kNormal;
    const float std = normal_std < 0 ? value : static_cast<float>(normal_std);
    dispatch_float(dtype, [&]<class T>() {
      std::vector<T> values(static_cast<size_t>(t.elements()), T(value));
      if (normal) fill_normal_parts(values, std, seed, t.name);
      t.value().assign(values);
    });
  }
}

namespace {

// Where an expert's tensor lies in a file that stacks experts:
// X.experts.gate_up_proj [E, 2 F, D] with gate rows first, and
// X.experts.down_proj [E, D, F].
struct Stacked {
  std::string name;
  int64_t expert = 0;
  int64_t parts = 1, part = 0;  // equal blocks of an expert's rows
};
std::optional<Stacked> stacked(const std::string& name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos) return std::nullopt;
  const size_t first = at + kExperts.size(), dot = name.find('.', first);
  Stacked s;
  if (dot == std::string::npos ||
      !absl::SimpleAtoi(name.substr(first, dot - first), &s.expert)) {
    return std::nullopt;
  }
  const std::string prefix = name.substr(0, first), rest = name.substr(dot + 1);
  if (rest == "down_proj.weight") {
    s.name = prefix + "down_proj";
  } else if (rest == "gate_proj.weight" || rest == "up_proj.weight") {
    s.name = prefix + "gate_up_proj";
    s.parts = 2;
    s.part = rest == "up_proj.weight" ? 1 : 0;
  } else {
    return std::nullopt;
  }
  return s;
}

// A canonical tensor of the file, from its own key or from stacked experts.
absl::StatusOr<Tensor> read_canonical(const NamedTensor& t,
                                      const SafetensorsReader& reader) {
  const std::optional<Stacked> s = stacked(t.name);
  const TensorInfo* all = s ? reader.find(s->name) : nullptr;
  if (reader.find(t.name) != nullptr) {
    if (all != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          reader.path(), " holds both ", t.name, " and ", all->name,
          "; experts are stored one by one or stacked"));
    }
    return reader.read_tensor(t.name);
  }
  if (all == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("tensor ", t.name, " is missing from ", reader.path(),
                     "; the file belongs to another model or is incomplete"));
  }
  const int64_t experts = t.parameter->shape[0];
  const std::vector<int64_t> wanted = {experts, s->parts * t.shape[0],
                                       t.shape[1]};
  if (all->shape != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", all->name, " is [", absl::StrJoin(all->shape, ", "), "] in ",
        reader.path(), ", the model config wants [",
        absl::StrJoin(wanted, ", "), "]"));
  }
  const std::optional<DType> dtype = dtype_from_safetensors(all->dtype);
  if (!dtype || !is_float(*dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", all->name, " is ", all->dtype, " in ",
                     reader.path(), ", not a float tensor"));
  }
  const Tensor block = Tensor::empty(t.shape, *dtype);
  absl::Status status;
  dispatch_float(*dtype, [&]<class T>() {
    std::vector<T> values(static_cast<size_t>(block.elements()));
    const uint64_t bytes = static_cast<uint64_t>(block.bytes());
    const auto index = static_cast<uint64_t>(s->expert * s->parts + s->part);
    status =
        reader.read_range(all->name, index * bytes,
                          reinterpret_cast<std::byte*>(values.data()), bytes);
    block.assign(values);
  });
  RETURN_IF_ERROR(status);
  return block;
}

}  // namespace

absl::Status load(const std::vector<NamedTensor>& tensors, DType dtype,
                  const SafetensorsReader& reader) {
  for (const NamedTensor& t : tensors) {
    ASSIGN_OR_RETURN(const Tensor file, read_canonical(t, reader));
    if (!(file.shape() == t.shape)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", t.name, " is ", describe(file), " in ", reader.path(),
          ", the model config wants ", to_string(t.shape)));
    }
    if (!is_float(file.dtype())) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", t.name, " is ", describe(file), " in ",
                       reader.path(), ", not a float tensor"));
    }
    allocate(t, dtype);
    dispatch_float(file.dtype(),
                   [&]<class A>() { assign(file.to_vector<A>(), t.value()); });
    // After the conversion: a value may be finite in the file alone.
    RETURN_IF_ERROR(check_finite(t, t.value()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TensorCopy>> find_copies(
    const std::vector<TensorCopy>& possible, const SafetensorsReader& reader) {
  std::vector<TensorCopy> found;
  for (const TensorCopy& copy : possible) {
    const TensorInfo* info = reader.find(copy.name);
    if (info == nullptr) continue;
    ASSIGN_OR_RETURN(const TensorInfo* of, reader.require(copy.of));
    bool equal = info->shape == of->shape && info->dtype == of->dtype;
    // In pieces: an embedding may be larger than what is free.
    constexpr uint64_t kPiece = uint64_t{1} << 22;
    std::vector<std::byte> a(std::min(info->bytes, kPiece)), b(a.size());
    for (uint64_t at = 0; equal && at < info->bytes; at += kPiece) {
      const size_t n = std::min(kPiece, info->bytes - at);
      RETURN_IF_ERROR(reader.read_range(copy.name, at, a.data(), n));
      RETURN_IF_ERROR(reader.read_range(copy.of, at, b.data(), n));
      equal = std::memcmp(a.data(), b.data(), n) == 0;
    }
    if (!equal) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", copy.name, " differs from ", copy.of, " in ",
          reader.path(), ", but by the model config they are one (", copy.why,
          ")"));
    }
    found.push_back(copy);
  }
  return found;
}

std::vector<std::string> unknown_tensors(
    const std::vector<NamedTensor>& tensors,
    const std::vector<TensorCopy>& copies, const SafetensorsReader& reader) {
  std::set<std::string> known;
  for (const NamedTensor& t : tensors) {
    known.insert(t.name);
    if (const auto s = stacked(t.name)) known.insert(s->name);
  }
  for (const TensorCopy& copy : copies) known.insert(copy.name);
  std::vector<std::string> unknown;
  for (const std::string& name : reader.names()) {
    if (known.contains(name) || name.ends_with("rotary_emb.inv_freq")) continue;
    unknown.push_back(name);
  }
  return unknown;
}

std::vector<NamedTensor> sorted_by_name(std::vector<NamedTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const NamedTensor& a, const NamedTensor& b) {
              return a.name < b.name;
            });
  return tensors;
}

std::vector<OptimizedTensor> optimized_tensors(
    const std::vector<NamedTensor>& tensors) {
  std::vector<OptimizedTensor> out;
  for (const NamedTensor& t : tensors) {
    if (t.parameter == nullptr || !t.parameter->trainable()) continue;
    out.push_back({t.name, t.shape, t.offset, *t.parameter, {}});
  }
  return out;
}

int64_t parameter_count(const std::vector<NamedTensor>& tensors) {
  int64_t count = 0;
  for (const NamedTensor& t : tensors) {
    if (t.parameter != nullptr) count += t.elements();
  }
  return count;
}

}  // namespace tapeline
