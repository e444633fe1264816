// Text for byte-level language models: one token is one byte.
//
// A corpus is a row of documents. Each begins with a newline that belongs to no
// document's text: it is the context from which the first byte is predicted, so
// every byte of the text has a prediction and none needs a token beyond 0..255.
//
// Where text comes from (data.train, data.val):
//   "king_james:train", ":val", ":test"   the King James Bible, a document per
//                                         chapter, references stripped, a verse
//                                         a line; a chapter's split is chosen
//                                         by the hash of its reference
//                                         (90 : 5 : 5)
//   anything else                         path of a text file: one document
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tapeline {

// Bytes [begin, end) of Corpus::text; text[begin] is the leading newline.
struct Document {
  std::string name;  // "Ge1", or the file's path
  int64_t begin = 0, end = 0;

  int64_t bytes() const { return end - begin - 1; }  // of its own text
};

struct Corpus {
  std::string text;
  std::vector<Document> documents;  // in order, without gaps

  int64_t tokens() const { return static_cast<int64_t>(text.size()); }
  int64_t bytes() const;  // of the documents' own text
  // Index of the document that holds the token.
  size_t document_at(int64_t token) const;
};

enum class Split { kTrain, kVal, kTest };
Split split_of(std::string_view chapter);

// `raw` is what `bible -f` prints: a verse a line, "Ge1:1 In the beginning".
absl::StatusOr<Corpus> king_james(std::string_view raw, Split split);

// `spec` as above.
absl::StatusOr<Corpus> load_corpus(const std::string& spec);

// The file of the raw text: $TAPELINE_DATA/king_james_raw.txt, or where Bazel
// puts it for this binary.
absl::StatusOr<std::string> king_james_path();

}  // namespace tapeline
