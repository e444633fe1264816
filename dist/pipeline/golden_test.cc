// 1,050 makespans, idle times and peaks that another simulator computed.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/simulator.h"
#include "gtest/gtest.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

using Row = std::map<std::string, std::string>;

std::vector<Row> golden_rows() {
  const std::string text = read_file("tests/data/schedule_golden.csv").value();
  std::vector<std::string> columns;
  std::vector<Row> rows;
  for (const absl::string_view line :
       absl::StrSplit(text, absl::ByAnyChar("\r\n"), absl::SkipEmpty())) {
    const std::vector<std::string> cells = absl::StrSplit(line, ',');
    if (columns.empty()) {
      columns = cells;
      continue;
    }
    for (size_t i = 0; i < cells.size(); ++i) {
      if (i == 0) rows.emplace_back();
      rows.back()[columns.at(i)] = cells[i];
    }
  }
  return rows;
}

double number(const Row& row, const std::string& column) {
  double value = 0;
  EXPECT_TRUE(absl::SimpleAtod(row.at(column), &value)) << column;
  return value;
}

TEST(Golden, EveryRowIsEqual) {
  const std::vector<Row> rows = golden_rows();
  EXPECT_EQ(rows.size(), 1050u);
  for (const Row& row : rows) {
    const std::string label = absl::StrJoin(row, " ", absl::PairFormatter("="));
    const ScheduleSize size{
        .ranks = static_cast<int64_t>(number(row, "ranks")),
        .chunks = static_cast<int64_t>(number(row, "chunks")),
        .micro_batches = static_cast<int64_t>(number(row, "micro_batches"))};
    const Schedule s = make_schedule(row.at("name"), size).value();
    const StageCosts cost{.forward = number(row, "F"),
                          .input = number(row, "I"),
                          .weight = number(row, "W")};
    const Simulation sim =
        simulate(s, {.stages = {cost}, .latency = number(row, "latency")})
            .value();
    EXPECT_NEAR(sim.makespan, number(row, "makespan"), 1e-9) << label;
    EXPECT_NEAR(*std::max_element(sim.idle.begin(), sim.idle.end()),
                number(row, "max_idle"), 1e-9)
        << label;
    std::vector<std::string> peaks_found;
    for (const Peak& peak : peaks(s, {Holds{}})) {
      // StrCat prints six digits, as the file has them.
      peaks_found.push_back(
          absl::StrCat(peak.value / static_cast<double>(size.chunks)));
    }
    EXPECT_EQ(absl::StrJoin(peaks_found, " "), row.at("peak_activations"))
        << label;
  }
}

}  // namespace
}  // namespace tapeline
