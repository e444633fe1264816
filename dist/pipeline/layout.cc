#include "dist/pipeline/layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/text.h"
#include "runtime/check.h"
#include "runtime/json.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// Of the text with all repetitions written out.
constexpr size_t kMaxParts = 1 << 18;
constexpr int kMaxDepth = 16;

// Writes the repetitions out: "(tt|)*2m" becomes "tt|tt|m".
class Expander {
 public:
  Expander(std::string_view text, std::string_view name)
      : text_(text), name_(name) {}

  absl::StatusOr<std::string> run() {
    ASSIGN_OR_RETURN(std::string out, sequence(0));
    if (at_ < text_.size()) return error("')' without '('");
    return out;
  }

 private:
  absl::Status error(const std::string& what) const {
    return absl::InvalidArgumentError(text_position(text_, at_, name_) + what);
  }
  absl::StatusOr<std::string> sequence(int depth) {
    std::string out;
    while (at_ < text_.size() && text_[at_] != ')') {
      const char c = text_[at_];
      if (c == ',' || c == ' ') {
        ++at_;
        continue;
      }
      std::string item(1, c);
      if (c == '(') {
        if (depth == kMaxDepth) return error("too many '('");
        ++at_;
        ASSIGN_OR_RETURN(item, sequence(depth + 1));
        if (at_ == text_.size()) return error("a ')' is missing");
      } else if (std::string_view("EtmL|").find(c) == std::string_view::npos) {
        return error("expected one of E t m L | ( ) * ,");
      }
      ++at_;
      ASSIGN_OR_RETURN(const size_t times, repetitions());
      if (item.size() * times + out.size() > kMaxParts) {
        return error(absl::StrCat("more than ", kMaxParts, " parts"));
      }
      for (size_t i = 0; i < times && !item.empty(); ++i) out += item;
    }
    return out;
  }
  absl::StatusOr<size_t> repetitions() {
    if (at_ == text_.size() || text_[at_] != '*') return size_t{1};
    ++at_;
    size_t value = 0, digits = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9';
         ++at_, ++digits) {
      value = std::min(kMaxParts + 1, 10 * value + size_t(text_[at_] - '0'));
    }
    if (value == 0) return error("expected a number from 1 after '*'");
    return value;
  }

  std::string_view text_, name_;
  size_t at_ = 0;
};

absl::Status wrong(std::string_view name, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(name), ": ", what));
}

absl::Status check(const Layout& layout, std::string_view name,
                   const LayoutRules& rules) {
  int layers = 0, depths = 0, stages_with_depths = 0;
  for (const StageParts& stage : layout) {
    layers += stage.layers;
    depths += stage.depths;
    stages_with_depths += stage.depths > 0 ? 1 : 0;
  }
  if (layout.size() > kMaxCount) {
    return wrong(name, absl::StrCat("more than ", kMaxCount, " stages"));
  }
  if (rules.depths_share_a_layer && stages_with_depths > 1) {
    return wrong(name, "the depths m share one layer; put them on one stage");
  }
  if (rules.layers >= 0 && layers != rules.layers) {
    return wrong(name, absl::StrCat("has ", layers, " layers t; the model has ",
                                    rules.layers));
  }
  if (rules.depths >= 0 && depths != rules.depths) {
    return wrong(name, absl::StrCat("has ", depths, " depths m; the model has ",
                                    rules.depths));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> parse_layout(std::string_view text,
                                    std::string_view name,
                                    const LayoutRules& rules) {
  ASSIGN_OR_RETURN(const std::string parts, Expander(text, name).run());
  Layout layout(1);
  // The places of E, t's, m's and L in this order never fall.
  constexpr std::string_view kOrder = "EtmL";
  int reached = -1, layers = 0, depths = 0;
  for (const char c : parts) {
    if (c == '|') {
      layout.push_back({.first_layer = layers, .first_depth = depths});
      continue;
    }
    const int place = static_cast<int>(kOrder.find(c));
    const bool once = c == 'E' || c == 'L';
    if (place < reached || (once && place == reached)) {
      return wrong(name, absl::StrCat("'", std::string(1, c), "' after '",
                                      std::string(1, kOrder[reached]),
                                      "'; the order is one E, t, m, one L"));
    }
    if (reached < 0 && c != 'E') return wrong(name, "does not begin with E");
    reached = place;
    StageParts& stage = layout.back();
    if (c == 'E') stage.embedding = true;
    if (c == 't') ++stage.layers, ++layers;
    if (c == 'm') ++stage.depths, ++depths;
    if (c == 'L') stage.head = true;
  }
  if (reached != 3) return wrong(name, "has no L at the end");
  RETURN_IF_ERROR(check(layout, name, rules));
  return layout;
}

std::string layout_text(const Layout& layout) {
  std::string out;
  for (size_t i = 0; i < layout.size(); ++i) {
    const StageParts& stage = layout[i];
    if (i > 0) out += '|';
    if (stage.embedding) out += 'E';
    out.append(stage.layers, 't');
    out.append(stage.depths, 'm');
    if (stage.head) out += 'L';
  }
  return out;
}

Layout even_layout(int layers, int depths, int stages) {
  CHECK(layers >= 0 && depths >= 0 && stages >= 1)
      << "[layout] " << layers << " layers, " << depths << " depths, " << stages
      << " stages";
  Layout layout(stages);
  int next = 0;
  for (int i = 0; i < stages; ++i) {
    layout[i].first_layer = next;
    layout[i].layers = layers / stages + (i < layers % stages ? 1 : 0);
    next += layout[i].layers;
  }
  layout.front().embedding = true;
  layout.back().depths = depths;
  layout.back().head = true;
  return layout;
}

}  // namespace tapeline
