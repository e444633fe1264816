// Which parts of a model lie on which stage.
//
// A layout string lists the parts in order, E the embedding, t a decoder layer,
// m a depth of multi-token prediction, L the head with its loss, with | between
// stages: "Et*3|(tt|)*29,m|L" has 32 stages, the first with the embedding and
// three layers. *n repeats the part or the group in parentheses before it n
// times; commas and blanks only separate. Stages may be empty.
//
// Every layout has E first, L last, all m after all t, so layers keep their
// global numbers whatever the split. Depths that share one layer's weights stay
// on one stage: their gradients would otherwise have to be added across stages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tapeline {

struct StageParts {
  bool embedding = false, head = false;
  int first_layer = 0, layers = 0;  // decoder layers [first, first + layers)
  int first_depth = 0, depths = 0;  // of multi-token prediction
  friend bool operator==(const StageParts&, const StageParts&) = default;
};
using Layout = std::vector<StageParts>;

struct LayoutRules {
  bool depths_share_a_layer = true;
  int layers = -1, depths = -1;  // of the model; -1: any
};

// `name` stands for the text in errors: "--layout".
absl::StatusOr<Layout> parse_layout(std::string_view text,
                                    std::string_view name,
                                    const LayoutRules& rules = {});
// Reads back the same layout; no repetitions.
std::string layout_text(const Layout& layout);

// Layers cut evenly, a remainder one each to the first stages; the embedding on
// the first stage, depths and head on the last.
Layout even_layout(int layers, int depths, int stages);

}  // namespace tapeline
