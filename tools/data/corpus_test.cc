#include "tools/data/corpus.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "gtest/gtest.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

TEST(KingJames, StripsReferencesAndCutsAtChapters) {
  // Both chapters are in the training split (asserted below).
  const std::string raw =
      "Ge1:1 In the beginning.\n"
      "Ge1:2 And the earth: was.\n"
      "1Chr1:1 Adam, Sheth, \n"
      "Ge1:1 Again.\n";
  ASSERT_EQ(split_of("Ge1"), Split::kTrain);
  ASSERT_EQ(split_of("1Chr1"), Split::kTrain);
  const auto corpus = king_james(raw, Split::kTrain);
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->text,
            "\nIn the beginning.\nAnd the earth: was.\n"
            "\nAdam, Sheth,\n"
            "\nAgain.\n");
  ASSERT_EQ(corpus->documents.size(), 3u);
  EXPECT_EQ(corpus->documents[0].name, "Ge1");
  EXPECT_EQ(corpus->documents[1].name, "1Chr1");
  EXPECT_EQ(corpus->documents[1].begin, corpus->documents[0].end);
  EXPECT_EQ(corpus->documents[2].end, corpus->tokens());
  EXPECT_EQ(corpus->bytes(), corpus->tokens() - 3);
  EXPECT_EQ(king_james(raw, Split::kVal)->text, "");
}

TEST(KingJames, RefusesLinesWithoutReference) {
  for (const char* raw : {"Ge1:1 a\nno reference here: b\n", "Ge1:1\n", "\n",
                          ":1 a\n", "Ge1 1 a\n"}) {
    EXPECT_FALSE(king_james(raw, Split::kTrain).ok()) << raw;
  }
  EXPECT_EQ(
      std::string(king_james("Ge1:1 a\nx\n", Split::kTrain).status().message()),
      "King James text, line 2: expected a reference like 'Ge1:1 ' in "
      "front");
}

TEST(KingJames, SplitsTheWholeTextByChapter) {
  std::map<std::string, std::string> chapters;
  size_t verses = 0;
  std::vector<int64_t> bytes;
  for (const char* name : {"train", "val", "test"}) {
    const auto corpus = load_corpus(std::string("king_james:") + name);
    ASSERT_TRUE(corpus.ok()) << corpus.status();
    bytes.push_back(corpus->bytes());
    for (const Document& document : corpus->documents) {
      const std::string text(corpus->text,
                             static_cast<size_t>(document.begin) + 1,
                             static_cast<size_t>(document.bytes()));
      EXPECT_TRUE(chapters.emplace(document.name, text).second)
          << document.name << " is in two splits";
      verses += std::count(text.begin(), text.end(), '\n');
      EXPECT_TRUE(text.ends_with('\n'));
      // Lines hold no reference and no trailing blank.
      EXPECT_EQ(text.find(" \n"), std::string::npos) << document.name;
      EXPECT_FALSE(std::any_of(text.begin(), text.end(), [](unsigned char c) {
        return std::isdigit(c) || c >= 0x80;
      })) << document.name;
    }
  }
  EXPECT_EQ(chapters.size(), 1189u);
  EXPECT_EQ(verses, 31102u);
  EXPECT_TRUE(chapters["Ge1"].starts_with(
      "In the beginning God created the heaven and the earth.\n"));
  EXPECT_TRUE(chapters["Rev22"].ends_with(
      "The grace of our Lord Jesus Christ be with you all. Amen.\n"));
  const double total = static_cast<double>(bytes[0] + bytes[1] + bytes[2]);
  EXPECT_NEAR(bytes[0] / total, 0.90, 0.02);
  EXPECT_NEAR(bytes[1] / total, 0.05, 0.02);
  EXPECT_NEAR(bytes[2] / total, 0.05, 0.02);
}

TEST(LoadCorpus, ReadsATextFileAsOneDocument) {
  const std::string path = testing::TempDir() + "text.txt";
  ASSERT_TRUE(write_file_atomic(path, "ab\ncd").ok());
  const auto corpus = load_corpus(path);
  ASSERT_TRUE(corpus.ok());
  EXPECT_EQ(corpus->text, "\nab\ncd");
  ASSERT_EQ(corpus->documents.size(), 1u);
  EXPECT_EQ(corpus->documents[0].name, path);
  EXPECT_EQ(corpus->bytes(), 5);
}

TEST(LoadCorpus, SaysWhatIsWrong) {
  EXPECT_EQ(load_corpus("none.txt").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(load_corpus("king_james:dev").status().message()),
            "king_james:dev: no such split; use king_james:train, :val or "
            ":test");
  const std::string path = testing::TempDir() + "empty.txt";
  ASSERT_TRUE(write_file_atomic(path, "").ok());
  EXPECT_FALSE(load_corpus(path).ok());
}

TEST(Corpus, FindsTheDocumentOfAToken) {
  Corpus corpus;
  corpus.text = "\nab\nc\n";
  corpus.documents = {{"x", 0, 3}, {"y", 3, 5}, {"z", 5, 6}};
  const std::vector<size_t> expected = {0, 0, 0, 1, 1, 2};
  for (int64_t t = 0; t < 6; ++t) {
    EXPECT_EQ(corpus.document_at(t), expected[t]) << t;
  }
}

}  // namespace
}  // namespace tapeline
