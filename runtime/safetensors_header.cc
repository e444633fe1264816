#include "runtime/safetensors_header.h"

#include <algorithm>
#include <tuple>

#include "runtime/json.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

struct KnownType {
  std::string_view name;
  int bits;
};
constexpr KnownType kKnownTypes[] = {
    {"BOOL", 8},    {"U8", 8},   {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16},
    {"U16", 16},    {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
    {"F32", 32},    {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64},
};

absl::Status invalid(std::string text) {
  return absl::InvalidArgumentError(std::move(text));
}

// A document of one object whose values each have a fixed form.
class HeaderHandler : public JsonHandler {
 public:
  SafetensorsHeader header;

  absl::Status null() override {
    // Written by some tools for "no metadata".
    if (at_ == At::kRootMetadata) return to(At::kRoot);
    return unexpected("null");
  }
  absl::Status boolean(bool) override { return unexpected("a boolean"); }
  absl::Status number(double) override {
    return unexpected("a number with '.' or exponent");
  }
  absl::Status integer(int64_t value) override {
    if (at_ != At::kShape && at_ != At::kOffsets) {
      return unexpected("an integer");
    }
    if (value < 0) return invalid("negative number in " + where());
    if (at_ == At::kShape) {
      tensor().shape.push_back(value);
    } else if (offsets_ == 2) {
      return invalid("data_offsets of " + where() +
                     " has more than two values");
    } else {
      (offsets_++ == 0 ? begin_ : end_) = static_cast<uint64_t>(value);
    }
    return absl::OkStatus();
  }
  absl::Status string(std::string& value) override {
    if (at_ == At::kMetadata) {
      header.metadata[metadata_key_] = std::move(value);
      return absl::OkStatus();
    }
    if (at_ != At::kDtype) return unexpected("a string");
    if (!safetensors_bits(value)) {
      return invalid("unknown dtype '" + value + "' of " + where() +
                     "; a newer tapeline may read it");
    }
    tensor().dtype = std::move(value);
    return to(At::kTensor);
  }

  absl::Status begin_object() override {
    switch (at_) {
      case At::kStart:
        return to(At::kRoot);
      case At::kRootMetadata:
        return to(At::kMetadata);
      case At::kRootTensor:
        return to(At::kTensor);
      default:
        return unexpected("an object");
    }
  }
  absl::Status key(std::string& key) override {
    switch (at_) {
      case At::kRoot:
        if (key == "__metadata__") return to(At::kRootMetadata);
        header.tensors.emplace_back().name = std::move(key);
        fields_ = 0;
        return to(At::kRootTensor);
      case At::kMetadata:
        metadata_key_ = std::move(key);
        return absl::OkStatus();
      default:
        ++fields_;
        if (key == "dtype") return to(At::kDtype);
        if (key == "shape") return to(At::kShapeArray);
        if (key == "data_offsets") return to(At::kOffsetsArray);
        return invalid("unknown field '" + key + "' of " + where());
    }
  }
  absl::Status end_object() override {
    if (at_ == At::kMetadata) return to(At::kRoot);
    if (at_ == At::kRoot) return to(At::kEnd);
    // Keys do not repeat, so three of the three known ones are all of them.
    if (fields_ != 3) {
      return invalid(where() + " needs dtype, shape and data_offsets");
    }
    return finish_tensor();
  }
  absl::Status begin_array() override {
    if (at_ == At::kShapeArray) return to(At::kShape);
    if (at_ == At::kOffsetsArray) {
      offsets_ = 0;
      return to(At::kOffsets);
    }
    return unexpected("an array");
  }
  absl::Status end_array() override {
    if (at_ == At::kOffsets && offsets_ != 2) {
      return invalid("data_offsets of " + where() + " needs two values");
    }
    return to(At::kTensor);
  }

 private:
  // Which value comes next, or which container is open.
  enum class At {
    kStart,
    kRoot,
    kRootMetadata,
    kRootTensor,
    kMetadata,
    kTensor,
    kDtype,
    kShapeArray,
    kShape,
    kOffsetsArray,
    kOffsets,
    kEnd,
  };

  absl::Status to(At at) {
    at_ = at;
    return absl::OkStatus();
  }
  TensorInfo& tensor() { return header.tensors.back(); }
  std::string where() const {
    if (at_ == At::kMetadata || at_ == At::kRootMetadata) {
      return "__metadata__";
    }
    if (header.tensors.empty()) return "the header";
    return "tensor '" + header.tensors.back().name + "'";
  }
  absl::Status unexpected(std::string_view what) const {
    return invalid(std::string(what) + " where " + where() +
                   " has no place for it");
  }

  absl::Status finish_tensor() {
    TensorInfo& t = tensor();
    // Empty extents do not excuse the others: code that reads the shape
    // multiplies them in an order of its own.
    uint64_t bits = static_cast<uint64_t>(*safetensors_bits(t.dtype));
    bool empty = false;
    for (int64_t extent : t.shape) {
      empty |= extent == 0;
      const uint64_t factor = std::max<uint64_t>(1, extent);
      if (__builtin_mul_overflow(bits, factor, &bits) || bits > INT64_MAX) {
        return invalid("size of " + where() + " overflows");
      }
    }
    if (empty) bits = 0;
    if (bits % 8 != 0) {
      return invalid("size of " + where() + " is not a whole byte");
    }
    if (begin_ > end_) {
      return invalid("data_offsets of " + where() + " end before they begin");
    }
    if (end_ - begin_ != bits / 8) {
      return invalid(where() + " has " + std::to_string(end_ - begin_) +
                     " bytes, its dtype and shape need " +
                     std::to_string(bits / 8));
    }
    t.offset = begin_;
    t.bytes = end_ - begin_;
    return to(At::kRoot);
  }

  At at_ = At::kStart;
  int fields_ = 0;
  int offsets_ = 0;
  uint64_t begin_ = 0, end_ = 0;
  std::string metadata_key_;
};

// The tensors, sorted by offset, cover [0, data_bytes) exactly.
absl::Status check_tiling(const std::vector<TensorInfo>& tensors,
                          uint64_t data_bytes, const std::string& name) {
  uint64_t at = 0;
  for (const TensorInfo& t : tensors) {
    if (t.offset != at) {
      return invalid(name + ": tensor '" + t.name + "' begins at byte " +
                     std::to_string(t.offset) +
                     " of the data, the one before " + "ends at " +
                     std::to_string(at) +
                     (t.offset < at ? " (overlap)" : " (hole)"));
    }
    at += t.bytes;
  }
  if (at != data_bytes) {
    return invalid(name + ": the tensors have " + std::to_string(at) +
                   " bytes, the file has " + std::to_string(data_bytes) +
                   " after its header; it is cut or has a tail");
  }
  return absl::OkStatus();
}

absl::Status check_file_name(const std::string& file, std::string_view name) {
  const bool plain = file.find('/') == std::string::npos &&
                     file.find('\0') == std::string::npos && file != "." &&
                     file != ".." && file.ends_with(".safetensors");
  if (plain) return absl::OkStatus();
  return invalid(std::string(name) + ": '" + file +
                 "' is not the name of a .safetensors file in the same folder");
}

}  // namespace

