#include "dist/pipeline/text.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

bool blank(char c) { return c == ' ' || c == '\t'; }

// Reads words from one position on; errors name that position.
class Reader {
 public:
  Reader(std::string_view text, std::string_view name)
      : text_(text), name_(name) {}

  bool at_end() const { return at_ == text_.size(); }
  bool at_line_end() const {
    return at_end() || text_[at_] == '\n' ||
           text_.substr(at_).starts_with("\r\n");
  }
  bool at_cell_end() const { return at_line_end() || text_[at_] == ','; }
  void skip_blanks() {
    while (!at_end() && blank(text_[at_])) ++at_;
  }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  // To the first line with something on it; false at the end of the text.
  bool next_line() {
    while (!at_end()) {
      skip_blanks();
      if (!at_end() && text_[at_] == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      }
      if (!at_line_end()) return true;
      take_line_end();
    }
    return false;
  }
  void take_line_end() {
    take("\r");  // editors of Windows and Python's csv module end lines so
    take("\n");
  }

  absl::Status error(std::string_view wanted) const {
    const size_t end = std::min(text_.find_first_of(" \t\r\n,", at_ + 1),
                                std::min(text_.size(), at_ + 20));
    const std::string found(text_.substr(at_, end - at_));
    return wrong(absl::StrCat(
        "expected ", std::string(wanted),
        at_line_end() ? std::string(" before the end of the line")
                      : absl::StrCat(", not '", absl::CEscape(found), "'")));
  }
  absl::Status wrong(const std::string& what) const {
    return absl::InvalidArgumentError(text_position(text_, at_, name_) + what);
  }

  // Blanks, then exactly these characters, then a blank or the line's end.
  absl::Status word(std::string_view wanted) {
    skip_blanks();
    if (!take(wanted)) {
      return error(absl::StrCat("'", std::string(wanted), "'"));
    }
    return end_of_word();
  }
  absl::Status end_of_word() {
    if (at_line_end() || blank(text_[at_])) return absl::OkStatus();
    return error("a blank");
  }
  // Digits without leading zeros; `last` is the largest that is taken.
  absl::StatusOr<int> digits(int last) {
    size_t end = at_;
    while (end < text_.size() && text_[end] >= '0' && text_[end] <= '9') ++end;
    const std::string_view found = text_.substr(at_, end - at_);
    int value = 0;
    for (const char c : found.substr(0, 7)) value = 10 * value + (c - '0');
    if (found.empty()) return error("a number");
    if (found.size() > 7 || value > last) {
      return error(absl::StrCat("a number up to ", last));
    }
    if (found[0] == '0' && found.size() > 1) {
      return error("a number without leading zeros");
    }
    at_ = end;
    return value;
  }
  absl::StatusOr<int> number(int first, int last) {
    skip_blanks();
    const size_t begin = at_;
    ASSIGN_OR_RETURN(const int value, digits(last));
    RETURN_IF_ERROR(end_of_word());
    if (value >= first) return value;
    at_ = begin;
    return error(absl::StrCat("a number from ", first));
  }
  absl::StatusOr<std::string> name() {
    skip_blanks();
    const size_t begin = at_;
    while (!at_line_end() && !blank(text_[at_])) ++at_;
    const std::string_view found = text_.substr(begin, at_ - begin);
    const auto plain = [](unsigned char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
             (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
    };
    if (!found.empty() && std::all_of(found.begin(), found.end(), plain)) {
      return std::string(found);
    }
    at_ = begin;
    return error("a name of letters, digits and _ . -");
  }

  absl::StatusOr<Pass> pass(std::string_view kinds) {
    Pass pass;
    ASSIGN_OR_RETURN(pass.stage, digits(kMaxCount - 1));
    const size_t kind = at_line_end()
                            ? std::string_view::npos
                            : std::string_view("FIWB").find(text_[at_]);
    if (kind == std::string_view::npos ||
        kinds.find(text_[at_]) == std::string_view::npos) {
      return error(absl::StrCat("one of ", std::string(kinds)));
    }
    pass.kind = static_cast<PassKind>(kind);
    ++at_;
    ASSIGN_OR_RETURN(pass.micro_batch, digits(kMaxCount - 1));
    if (pass.is_forward()) {
      pass.recompute = take("r");
      pass.offload = take("o");
    }
    return pass;
  }
  absl::StatusOr<Action> action(std::string_view open, std::string_view close) {
    if (!take(open)) {
      ASSIGN_OR_RETURN(const Pass single, pass("FIWB"));
      return Action(single);
    }
    ASSIGN_OR_RETURN(const Pass first, pass("F"));
    if (!take(";")) return error("';'");
    ASSIGN_OR_RETURN(const Pass second, pass("B"));
    if (!take(close)) {
      return error(absl::StrCat("'", std::string(close), "'"));
    }
    return Action(first, second);
  }

 private:
  std::string_view text_, name_;
  size_t at_ = 0;
};

absl::StatusOr<Schedule> read_header(Reader& in) {
  Schedule s;
  for (const char* word : {"schedule", "v1", "ranks"}) {
    RETURN_IF_ERROR(in.word(word));
  }
  ASSIGN_OR_RETURN(const int ranks, in.number(1, kMaxCount));
  RETURN_IF_ERROR(in.word("stages"));
  ASSIGN_OR_RETURN(const int stages, in.number(1, kMaxCount));
  RETURN_IF_ERROR(in.word("micro_batches"));
  ASSIGN_OR_RETURN(s.micro_batches, in.number(1, kMaxCount));
  RETURN_IF_ERROR(in.word("placement"));
  for (int i = 0; i < stages; ++i) {
    ASSIGN_OR_RETURN(const int rank, in.number(0, ranks - 1));
    s.placement.push_back(rank);
  }
  in.skip_blanks();
  if (!in.at_line_end()) return in.error("the end of the line");
  s.ranks.resize(ranks);
  return s;
}

absl::Status read_group(Reader& in, Schedule& s) {
  ReplicaGroup group;
  ASSIGN_OR_RETURN(group.name, in.name());
  for (in.skip_blanks(); !in.at_line_end(); in.skip_blanks()) {
    ASSIGN_OR_RETURN(const int stage, in.number(0, s.stages() - 1));
    const auto at =
        std::lower_bound(group.stages.begin(), group.stages.end(), stage);
    if (at != group.stages.end() && *at == stage) {
      return in.wrong(absl::StrCat("stage ", stage, " is there twice"));
    }
    group.stages.insert(at, stage);
  }
  if (group.stages.size() < 2) return in.error("two stages or more");
  s.groups.push_back(std::move(group));
  return absl::OkStatus();
}

absl::Status read_rank(Reader& in, int rank, std::vector<Action>& actions) {
  RETURN_IF_ERROR(in.word("rank"));
  RETURN_IF_ERROR(in.word(absl::StrCat(rank, ":")));
  for (in.skip_blanks(); !in.at_line_end(); in.skip_blanks()) {
    ASSIGN_OR_RETURN(const Action action, in.action("OV(", ")"));
    RETURN_IF_ERROR(in.end_of_word());
    actions.push_back(action);
  }
  return absl::OkStatus();
}

// Counts and placement as the actions imply them; the stage that no action
// mentions, or -1.
int infer_header(Schedule& s) {
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    for (const Action& action : s.ranks[r]) {
      for (const Pass& pass : action.passes()) {
        const auto stage = static_cast<size_t>(pass.stage);
        if (stage >= s.placement.size()) s.placement.resize(stage + 1, -1);
        if (s.placement[stage] < 0) s.placement[stage] = static_cast<int>(r);
        s.micro_batches = std::max(s.micro_batches, pass.micro_batch + 1);
      }
    }
  }
  const auto absent = std::find(s.placement.begin(), s.placement.end(), -1);
  return absent == s.placement.end()
             ? -1
             : static_cast<int>(absent - s.placement.begin());
}

}  // namespace

