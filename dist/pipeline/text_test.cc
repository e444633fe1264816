#include "dist/pipeline/text.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/validator.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr char kText[] =
    "schedule v1 ranks 2 stages 4 micro_batches 2 placement 0 1 1 0\n"
    "group tied 0 3\n"
    "rank 0: 0F0r 0F1ro 3F0o 3I0 3W0 OV(3F1;0B0) 3B1 0B1\n"
    "rank 1: 1F0 2F0\n";

TEST(Text, ReadsAndPrintsTheSameBytes) {
  const Schedule s = parse_schedule(kText, "t").value();
  EXPECT_EQ(s.micro_batches, 2);
  EXPECT_EQ(s.placement, (std::vector<int>{0, 1, 1, 0}));
  ASSERT_EQ(s.groups.size(), 1u);
  EXPECT_EQ(s.groups[0].name, "tied");
  EXPECT_EQ(s.groups[0].stages, (std::vector<int>{0, 3}));
  ASSERT_EQ(s.ranks[0].size(), 8u);
  const Pass& recomputed = s.ranks[0][1].passes()[0];
  EXPECT_TRUE(recomputed.recompute && recomputed.offload);
  EXPECT_EQ(recomputed.micro_batch, 1);
  EXPECT_TRUE(s.ranks[0][5].overlapped());
  EXPECT_EQ(s.ranks[0][5].passes()[1], pass(PassKind::kBackward, 0, 0));
  EXPECT_EQ(schedule_text(s), kText);
}

TEST(Text, CommentsAndBlanksAreSkipped) {
  std::string spaced = absl::StrCat("# made by hand\n\n \t", kText, "  # end");
  const size_t rank = spaced.find("rank 0");
  spaced.insert(rank, "\t# a comment\n\n  ");
  spaced.insert(spaced.find(" 3F0o"), " \t");
  EXPECT_EQ(schedule_text(parse_schedule(spaced, "t").value()), kText);
}

TEST(Text, EveryGeneratedScheduleRoundTrips) {
  for (const std::string& name : schedule_names()) {
    for (const int m : {1, 6, 13}) {
      const auto made = make_schedule(
          name,
          {.ranks = 3, .chunks = default_chunks(name), .micro_batches = m});
      if (!made.ok()) continue;
      const std::string text = schedule_text(*made);
      EXPECT_EQ(parse_any_schedule(text, "t").value(), *made) << name;
      const std::string csv = schedule_csv(*made);
      EXPECT_EQ(parse_any_schedule(csv, "t").value(), *made) << csv;
    }
  }
}

struct BadText {
  const char* name;
  std::string text;
  const char* error;
};
class Refused : public testing::TestWithParam<BadText> {};

std::string head_of_3() {
  return "schedule v1 ranks 1 stages 3 micro_batches 1 placement 0 0 0\n";
}
const std::string& head() {
  static const std::string& head = *new std::string(
      "schedule v1 ranks 1 stages 1 micro_batches 1 placement 0\n");
  return head;
}

