// Which windows a forward pass has. Names are those of
// docs/checkpoint_and_offload.md.
#include "autograd/memory_plan.h"

#include <algorithm>
#include <random>
#include <set>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr int kLayers = 78, kOffset = 3, kFrequency = 4;  // GLM-5.2
constexpr int64_t kHidden = 1000, kIds = 70;

std::vector<int> glm_sources() {
  std::vector<bool> owns;
  for (int i = 0; i < kLayers; ++i) {
    owns.push_back(std::max(i + 1 - kOffset, 0) % kFrequency == 0);
  }
  return selection_sources(owns);
}

std::vector<LayerCall> glm_calls(int begin = 0, int end = kLayers) {
  const std::vector<int> sources = glm_sources();
  std::vector<LayerCall> calls;
  for (int i = begin; i < end; ++i) {
    calls.push_back({i, kHidden, kIds, sources[static_cast<size_t>(i)]});
  }
  return calls;
}

std::vector<int> layers_of(const std::vector<PlannedWindow>& windows) {
  std::vector<int> layers;
  for (const PlannedWindow& window : windows) layers.push_back(window.layer);
  return layers;
}

// Numbers are dense from 0; each window knows the one before it; the last
// stays.
void expect_numbered(const std::vector<PlannedWindow>& windows) {
  for (size_t i = 0; i < windows.size(); ++i) {
    EXPECT_EQ(windows[i].predecessor, static_cast<int>(i) - 1);
    EXPECT_EQ(windows[i].copied, i + 1 < windows.size());
    EXPECT_TRUE(windows[i].activations || windows[i].ids);
  }
}

TEST(Contract, C26_TheSourceIsTheNearestOwnerBefore) {
  const std::vector<int> sources = glm_sources();
  std::set<int> owners(sources.begin(), sources.end());
  std::set<int> want = {0, 1};
  for (int i = 2; i <= 74; i += 4) want.insert(i);
  EXPECT_EQ(owners, want);
  EXPECT_EQ(owners.size(), 21u);
  int shared = 0;
  for (int i = 0; i < kLayers; ++i) {
    shared += sources[static_cast<size_t>(i)] != i;
  }
  EXPECT_EQ(shared, 57);
  EXPECT_EQ(sources[9], 6);
  EXPECT_EQ(selection_sources({true, false, true, true, false, false}),
            (std::vector<int>{0, 0, 2, 3, 3, 3}));
}

TEST(ContractDeathTest, C26_ASharerNeedsAnOwnerBefore) {
  EXPECT_DEATH(selection_sources({false, true}),
               "layer 0 shares a selection, but none was made before it");
}

TEST(Contract, C30_SelectionsLeaveAtTheirLastConsumer) {
  const std::vector<LayerCall> calls = glm_calls();
  int last_consumers = 0;
  std::vector<int> shared;
  for (int i = 0; i < kLayers; ++i) {
    const int source = calls[static_cast<size_t>(i)].source;
    if (i + 1 < kLayers && calls[static_cast<size_t>(i) + 1].source == source) {
      continue;
    }
    ++last_consumers;
    if (source != i) shared.push_back(i);
  }
  EXPECT_EQ(last_consumers, 21);
  EXPECT_EQ(shared.size(), 19u);
  EXPECT_EQ(shared.front(), 5);
  EXPECT_EQ(shared.back(), 77);
  const auto windows = plan_windows(calls, {false, true, {}});
  EXPECT_EQ(layers_of(windows), shared);
  // The last is not copied: 18 of the 21 selections move.
  EXPECT_EQ(planned_bytes(windows), 18 * kIds);
}

TEST(Contract, C35_WindowsHoldWhatTheSettingsLeave) {
  for (const bool activations : {false, true}) {
    for (const bool ids : {false, true}) {
      SCOPED_TRACE(testing::Message() << activations << ids);
      const auto windows = plan_windows(glm_calls(), {activations, ids, {}});
      expect_numbered(windows);
      EXPECT_EQ(windows.size(), activations ? 78u : ids ? 19u : 0u);
      int64_t bytes = 0;
      for (const PlannedWindow& window : windows) {
        const bool last_sharer = window.layer >= 5 && window.layer % 4 == 1;
        EXPECT_EQ(window.activations, activations);
        EXPECT_EQ(window.ids, ids && last_sharer) << window.layer;
        EXPECT_EQ(window.bytes, (activations ? kHidden : 0) +
                                    (ids && last_sharer ? kIds : 0));
        if (window.copied) bytes += window.bytes;
      }
      EXPECT_EQ(planned_bytes(windows), bytes);
    }
  }
}

// A dense layer has no selection, a call may have nothing to list at all.
TEST(Contract, C35_NothingToListIsNoWindow) {
  const std::vector<LayerCall> calls = {
      {0, 8, 0, -1}, {1, 0, 0, -1}, {2, 8, 4, 2}, {3, 0, 4, 2}, {4, 8, 0, -1}};
  const auto both = plan_windows(calls, {true, true, {}});
  EXPECT_EQ(layers_of(both), (std::vector<int>{0, 2, 3, 4}));
  expect_numbered(both);
  const auto ids = plan_windows(calls, {false, true, {}});
  EXPECT_EQ(layers_of(ids), (std::vector<int>{3}));
  EXPECT_EQ(planned_bytes(ids), 0) << "one window is the last one";
}

TEST(Contract, C36_PipelineStagesNumberTheirOwnWindows) {
  const auto whole = plan_windows(glm_calls(), {true, true, {}});
  for (int begin = 0; begin < kLayers; begin += 13) {
    const int end = std::min(begin + 13, kLayers);
    const auto stage = plan_windows(glm_calls(begin, end), {true, true, {}});
    expect_numbered(stage);
    ASSERT_EQ(stage.size(), static_cast<size_t>(end - begin));
    EXPECT_EQ(stage[0].layer, begin);
    for (const PlannedWindow& window : stage) {
      if (window.layer + 1 == end) continue;
      EXPECT_EQ(window.ids, whole[static_cast<size_t>(window.layer)].ids);
    }
  }
  // A stage that ends inside a group is its last consumer there.
  EXPECT_TRUE(plan_windows(glm_calls(2, 5), {false, true, {}})[0].ids);
}

TEST(Contract, C37_AnySubsetOfLayersIsNumberedDensely) {
  std::mt19937 random(3);
  for (int run = 0; run < 50; ++run) {
    OffloadChoice choice{run % 3 != 0, run % 3 != 1, {}};
    choice.layers.resize(random() % (kLayers + 1));
    for (size_t i = 0; i < choice.layers.size(); ++i) {
      choice.layers[i] = random() % 2 == 0;
    }
    const auto windows = plan_windows(glm_calls(), choice);
    expect_numbered(windows);
    if (choice.layers.empty()) continue;  // all
    for (const PlannedWindow& window : windows) {
      ASSERT_LT(static_cast<size_t>(window.layer), choice.layers.size());
      EXPECT_TRUE(choice.layers[static_cast<size_t>(window.layer)]);
    }
  }
}

}  // namespace
}  // namespace tapeline