std::string schedule_text(const Schedule& s) {
  std::string out =
      absl::StrCat("schedule v1 ranks ", s.ranks.size(), " stages ", s.stages(),
                   " micro_batches ", s.micro_batches, " placement ",
                   absl::StrJoin(s.placement, " "), "\n");
  for (const ReplicaGroup& group : s.groups) {
    absl::StrAppend(&out, "group ", group.name);
    for (const int stage : group.stages) absl::StrAppend(&out, " ", stage);
    out += '\n';
  }
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    absl::StrAppend(&out, "rank ", r, ":");
    for (const Action& a : s.ranks[r]) absl::StrAppend(&out, " ", to_string(a));
    out += '\n';
  }
  return out;
}

std::string schedule_csv(const Schedule& s) {
  std::string out;
  for (const std::vector<Action>& actions : s.ranks) {
    const char* comma = "";
    for (const Action& action : actions) {
      std::string cell = to_string(action);
      if (action.overlapped()) cell = cell.substr(2) + "OVERLAP_F_B";
      absl::StrAppend(&out, comma, cell);
      comma = ",";
    }
    out += '\n';
  }
  return out;
}

absl::StatusOr<Schedule> parse_schedule(std::string_view text,
                                        std::string_view name) {
  Reader in(text, name);
  if (!in.next_line()) return in.error("'schedule'");
  ASSIGN_OR_RETURN(Schedule s, read_header(in));
  size_t rank = 0;
  while (in.next_line()) {
    if (rank == 0 && in.take("group")) {
      RETURN_IF_ERROR(in.end_of_word());
      RETURN_IF_ERROR(read_group(in, s));
    } else if (rank < s.ranks.size()) {
      RETURN_IF_ERROR(read_rank(in, static_cast<int>(rank), s.ranks[rank]));
      ++rank;
    } else {
      return in.error("the end of the file");
    }
  }
  if (rank == s.ranks.size()) return s;
  return in.wrong(absl::StrCat("there is no line 'rank ", rank, ":'"));
}

absl::StatusOr<Schedule> parse_schedule_csv(std::string_view text,
                                            std::string_view name) {
  Reader in(text, name);
  Schedule s;
  while (!in.at_end()) {
    std::vector<Action>& actions = s.ranks.emplace_back();
    do {
      if (in.at_cell_end()) continue;
      ASSIGN_OR_RETURN(const Action action, in.action("(", ")OVERLAP_F_B"));
      actions.push_back(action);
      if (!in.at_cell_end()) return in.error("',' or the end of the line");
    } while (in.take(","));
    if (actions.empty()) return in.error("an action in each row");
    in.take_line_end();
  }
  if (s.ranks.size() > kMaxCount) return in.wrong("too many rows");
  const int absent = infer_header(s);
  if (s.placement.empty()) return in.wrong("there are no actions");
  if (absent < 0) return s;
  return in.wrong(absl::StrCat("stage ", absent, " is in no row"));
}

absl::StatusOr<Schedule> parse_any_schedule(std::string_view text,
                                            std::string_view name) {
  Reader in(text, name);
  if (in.next_line() && in.take("schedule")) return parse_schedule(text, name);
  return parse_schedule_csv(text, name);
}

absl::StatusOr<Schedule> read_schedule(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(path));
  return parse_any_schedule(text, path);
}

}  // namespace tapeline
