// Nearest known name for a mistyped one.
//
// Distance is optimal string alignment: insertions, deletions, substitutions
// and swaps of neighbours each count 1.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tapeline {

int edit_distance(std::string_view a, std::string_view b);

// The candidate nearest to `word`, the first of equals; empty when none is
// near enough to be meant (more than a third of the word differs). For dotted
// names a candidate whose last part is `word`'s last part is near, so "lr"
// finds "optimizer.lr".
std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& candidates);

// "; did you mean 'x'?" or nothing.
std::string suggestion(std::string_view word,
                       const std::vector<std::string>& candidates);

}  // namespace tapeline
