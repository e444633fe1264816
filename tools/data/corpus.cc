#include "tools/data/corpus.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr char kRawFile[] = "king_james_raw.txt";
constexpr std::string_view kPrefix = "king_james:";
// Ids and offsets are int64, but a file this long is a mistake in a path.
constexpr uint64_t kMaxBytes = uint64_t{1} << 34;

std::string_view trimmed(std::string_view line) {
  while (line.ends_with(' ') || line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

class Builder {
 public:
  void begin(std::string name) {
    end();
    const int64_t at = corpus_.tokens();
    corpus_.documents.push_back({std::move(name), at, at});
    corpus_.text += '\n';
  }
  void add(std::string_view text) { corpus_.text += text; }
  void end() {
    if (corpus_.documents.empty()) return;
    corpus_.documents.back().end = corpus_.tokens();
  }
  Corpus take() {
    end();
    return std::move(corpus_);
  }

 private:
  Corpus corpus_;
};

absl::StatusOr<Split> parse_split(std::string_view name,
                                  const std::string& spec) {
  if (name == "train") return Split::kTrain;
  if (name == "val") return Split::kVal;
  if (name == "test") return Split::kTest;
  return absl::InvalidArgumentError(
      spec + ": no such split; use king_james:train, :val or :test");
}

std::string executable_path() {
  char path[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "";
}

}  // namespace

int64_t Corpus::bytes() const {
  int64_t sum = 0;
  for (const Document& document : documents) sum += document.bytes();
  return sum;
}

size_t Corpus::document_at(int64_t token) const {
  const auto after = std::upper_bound(
      documents.begin(), documents.end(), token,
      [](int64_t t, const Document& document) { return t < document.begin; });
  return static_cast<size_t>(after - documents.begin()) - 1;
}

Split split_of(std::string_view chapter) {
  const uint64_t part = hash_bytes(chapter.data(), chapter.size()).low % 100;
  return part < 5 ? Split::kVal : part < 10 ? Split::kTest : Split::kTrain;
}

absl::StatusOr<Corpus> king_james(std::string_view raw, Split split) {
  Builder builder;
  std::string_view chapter;
  int64_t number = 0;
  while (!raw.empty()) {
    const size_t length = std::min(raw.find('\n'), raw.size());
    const std::string_view line = raw.substr(0, length);
    raw.remove_prefix(std::min(length + 1, raw.size()));
    ++number;
    const size_t space = line.find(' ');
    const size_t colon = line.find(':');
    if (space == std::string_view::npos || colon > space || colon == 0) {
      return absl::InvalidArgumentError(
          "King James text, line " + std::to_string(number) +
          ": expected a reference like 'Ge1:1 ' in front");
    }
    const bool next = line.substr(0, colon) != chapter;
    if (next) chapter = line.substr(0, colon);
    if (split_of(chapter) != split) continue;
    if (next) builder.begin(std::string(chapter));
    builder.add(trimmed(line.substr(space + 1)));
    builder.add("\n");
  }
  return builder.take();
}

absl::StatusOr<std::string> king_james_path() {
  std::vector<std::string> folders;
  const auto add = [&](const char* variable, const char* below) {
    const char* value = std::getenv(variable);
    if (value != nullptr) folders.push_back(std::string(value) + below);
  };
  add("TAPELINE_DATA", "");
  add("RUNFILES_DIR", "/king_james");
  add("TEST_SRCDIR", "/king_james");
  folders.push_back(executable_path() + ".runfiles/king_james");
  folders.push_back("../king_james");  // `bazel run` starts beside it
  folders.push_back("external/king_james");
  for (const std::string& folder : folders) {
    const std::string path = join_path(folder, kRawFile);
    if (path_exists(path)) return path;
  }
  return absl::NotFoundError(
      std::string("the King James text is not beside this program; run it "
                  "through Bazel, or put the output of `bible -f "
                  "gen1:1-rev22:21` into $TAPELINE_DATA/") +
      kRawFile);
}

absl::StatusOr<Corpus> load_corpus(const std::string& spec) {
  if (spec.starts_with(kPrefix)) {
    ASSIGN_OR_RETURN(const Split split,
                     parse_split(spec.substr(kPrefix.size()), spec));
    ASSIGN_OR_RETURN(const std::string path, king_james_path());
    ASSIGN_OR_RETURN(const std::string raw, read_file(path, kMaxBytes));
    return king_james(raw, split);
  }
  ASSIGN_OR_RETURN(const std::string text, read_file(spec, kMaxBytes));
  if (text.empty()) return absl::InvalidArgumentError(spec + ": is empty");
  Builder builder;
  builder.begin(spec);
  builder.add(text);
  return builder.take();
}

}  // namespace tapeline
