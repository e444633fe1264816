#include "tests/gradcheck/cases.h"

#include <limits>
#include <random>

#include "runtime/access.h"

namespace tapeline {
namespace {

void fill_normal(const Tensor& x, uint32_t seed, double scale) {
  std::mt19937 random(seed);
  std::normal_distribution<double> draw(0, scale);
  auto bytes = write<double>(x);
  const View<double>& view = bytes.view();
  for (int64_t i = 0; i < x.elements(); ++i) {
    int64_t at = 0, rest = i;
    for (int d = x.rank() - 1; d >= 0; --d) {
      at += rest % x.size(d) * view.strides[d];
      rest /= x.size(d);
    }
    view.data[at] = draw(random);
  }
}

}  // namespace

Tensor normal(const Shape& shape, uint32_t seed, double scale) {
  const Tensor x = Tensor::empty(shape, DType::kF64);
  fill_normal(x, seed, scale);
  return x;
}

Tensor strided(const Shape& shape, uint32_t seed, double scale) {
  Shape wide = shape;
  wide[0] += 3;
  wide[-1] += shape.rank() > 1 ? 5 : 0;
  Tensor x =
      Tensor::full(wide, DType::kF64, std::numeric_limits<double>::quiet_NaN());
  x = x.slice(0, 1, 1 + shape[0]);
  if (shape.rank() > 1) x = x.slice(-1, 2, 2 + shape[-1]);
  fill_normal(x, seed, scale);
  return x;
}

Tensor transposed(const Shape& shape, uint32_t seed) {
  return normal({shape[1], shape[0]}, seed).transpose(0, 1);
}

Parameter weight(const Shape& shape, uint32_t seed, double scale) {
  Parameter p(shape);
  p.set_value("w" + std::to_string(seed), normal(shape, seed, scale));
  return p;
}

Tensor ints(const std::vector<int32_t>& values, const Shape& shape) {
  return Tensor::from(values, shape);
}

}  // namespace tapeline
