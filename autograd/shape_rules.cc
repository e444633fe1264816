#include "autograd/shape_rules.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace tapeline::shape_rules {
namespace {

template <class... Args>
absl::Status bad(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}
std::string str(const Shape& shape) { return to_string(shape); }

}  // namespace

absl::StatusOr<Shape> same(std::string_view op, const Shape& a,
                           const Shape& b) {
  if (a == b) return a;
  return bad("[", std::string(op), "] shapes differ: a is ", str(a), ", b is ",
             str(b));
}

absl::StatusOr<Shape> reshape(const Shape& x, const Shape& to) {
  bool negative = false;
  for (int64_t extent : to) negative |= extent < 0;
  if (!negative && x.elements() == to.elements()) return to;
  return bad("[reshape] ", str(x), " does not hold ", str(to));
}

absl::StatusOr<Shape> linear(const Shape& x, const Shape& w) {
  if (x.rank() != 2 || w.rank() != 2 || x[1] != w[1]) {
    return bad("[linear] x is ", str(x), ", w is ", str(w),
               "; wants [T, D] and [N, D]");
  }
  return Shape{x[0], w[0]};
}

absl::StatusOr<Shape> head_linear(const Shape& x, const Shape& w,
                                  const HeadRows& rows) {
  const bool forward = rows.direction == HeadRows::Direction::kForward;
  const int64_t used = rows.end - rows.begin;
  if (x.rank() != 3 || w.rank() != 2 || rows.heads < 1 ||
      w[0] % rows.heads != 0 || rows.begin < 0 || used < 0 ||
      rows.end > w[0] / rows.heads || x[1] != rows.heads ||
      x[2] != (forward ? w[1] : used)) {
    return bad("[head_linear] x is ", str(x), ", w is ", str(w), " with rows ",
               rows.begin, " to ", rows.end, " of each of ", rows.heads,
               " heads");
  }
  return Shape{x[0], x[1], forward ? used : w[1]};
}

absl::StatusOr<Shape> norm(std::string_view op, const Shape& x,
                           const Shape& w) {
  if (x.rank() < 1 || w.rank() != 1 || x[-1] != w[0]) {
    return bad("[", std::string(op), "] x is ", str(x), ", weight is ", str(w));
  }
  return x;
}

absl::StatusOr<Shape> swiglu(const Shape& x) {
  if (x.rank() != 2 || x[1] % 2 != 0) {
    return bad("[swiglu] x is ", str(x), "; wants [T, 2F]");
  }
  return Shape{x[0], x[1] / 2};
}

absl::StatusOr<Shape> embedding(const Shape& ids, const Shape& table) {
  if (ids.rank() != 1 || table.rank() != 2) {
    return bad("[embedding] ids are ", str(ids), ", table is ", str(table));
  }
  return Shape{ids[0], table[1]};
}

absl::StatusOr<Shape> rope(const Shape& x, const Shape& cos) {
  if (x.rank() != 3 || cos.rank() != 2 || x[0] != cos[0] ||
      x[2] != 2 * cos[1]) {
    return bad("[rope] x is ", str(x), ", the table is ", str(cos),
               "; wants [T, H, R] and [T, R/2]");
  }
  return x;
}

absl::StatusOr<Shape> attention(const Shape& q, const Shape& k, const Shape& v,
                                int64_t sequence_tokens) {
  if (q.rank() != 3 || k.rank() != 3 || v.rank() != 3 || q[2] != k[2] ||
      k[0] != v[0] || k[1] != v[1] || k[1] == 0 || q[1] % k[1] != 0 ||
      q[0] != sequence_tokens) {
    return bad("[attention] q is ", str(q), ", k is ", str(k), ", v is ",
               str(v), ", the sequence has ", sequence_tokens, " tokens");
  }
  return Shape{q[0], q[1], v[2]};
}

absl::StatusOr<Shape> select_keys(const Shape& q, const Shape& k,
                                  const Shape& w, int64_t sequence_tokens,
                                  int top_k) {
  if (q.rank() != 3 || k.rank() != 2 || w.rank() != 2 || q[2] != k[1] ||
      w[0] != q[0] || w[1] != q[1] || q[0] != sequence_tokens || top_k < 1) {
    return bad("[select_keys] q is ", str(q), ", k is ", str(k), ", w is ",
               str(w), ", the sequence has ", sequence_tokens,
               " tokens, top_k is ", top_k);
  }
  return Shape{q[0], top_k};
}

absl::StatusOr<Shape> sparse_attention(const Shape& q, const Shape& kv,
                                       const Shape& ids, int64_t value_dim) {
  if (q.rank() != 3 || kv.rank() != 2 || ids.rank() != 2 || q[2] != kv[1] ||
      ids[0] != q[0] || value_dim < 0 || value_dim > kv[1]) {
    return bad("[sparse_attention] q is ", str(q), ", kv is ", str(kv),
               ", ids are ", str(ids), ", value_dim is ", value_dim);
  }
  return Shape{q[0], q[1], value_dim};
}

absl::StatusOr<Shape> router(const Shape& logits, const RouterRule& rule) {
  if (logits.rank() != 2 || rule.top_k < 1 || rule.top_k > logits[1] ||
      rule.groups < 1 || logits[1] % rule.groups != 0 || rule.top_groups < 1 ||
      rule.top_groups > rule.groups ||
      rule.top_k > logits[1] / rule.groups * rule.top_groups) {
    return bad("[router] logits are ", str(logits), ", top_k ", rule.top_k,
               ", groups ", rule.groups, ", top_groups ", rule.top_groups);
  }
  return Shape{logits[0], rule.top_k};
}

absl::StatusOr<Shape> dispatch(const Shape& x, const Shape& experts) {
  if (x.rank() != 2 || experts.rank() != 2 || x[0] != experts[0]) {
    return bad("[dispatch] x is ", str(x), ", experts are ", str(experts));
  }
  return Shape{x[0] * experts[1], x[1]};
}

absl::StatusOr<Shape> grouped_linear(const Shape& x, const Shape& w,
                                     int64_t experts) {
  if (x.rank() != 2 || w.rank() != 3 || x[1] != w[2] || w[0] != experts) {
    return bad("[grouped_linear] x is ", str(x), ", w is ", str(w), ", routed ",
               "to ", experts, " experts; wants [R, D] and [E, F, D]");
  }
  return Shape{x[0], w[1]};
}

absl::StatusOr<Shape> combine(const Shape& x, const Shape& weight,
                              const Shape& row) {
  if (x.rank() != 2 || weight.rank() != 2 || !(weight == row)) {
    return bad("[combine] x is ", str(x), ", weights are ", str(weight),
               ", rows are ", str(row));
  }
  return Shape{weight[0], x[1]};
}

absl::StatusOr<Shape> linear_cross_entropy(const Shape& x, const Shape& w,
                                           const Shape& label,
                                           const Shape& weight) {
  if (x.rank() != 2 || w.rank() != 2 || x[1] != w[1] || label.rank() != 1 ||
      label[0] != x[0] || !(weight == label)) {
    return bad("[linear_cross_entropy] x is ", str(x), ", w is ", str(w),
               ", labels are ", str(label), ", weights are ", str(weight));
  }
  return Shape{x[0], w[0]};
}

}  // namespace tapeline::shape_rules
