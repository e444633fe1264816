#include "kernels/bench/bench.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/cuda_device.h"

namespace tapeline::bench {
namespace {

// y = 2 x over [N, D], or 2.2 x when broken.
bool broken = false;
int launches = 0;

Run make_double(const Arguments& a) {
  const int64_t n = a.dims[0], d = a.dims[1];
  auto x = std::make_shared<Array<float>>(normal<float>(n * d, 1));
  auto y = std::make_shared<Array<float>>(n * d);
  return {.launch =
              [=] {
                ++launches;
                float* out = y->data();
                for (int64_t i = 0; i < n * d; ++i) {
                  out[i] = (broken ? 2.2f : 2.0f) * (*x)[i];
                }
              },
          .cost = {.flops = 1.0 * n * d, .bytes = 8.0 * n * d},
          .verify =
              [=](Verifier& verifier) {
                for (int64_t i : sampled_rows(n)) {
                  std::vector<double> expected;
                  for (int64_t j = 0; j < d; ++j) {
                    expected.push_back(2.0 * (*x)[i * d + j]);
                  }
                  verifier.row(y->row(i * d, d), expected);
                }
              }};
}

const bool added = add({"double",
                        "double_fwd",
                        {"T", "D"},
                        {{64, 32}, {128, 16}},
                        make_double,
                        {{4096, 16}}});

// y += x over [N], or y = x when broken.
Run make_add(const Arguments& a) {
  const int64_t n = a.dims[0];
  auto x = std::make_shared<Array<float>>(normal<float>(n, 1));
  auto y = std::make_shared<Array<float>>(n);
  const auto launch = [=] {
    float* out = y->data();
    for (int64_t i = 0; i < n; ++i) {
      out[i] = (broken ? 0 : out[i]) + 0.3f * (*x)[i];
    }
  };
  return {.launch = launch, .cost = {}, .verify = [=](Verifier& verifier) {
            launch_from_zeros(launch, *y);
            std::vector<double> expected;
            for (int64_t i = 0; i < n; ++i) {
              expected.push_back(kSums * 0.3 * (*x)[i]);
            }
            verifier.row(y->row(0, n), expected, kSums);
          }};
}

const bool added_too = add({"add", "add_to", {"N"}, {{32}}, make_add});

Run make_nothing(const Arguments&) {
  return {.launch = [] {}, .cost = {}, .verify = [](Verifier&) {}};
}

// Where it is asked for: what has no shapes runs with none.
const bool added_last = add({.kernel = "halve",
                             .name = "halve_fwd",
                             .keys = {"T", "E", "groups"},
                             .shapes = {},
                             .make = make_nothing,
                             .may_be_zero = "groups"},
                            {.dtypes = {DType::kF32, DType::kF64},
                             .broken = [](const std::vector<int64_t>& d) {
                               return at_most(1024, "E", d[1]);
                             }});

struct Result {
  int code;
  std::string out, err;
};
Result run_with(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  std::ostringstream out, err;
  const int code = run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str(), err.str()};
}

TEST(Bench, TableHasARowPerShape) {
  const Result result = run_with({"--profile_once"});
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.out.find("T=64 D=32"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("T=128 D=16"), std::string::npos);
}

TEST(Bench, AllRunsWhatIsRegisteredAndTakesNoShape) {
  const Result result = run_with({"--all", "--profile_once"});
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.out.find("T=64 D=32"), std::string::npos) << result.out;
  EXPECT_EQ(run_with({"--all", "--shape=16x8"}).code, 64);
  EXPECT_EQ(run_with({"--all", "double"}).code, 64);
}

