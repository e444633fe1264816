#include "dist/nccl_library.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(NcclLibrary, OneThatIsNotThereIsAnErrorThatSaysWhatToDo) {
  const absl::Status status = load_nccl("libnccl_of_nobody.so.2").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "libnccl_of_nobody.so.2"));
  EXPECT_TRUE(absl::StrContains(status.message(), "install NVIDIA's package"));
}

// Any library that is there and is another.
TEST(NcclLibrary, AnotherLibraryIsRefused) {
  const absl::Status status = load_nccl("libm.so.6").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "libm.so.6 has no version and lacks ncclGetVersion; 2.18 or later "
            "is needed");
}

}  // namespace
}  // namespace tapeline
