#include "tests/support/fixture.h"

#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/check.h"
#include "runtime/dtype.h"
#include "runtime/status.h"

namespace tapeline {

Fixture Fixture::open(const std::string& path) {
  auto reader = SafetensorsReader::open(path);
  CHECK_OK(reader.status());
  return Fixture(std::move(reader).value());
}

bool Fixture::has(std::string_view name) const {
  return reader_.find(name) != nullptr;
}

Shape Fixture::shape(std::string_view name) const {
  const auto info = reader_.require(name);
  CHECK_OK(info.status());
  Shape shape;
  for (int64_t extent : (*info)->shape) shape.push_back(extent);
  return shape;
}

template <class T>
std::vector<T> Fixture::read(std::string_view name) const {
  const auto info = reader_.require(name);
  CHECK_OK(info.status());
  CHECK((*info)->dtype == to_safetensors(dtype_of<T>()))
      << name << " is " << (*info)->dtype << ", wanted "
      << to_safetensors(dtype_of<T>());
  std::vector<T> out(shape(name).elements());
  CHECK_OK(reader_.read(name, reinterpret_cast<std::byte*>(out.data()),
                        out.size() * sizeof(T)));
  return out;
}

std::vector<double> Fixture::values(std::string_view name) const {
  const auto info = reader_.require(name);
  CHECK_OK(info.status());
  const auto widened = [&]<class T>() {
    std::vector<double> out;
    for (const T& v : read<T>(name)) {
      out.push_back(static_cast<double>(v));
    }
    return out;
  };
  const std::optional<DType> dtype = dtype_from_safetensors((*info)->dtype);
  CHECK(dtype.has_value()) << name << " is " << (*info)->dtype;
  return dispatch(*dtype, widened);
}

std::vector<float> Fixture::floats(std::string_view name) const {
  return read<float>(name);
}

std::vector<int32_t> Fixture::ints(std::string_view name) const {
  return read<int32_t>(name);
}

}  // namespace tapeline