TEST(Bench, ListNamesShapesOfTheDeviceAndRunsNothing) {
  launches = 0;
  const Result result = run_with({"--list", "--device=cpu"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out,
            "double_fwd --shape=64x32\ndouble_fwd --shape=128x16\n"
            "add_to --shape=32\n");
  EXPECT_EQ(run_with({"double", "--list", "--device=cuda"}).out,
            "double_fwd --shape=4096x16\n");
  EXPECT_EQ(launches, 0);
}

TEST(Bench, JsonRowsCarryTheContractKeys) {
  const Result result =
      run_with({"double", "--shape=16x8", "--json", "--profile_once"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  const auto row = nlohmann::ordered_json::parse(result.out);
  EXPECT_EQ(row.begin().key(), "schema");
  EXPECT_EQ(row["op"], "double_fwd");
  EXPECT_EQ(row["impl"], "tapeline");
  EXPECT_EQ(row["shape"]["T"], 16);
  EXPECT_EQ(row["shape"]["D"], 8);
  EXPECT_EQ(row["verified"], true);
  EXPECT_GT(row["us"].get<double>(), 0);
  for (const char* key :
       {"us_min", "tflops", "gbps", "floor_us", "x_floor", "pct_ceiling",
        "ceiling_tflops", "ceiling_gbps", "baseline_impl", "baseline_us",
        "x_baseline", "max_err", "rotated_bytes", "device_uuid", "driver",
        "commit", "command"}) {
    EXPECT_TRUE(row.contains(key)) << key;
  }
}

TEST(Bench, TimesManyLaunches) {
  launches = 0;
  EXPECT_EQ(run_with({"--shape=16x8"}).code, 0);
  EXPECT_GT(launches, 100);
}

TEST(Bench, WrongOutputIsExitCodeOne) {
  broken = true;
  const Result result = run_with({"--shape=16x8", "--profile_once"});
  broken = false;
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("double_fwd: the timed launch is wrong"),
            std::string::npos);
  EXPECT_NE(result.out.find("WRONG"), std::string::npos);
}

TEST(Bench, SumsAreRightAfterAnyNumberOfLaunches) {
  const Result result = run_with({"add_to"});
  EXPECT_EQ(result.code, 0) << result.err;
  broken = true;
  EXPECT_EQ(run_with({"add_to"}).code, 1) << "it overwrites";
  broken = false;
}

TEST(Bench, UsageErrorsAre64) {
  const auto expect_usage = [](std::vector<std::string> arguments,
                               const std::string& says) {
    launches = 0;
    const Result result = run_with(arguments);
    EXPECT_EQ(result.code, 64) << arguments.back();
    EXPECT_EQ(result.out, "") << arguments.back();
    EXPECT_NE(result.err.find(says), std::string::npos) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1)
        << result.err;
    EXPECT_EQ(launches, 0) << arguments.back();
  };
  for (const char* shape :
       {"16y8", "16xx8", "16x8z", "16x8x", "x16x8", "16x 8", "+16x8", "-16x8",
        "1.5x8", "", "99999999999999999999x8"}) {
    expect_usage({"double", std::string("--shape=") + shape},
                 "want whole numbers of at least 1, as in 512x128");
  }
  expect_usage({"--shape=0x7"}, "T of double_fwd is at least 1");
  expect_usage({"double", "--shape=4x0"}, "D of double_fwd is at least 1");
  expect_usage({"double", "--shape=4x0", "--list"}, "is at least 1");
  expect_usage({"double_fwd", "--shape=16x8x4"},
               "double_fwd takes TxD, got 3 numbers");
  expect_usage({"double", "--shape=16"}, "double_fwd takes TxD, got 1 number");
  expect_usage({"--shape=16x8x4x2"}, "got 4 numbers");
  expect_usage({"--shape=16x8x4x2", "--dtype=bf16"}, "got 4 numbers");
  expect_usage({"halve", "--shape=4x1025x0"},
               "--shape: E is at most 1024 for halve_fwd");
  EXPECT_EQ(run_with({"halve", "--list", "--shape=4x1024x0"}).code, 0);
  // Ops that are not named are left out where they do not fit.
  EXPECT_EQ(run_with({"--dtype=bf16", "--list", "--device=cpu"}).out,
            run_with({"--list", "--device=cpu"}).out);
  expect_usage({"--shape=4x1025x0"},
               "--shape: E is at most 1024 for halve_fwd");
  expect_usage({"--shape=4x8x0", "--dtype=bf16"},
               "--dtype=bf16: halve_fwd takes f32 or f64");
  expect_usage({"halve", "--shape=4x8x0", "--dtype=bf16"},
               "--dtype=bf16: halve_fwd takes f32 or f64");
  EXPECT_EQ(run_with({"halve", "--list", "--dtype=f64"}).code, 0);
  for (const char* threads : {"2abc", "0", "-1", "", "1025", "99999999999"}) {
    expect_usage({"double", std::string("--threads=") + threads},
                 "want from 1 to 1024");
  }
  expect_usage({"--device=tpu"}, "want cpu or cuda");
  expect_usage({"--colour"}, "--colour: unknown flag");
  expect_usage({"--json=3"}, "--json: takes no value");
  expect_usage({"--baseline="}, "want a file");
  expect_usage({"triple"}, "no op is called triple");
  expect_usage({"triple", "--list"}, "no op is called triple");
  expect_usage({"double", "add"}, "double and add: name one op");
  expect_usage({"double", "--op=add"}, "double and add: name one op");
  expect_usage({"--op="}, "an empty name");
}

TEST(Bench, AKeyMayBeZeroWhereItsOpSaysSo) {
  EXPECT_EQ(run_with({"halve", "--shape=4x8x0", "--list"}).out,
            "halve_fwd --shape=4x8x0\n");
  EXPECT_EQ(run_with({"halve", "--shape=4x0x8", "--list"}).code, 64);
}

TEST(Bench, NothingComparedIsSaid) {
  const Result result = run_with({"halve", "--shape=4x8x0", "--profile_once"});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.err,
            "halve_fwd: the timed launch is wrong: no row of this shape can be "
            "compared\n");
}

