#include "autograd/sequence.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Ints = std::vector<int32_t>;

TEST(Sequence, PackedTokensSeeTheirOwnSequenceUpToThemselves) {
  const Sequence s = Sequence::packed({0, 3, 4, 6});
  EXPECT_EQ(s.tokens(), 6);
  EXPECT_EQ(s.begin_T.to_vector<int32_t>(), (Ints{0, 0, 0, 3, 4, 4}));
  EXPECT_EQ(s.end_T.to_vector<int32_t>(), (Ints{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(s.position_T.to_vector<int32_t>(), (Ints{0, 1, 2, 0, 0, 1}));
}

TEST(Sequence, OneTokenSeesItself) {
  const Sequence s = Sequence::packed({0, 1});
  EXPECT_EQ(s.begin_T.to_vector<int32_t>(), (Ints{0}));
  EXPECT_EQ(s.end_T.to_vector<int32_t>(), (Ints{1}));
  EXPECT_EQ(s.position_T.to_vector<int32_t>(), (Ints{0}));
}

TEST(Sequence, EmptySequencesHaveNoTokens) {
  EXPECT_EQ(Sequence::packed({0}).tokens(), 0);
  const Sequence s = Sequence::packed({0, 0, 2, 2});
  EXPECT_EQ(s.begin_T.to_vector<int32_t>(), (Ints{0, 0}));
  EXPECT_EQ(s.end_T.to_vector<int32_t>(), (Ints{1, 2}));
  EXPECT_EQ(s.position_T.to_vector<int32_t>(), (Ints{0, 1}));
}

TEST(Sequence, AppendedTokensSeeTheCacheAndThemselves) {
  const Sequence s = Sequence::appended(5, 3);
  EXPECT_EQ(s.tokens(), 3);
  EXPECT_EQ(s.begin_T.to_vector<int32_t>(), (Ints{0, 0, 0}));
  EXPECT_EQ(s.end_T.to_vector<int32_t>(), (Ints{6, 7, 8}));
  EXPECT_EQ(s.position_T.to_vector<int32_t>(), (Ints{5, 6, 7}));
}

TEST(Sequence, AppendingToNothingIsOneSequence) {
  const Sequence appended = Sequence::appended(0, 4);
  const Sequence packed = Sequence::packed({0, 4});
  EXPECT_EQ(appended.begin_T.to_vector<int32_t>(),
            packed.begin_T.to_vector<int32_t>());
  EXPECT_EQ(appended.end_T.to_vector<int32_t>(),
            packed.end_T.to_vector<int32_t>());
  EXPECT_EQ(appended.position_T.to_vector<int32_t>(),
            packed.position_T.to_vector<int32_t>());
}

TEST(Sequence, IsATreeOfThreeIntegerTensors) {
  Sequence s = Sequence::packed({0, 2});
  std::string paths;
  visit(s, [&](const std::string& path, const Tensor& leaf) {
    paths += path + ";";
    EXPECT_EQ(leaf.dtype(), DType::kI32);
  });
  EXPECT_EQ(paths, "begin_T;end_T;position_T;");
}

TEST(SequenceDeathTest, RefusesBoundsThatAreNone) {
  EXPECT_DEATH(Sequence::packed({}), "\\[sequence\\] cu_seqlens starts with 0");
  EXPECT_DEATH(Sequence::packed({1, 2}), "starts with 0");
  EXPECT_DEATH(Sequence::packed({0, 3, 2}), "cu_seqlens decreases");
  EXPECT_DEATH(Sequence::appended(-1, 2), "\\[sequence\\].*-1");
  EXPECT_DEATH(Sequence::appended(0, -1), "\\[sequence\\].*-1");
}

}  // namespace
}  // namespace tapeline
