// The shape rules of ops.h as pure functions: an op CHECKs its rule once, tests
// call them with bad shapes. Messages name the op and both shapes.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "autograd/op_types.h"
#include "runtime/shape.h"

namespace tapeline::shape_rules {

absl::StatusOr<Shape> same(std::string_view op, const Shape& a, const Shape& b);
absl::StatusOr<Shape> reshape(const Shape& x, const Shape& to);
absl::StatusOr<Shape> linear(const Shape& x, const Shape& w);
absl::StatusOr<Shape> head_linear(const Shape& x, const Shape& w,
                                  const HeadRows& rows);
absl::StatusOr<Shape> norm(std::string_view op, const Shape& x, const Shape& w);
absl::StatusOr<Shape> swiglu(const Shape& x);
absl::StatusOr<Shape> embedding(const Shape& ids, const Shape& table);
absl::StatusOr<Shape> rope(const Shape& x, const Shape& cos);
absl::StatusOr<Shape> attention(const Shape& q, const Shape& k, const Shape& v,
                                int64_t sequence_tokens);
absl::StatusOr<Shape> select_keys(const Shape& q, const Shape& k,
                                  const Shape& w, int64_t sequence_tokens,
                                  int top_k);
absl::StatusOr<Shape> sparse_attention(const Shape& q, const Shape& kv,
                                       const Shape& ids, int64_t value_dim);
absl::StatusOr<Shape> router(const Shape& logits, const RouterRule& rule);
absl::StatusOr<Shape> dispatch(const Shape& x, const Shape& experts);
absl::StatusOr<Shape> grouped_linear(const Shape& x, const Shape& w,
                                     int64_t experts);
absl::StatusOr<Shape> combine(const Shape& x, const Shape& weight,
                              const Shape& row);
absl::StatusOr<Shape> linear_cross_entropy(const Shape& x, const Shape& w,
                                           const Shape& label,
                                           const Shape& weight);

}  // namespace tapeline::shape_rules
