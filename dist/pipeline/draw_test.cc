#include "dist/pipeline/draw.h"

#include <algorithm>
#include <string>

#include "dist/pipeline/generators.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

Schedule make(std::string_view name, int p, int v, int m) {
  return make_schedule(name, {.ranks = p, .chunks = v, .micro_batches = m})
      .value();
}

TEST(Ascii, ShowsEachActionInItsTime) {
  const Schedule s = make("1f1b", 2, 1, 2);
  EXPECT_EQ(ascii_timeline(s, simulate(s, {}).value()),
            "rank 0 |0F0 0F1 ........0B0     ....0B1     \n"
            "rank 1 |....1F0 1B0     1F1 1B1     ........\n");
}

TEST(Ascii, ShowsKindsWhereNamesDoNotFit) {
  const Schedule s = make("zbv", 2, 2, 4);
  EXPECT_EQ(ascii_timeline(s, simulate(s, {}).value(), 25),
            "rank 0 |FFFFIWFIWFIWFIWIWFIWIWIW.\n"
            "rank 1 |.FFFFIWFIWFIWFIWFIWIIIWWW\n");
  const Schedule dual = make("dualpipev", 2, 2, 4);
  EXPECT_NE(ascii_timeline(dual, simulate(dual, {}).value(), 26).find("OOO"),
            std::string::npos);
}

TEST(Ascii, KeepsItsWidthForAnyCosts) {
  const Schedule s = make("interleaved", 12, 2, 24);
  for (const StageCosts& c :
       {StageCosts{}, StageCosts{0, 0, 0}, StageCosts{1e-9, 1e9, 0},
        StageCosts{1e300, 1e300, 1}}) {
    const std::string text =
        ascii_timeline(s, simulate(s, {.stages = {c}}).value(), 60);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 12);
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      EXPECT_LE(end - at, 60u + 9) << text;
      at = end + 1;
    }
  }
}

TEST(Svg, HasABoxForEachActionAndNoneOutside) {
  const Schedule s = make("dualpipev", 2, 2, 4);
  const std::string svg = svg_timeline(s, simulate(s, {}).value());
  EXPECT_TRUE(svg.starts_with("<svg xmlns="));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  size_t boxes = 0;
  for (size_t at = svg.find("<rect"); at != std::string::npos;
       at = svg.find("<rect", at + 1)) {
    ++boxes;
  }
  EXPECT_EQ(boxes, s.ranks[0].size() + s.ranks[1].size());
  EXPECT_NE(svg.find("<title>OV(0F3;3B1) 7 to 10</title>"), std::string::npos)
      << svg;
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace tapeline