TEST(BenchDeathTest, MoreMemoryThanThereIsIsExitCode70) {
  const auto process = [](std::string shape) {
    std::string name = "bench", op = "double", device = "--device=cpu";
    shape = "--shape=" + shape;
    char* argv[] = {name.data(), op.data(), shape.data(), device.data()};
    std::exit(run_process(4, argv));
  };
  // A sanitizer may say so, too.
  const char* says =
      "^(==[^\n]*\n)?out of memory[^\n]*; choose a smaller --shape[^\n]*\n$";
  for (const char* shape :
       {"1000000x1000000000", "4294967296x4294967296", "3000000000x3000000000",
        "1x9223372036854775807", "9223372036854775807x1"}) {
    EXPECT_EXIT(process(shape), testing::ExitedWithCode(70), says) << shape;
  }
}

TEST(Bench, GpuThatIsNotThereIsExitCodeTwo) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is one";
  const Result result = run_with({"--shape=16x8", "--device=cuda"});
  EXPECT_EQ(result.code, 2);
  EXPECT_NE(result.err.find("CUDA"), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
}

TEST(Bench, JoinsTheBaselineOfTheSameDeviceOnly) {
  const Result first = run_with({"--shape=16x8", "--json", "--profile_once"});
  const std::string device =
      nlohmann::json::parse(first.out)["device"].get<std::string>();
  const std::string path = testing::TempDir() + "/baseline.jsonl";
  for (const bool same : {true, false}) {
    std::ofstream(path)
        << nlohmann::json{{"op", "env"}, {"device", same ? device : "another"}}
        << "\n"
        << R"({"op":"double_fwd","impl":"b","shape":{"T":16,"D":8},"us":50})"
        << "\n"
        << R"({"op":"double_fwd","impl":"a","shape":{"T":16,"D":8},"us":5})"
        << "\n"
        << R"({"op":"double_fwd","impl":"c","shape":{"T":9,"D":8},"us":1})"
        << "\n";
    const Result result = run_with(
        {"--shape=16x8", "--json", "--profile_once", "--baseline=" + path});
    const auto row = nlohmann::json::parse(result.out);
    if (same) {
      EXPECT_EQ(row["baseline_us"], 5);
      EXPECT_EQ(row["baseline_impl"], "a");
    } else {
      EXPECT_TRUE(row["baseline_us"].is_null());
    }
  }
  EXPECT_EQ(run_with({"--baseline=/none"}).code, 2);
}

TEST(Normal, SetsAndSeedsDifferAndRepeat) {
  const auto first = normal<float>(1000, 1);
  const auto again = normal<float>(1000, 1);
  const auto seed = normal<float>(1000, 2);
  use_set(1);
  const auto set = normal<float>(1000, 1);
  use_set(0);
  double sum = 0, squares = 0;
  int same_seed = 0, same_set = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(first[i], again[i]);
    EXPECT_EQ(first[i], float{bf16(first[i])});
    same_seed += first[i] == seed[i];
    same_set += first[i] == set[i];
    sum += first[i];
    squares += double(first[i]) * first[i];
  }
  EXPECT_LT(same_seed, 30);
  EXPECT_LT(same_set, 30);
  EXPECT_LT(std::abs(sum / 1000), 0.15);
  EXPECT_NEAR(squares / 1000, 1, 0.15);
}

TEST(Array, CopiesAndUploadsKeepTheirValues) {
  const Array<int32_t> from(std::vector<int32_t>{3, 1, 4});
  Array<int32_t> copy = from;
  copy.data()[1] = 5;
  EXPECT_EQ(from[1], 1);
  EXPECT_EQ(copy[1], 5);
  EXPECT_EQ(copy.row(1, 2)(1), 4);
  EXPECT_EQ(Array<float>(3)[2], 0);
  copy.zero();
  EXPECT_EQ(copy[0], 0);
  EXPECT_EQ(copy[2], 0);
}

TEST(SampledRows, HoldFirstAndLastOnce) {
  EXPECT_EQ(sampled_rows(0), (std::vector<int64_t>{}));
  EXPECT_EQ(sampled_rows(1), (std::vector<int64_t>{0}));
  EXPECT_EQ(sampled_rows(3), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(sampled_rows(3, 1), (std::vector<int64_t>{0}));
  EXPECT_EQ(sampled_rows(1000).front(), 0);
  EXPECT_EQ(sampled_rows(1000).back(), 999);
  EXPECT_EQ(sampled_rows(1000).size(), 8u);
}

}  // namespace
}  // namespace tapeline::bench