INSTANTIATE_TEST_SUITE_P(
    , Refused,
    testing::Values(
        BadText{"Empty", "", "t:1:1: expected 'schedule' before the end"},
        BadText{"OtherVersion", "schedule v2", "t:1:10: expected 'v1', not"},
        BadText{"NoRanks", "schedule v1 ranks 0", "t:1:19: expected a number"},
        BadText{"HugeCount", "schedule v1 ranks 99999999999999999999",
                "expected a number up to 65536"},
        BadText{"ShortPlacement",
                "schedule v1 ranks 2 stages 2 micro_batches 1 placement 0\n",
                "t:1:57: expected a number before the end of the line"},
        BadText{"LongPlacement",
                "schedule v1 ranks 1 stages 1 micro_batches 1 placement 0 0\n",
                "t:1:58: expected the end of the line"},
        BadText{"PlacedOnNoRank",
                "schedule v1 ranks 1 stages 1 micro_batches 1 placement 1\n",
                "expected a number up to 0, not '1'"},
        BadText{"NoRankLine", head(), "t:2:1: there is no line 'rank 0:'"},
        BadText{"RankTwice", head() + "rank 0: 0F0 0B0\nrank 0: 0F0",
                "t:3:1: expected the end of the file"},
        BadText{"OtherRank", head() + "rank 1: 0F0", "t:2:6: expected '0:'"},
        // torch's parser matches a prefix and takes what follows.
        BadText{"TrailingJunk", head() + "rank 0: 0F0x",
                "t:2:12: expected a blank, not 'x'"},
        BadText{"TwoInOneWord", head() + "rank 0: 0F00B0", "t:2:11: "},
        BadText{"UnknownKind", head() + "rank 0: 0X0",
                "t:2:10: expected one of FIWB, not 'X0'"},
        BadText{"Unfinished", head() + "rank 0: 0F",
                "t:2:11: expected a number before the end"},
        BadText{"LeadingZero", head() + "rank 0: 00F0",
                "expected a number without leading zeros"},
        BadText{"Sign", head() + "rank 0: -1F0", "expected a number"},
        BadText{"RecomputedBackward", head() + "rank 0: 0F0 0B0r",
                "t:2:16: expected a blank, not 'r'"},
        BadText{"FlagsInOtherOrder", head() + "rank 0: 0F0or",
                "expected a blank, not 'r'"},
        BadText{"OverlapOfTwoForwards", head() + "rank 0: OV(0F0;0F1)",
                "t:2:17: expected one of B, not 'F1)'"},
        BadText{"OpenOverlap", head() + "rank 0: OV(0F0;0B0",
                "expected ')' before the end of the line"},
        BadText{"OverlapOfOne", head() + "rank 0: OV(0F0)", "expected ';'"},
        BadText{"Communication", head() + "rank 0: 0SEND_F0",
                "t:2:10: expected one of FIWB, not 'SEND_F0'"},
        BadText{"GroupOfNoStage", head() + "group tied 1\nrank 0:",
                "t:2:12: expected a number up to 0"},
        BadText{"GroupAfterRanks", head() + "rank 0:\ngroup tied 0",
                "t:3:1: expected the end of the file"},
        BadText{"NulByte", head() + std::string("rank 0: 0F0\0", 12),
                "t:2:12: expected a blank, not '\\000'"},
        BadText{"CarriageReturn", head() + "rank 0: 0F0\r 0B0",
                "t:2:12: expected a blank, not '\\r'"},
        BadText{"GroupOfOne", head_of_3() + "group tied 2\n",
                "t:2:13: expected two stages or more before the end"},
        BadText{"GroupWithoutStages", head_of_3() + "group tied\n",
                "t:2:11: expected two stages or more before the end"},
        BadText{"GroupWithAStageTwice", head_of_3() + "group tied 2 0 2\n",
                "t:2:17: stage 2 is there twice"}),
    [](const auto& info) { return info.param.name; });

TEST_P(Refused, WithLineColumnAndWhat) {
  const auto s = parse_schedule(GetParam().text, "t");
  ASSERT_FALSE(s.ok());
  const std::string message(s.status().message());
  EXPECT_NE(message.find(GetParam().error), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(Text, GroupsAreSetsOfStages) {
  const auto s =
      parse_schedule(head_of_3() + "group tied 2 0 1\nrank 0: 0F0\n", "t");
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(s->groups[0].stages, (std::vector<int>{0, 1, 2}));
}

// As editors of Windows save it.
TEST(Text, LinesMayEndWithCarriageReturns) {
  std::string text =
      "# made by hand\n\n" + head_of_3() + "group tied 0 2\nrank 0: 0F0r 0B0\n";
  const auto want = parse_schedule(text, "t");
  ASSERT_TRUE(want.ok()) << want.status();
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos;
       at += 2) {
    text.insert(at, "\r");
  }
  const auto s = parse_any_schedule(text, "t");
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(*s, *want);
}

// As torch writes it: one row a rank, empty cells, \r\n.
TEST(Csv, ReadsTorchsComputeOnlyForm) {
  const Schedule s = parse_any_schedule(
                         "0F0,0F1,,,0I0,(0F2;0B1)OVERLAP_F_B,,0W0,0B2\r\n"
                         ",1F0,1B0,1F1,1B1,1F2,1B2\r\n",
                         "t")
                         .value();
  EXPECT_EQ(s.micro_batches, 3);
  EXPECT_EQ(s.placement, (std::vector<int>{0, 1}));
  EXPECT_EQ(to_string(s.ranks[0][3]), "OV(0F2;0B1)");
  EXPECT_EQ(s.ranks[1].size(), 6u);
  EXPECT_FALSE(validate(s, {.ov_release = OvRelease::kEarly}));
}

TEST(Csv, RefusesWhatItDoesNotKnow) {
  for (const auto& [text, error] :
       std::vector<std::pair<std::string, std::string>>{
           {"", "there are no actions"},
           {"0F0,0SEND_F0", "t:1:6: expected one of FIWB"},
           {"0F1B0", "t:1:4: expected ',' or the end of the line"},
           {"0F0\n\n", "t:2:1: expected an action in each row"},
           {"0F0,2F0", "stage 1 is in no row"},
           {"(0F0;0B1)", "expected ')OVERLAP_F_B'"},
           {"\"0F0\"", "t:1:1: expected a number"}}) {
    const auto s = parse_schedule_csv(text, "t");
    ASSERT_FALSE(s.ok()) << text;
    EXPECT_NE(std::string(s.status().message()).find(error), std::string::npos)
        << s.status();
  }
}

}  // namespace
}  // namespace tapeline
