#include "dist/pipeline/layout.h"

#include <string>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(Layout, ReadsRepetitionsGroupsAndCommas) {
  const Layout layout = parse_layout("Et*3|(tt|)*29,m|L", "l").value();
  ASSERT_EQ(layout.size(), 32u);
  EXPECT_EQ(layout[0], (StageParts{.embedding = true, .layers = 3}));
  EXPECT_EQ(layout[1], (StageParts{.first_layer = 3, .layers = 2}));
  EXPECT_EQ(layout[29], (StageParts{.first_layer = 59, .layers = 2}));
  EXPECT_EQ(layout[30], (StageParts{.first_layer = 61, .depths = 1}));
  EXPECT_EQ(layout[31],
            (StageParts{.head = true, .first_layer = 61, .first_depth = 1}));
  EXPECT_EQ(parse_layout(layout_text(layout), "l").value(), layout);
}

TEST(Layout, StagesMayBeEmpty) {
  const Layout layout = parse_layout("E||t*2|(|)*2 m,mL", "l").value();
  ASSERT_EQ(layout.size(), 6u);
  EXPECT_EQ(layout[1].layers, 0);
  EXPECT_EQ(layout[2].layers, 2);
  EXPECT_EQ(layout[5],
            (StageParts{.head = true, .first_layer = 2, .depths = 2}));
}

TEST(Layout, DepthsOfASharedLayerAreNeverSplit) {
  const auto split = parse_layout("Et|m|mL", "--layout");
  ASSERT_FALSE(split.ok());
  EXPECT_EQ(split.status().message(),
            "--layout: the depths m share one layer; put them on one stage");
  EXPECT_TRUE(parse_layout("Et|mm|L", "l").ok());
  EXPECT_TRUE(
      parse_layout("Et|m|mL", "l", {.depths_share_a_layer = false}).ok());
}

TEST(Layout, RefusesWhatIsNoModel) {
  const LayoutRules rules{.layers = 2, .depths = 0};
  for (const auto& [text, error] :
       std::vector<std::pair<std::string, std::string>>{
           {"", "has no L"},
           {"tt|L", "does not begin with E"},
           {"Ett", "has no L"},
           {"EtEtL", "'E' after 't'"},
           {"EEttL", "'E' after 'E'"},
           {"EttLL", "'L' after 'L'"},
           {"EtLt", "'t' after 'L'"},
           {"EtmtL", "'t' after 'm'"},
           {"EtL", "has 1 layers t; the model has 2"},
           {"EttmL", "has 1 depths m; the model has 0"},
           {"Et*L", "l:1:4: expected a number from 1"},
           {"Et*0L", "expected a number from 1"},
           {"E(tL", "a ')' is missing"},
           {"Et)L", "l:1:3: ')' without '('"},
           {"ExL", "l:1:2: expected one of"},
           {"Et*999999999999L", "more than"},
           {"(((((((((((((((((E", "too many '('"}}) {
    const auto layout = parse_layout(text, "l", rules);
    ASSERT_FALSE(layout.ok()) << text;
    EXPECT_NE(std::string(layout.status().message()).find(error),
              std::string::npos)
        << text << ": " << layout.status();
  }
  EXPECT_TRUE(parse_layout("E()*99999tt(()*9)*99999L", "l", rules).ok());
}

void expect_whole(const Layout& layout, int layers, int depths) {
  int layer = 0, depth = 0, embeddings = 0, heads = 0;
  for (const StageParts& stage : layout) {
    EXPECT_EQ(stage.first_layer, layer);
    if (stage.depths > 0) {
      EXPECT_EQ(stage.first_depth, depth);
    }
    layer += stage.layers;
    depth += stage.depths;
    embeddings += stage.embedding ? 1 : 0;
    heads += stage.head ? 1 : 0;
  }
  EXPECT_EQ(layer, layers);
  EXPECT_EQ(depth, depths);
  EXPECT_EQ(embeddings, 1);
  EXPECT_EQ(heads, 1);
}

// Bug 40 (Megatron-LM #1583, #3399): 10 layers on 3 ranks left out 6 and 7.
// Fault 11: what the stages own was tested, not that nothing is missing.
TEST(Layout, B40_F11_EvenOnesHaveEachLayerOnceInOrder) {
  for (int layers = 0; layers <= 20; ++layers) {
    for (int stages = 1; stages <= 24; ++stages) {
      const Layout layout = even_layout(layers, 2, stages);
      expect_whole(layout, layers, 2);
      for (const StageParts& stage : layout) {
        EXPECT_LE(stage.layers, (layers + stages - 1) / stages);
        EXPECT_GE(stage.layers, layers / stages);
      }
      EXPECT_EQ(parse_layout(layout_text(layout), "l").value().size(),
                layout.size());
    }
  }
  EXPECT_EQ(layout_text(even_layout(10, 0, 3)), "Etttt|ttt|tttL");
}

}  // namespace
}  // namespace tapeline