std::optional<int> safetensors_bits(std::string_view dtype) {
  for (const KnownType& known : kKnownTypes) {
    if (known.name == dtype) return known.bits;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_safetensors(std::string_view dtype) {
  for (DType ours : {DType::kF32, DType::kBf16, DType::kF64, DType::kI32,
                     DType::kI64, DType::kU8}) {
    if (to_safetensors(ours) == dtype) return ours;
  }
  return std::nullopt;
}

std::string_view to_safetensors(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBf16:
      return "BF16";
    case DType::kF64:
      return "F64";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
  }
  return "?";
}

absl::StatusOr<uint64_t> safetensors_header_bytes(std::string_view first,
                                                  uint64_t file_bytes,
                                                  std::string_view name) {
  if (file_bytes < 8 || first.size() < 8) {
    return invalid(std::string(name) + ": " + std::to_string(file_bytes) +
                   " bytes are too few for a safetensors file");
  }
  uint64_t n = 0;
  for (int i = 0; i < 8; ++i) {
    n |= uint64_t{static_cast<unsigned char>(first[i])} << (8 * i);
  }
  if (n > kSafetensorsMaxHeader || n > file_bytes - 8) {
    return invalid(std::string(name) + ": header of " + std::to_string(n) +
                   " bytes in a file of " + std::to_string(file_bytes) +
                   "; it is cut or no safetensors file");
  }
  return n;
}

absl::StatusOr<SafetensorsHeader> parse_safetensors_header(
    std::string_view header, uint64_t file_bytes, std::string_view name) {
  const std::string place = std::string(name) + " header";
  if (!header.starts_with('{')) {
    return invalid(place + ": does not begin with '{'");
  }
  HeaderHandler handler;
  RETURN_IF_ERROR(parse_json_events(header, place, handler, 3));
  SafetensorsHeader out = std::move(handler.header);
  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.offset, a.bytes, a.name) <
                     std::tie(b.offset, b.bytes, b.name);
            });
  const uint64_t data_begin = 8 + header.size();
  RETURN_IF_ERROR(
      check_tiling(out.tensors, file_bytes - data_begin, std::string(name)));
  for (TensorInfo& t : out.tensors) t.offset += data_begin;
  return out;
}

absl::StatusOr<SafetensorsIndex> parse_safetensors_index(
    std::string_view text, std::string_view name) {
  ASSIGN_OR_RETURN(const Json json, parse_json(text, name));
  const std::string place(name);
  const Json* map = json.find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return invalid(place + ": needs an object weight_map");
  }
  SafetensorsIndex index;
  for (const auto& [tensor, file] : map->object()) {
    if (!file.is_string()) {
      return invalid(place + ": weight_map of '" + tensor +
                     "' is not a file name");
    }
    RETURN_IF_ERROR(check_file_name(file.string(), name));
    index.weight_map.emplace_back(tensor, file.string());
  }
  const Json* metadata = json.find("metadata");
  const Json* total = metadata ? metadata->find("total_size") : nullptr;
  if (total != nullptr) {
    if (!total->is_integer() || total->integer() < 0) {
      return invalid(place + ": total_size is not a size in bytes");
    }
    index.total_size = static_cast<uint64_t>(total->integer());
  }
  return index;
}

}  // namespace tapeline
