#include "dist/mesh.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

// Innermost first.
constexpr Axis kInsideOut[] = {Axis::kTensor, Axis::kSequence, Axis::kExpert,
                               Axis::kData, Axis::kPipeline};

}  // namespace

int& MeshPoint::operator[](Axis axis) {
  switch (axis) {
    case Axis::kPipeline:
      return pp;
    case Axis::kData:
      return dp;
    case Axis::kExpert:
      return ep;
    case Axis::kSequence:
      return sp;
    case Axis::kTensor:
      return tp;
  }
  CHECK(false);
  return pp;
}

std::string to_string(const MeshPoint& mesh) {
  return absl::StrCat("pp ", mesh.pp, ", dp ", mesh.dp, ", ep ", mesh.ep,
                      ", sp ", mesh.sp, ", tp ", mesh.tp);
}

absl::Status check_mesh(const MeshPoint& mesh, int world) {
  int64_t product = 1;
  for (const Axis axis : kInsideOut) {
    if (mesh[axis] < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the mesh ", to_string(mesh), " has an extent below 1"));
    }
    // Below 2^62: neither factor grows past 2^31.
    product = std::min<int64_t>(product * mesh[axis], int64_t{1} << 31);
  }
  if (product != world) {
    return absl::InvalidArgumentError(
        absl::StrCat("the mesh ", to_string(mesh), " is not one of ", world,
                     world == 1 ? " process" : " processes"));
  }
  return absl::OkStatus();
}

MeshPoint place_of(const MeshPoint& mesh, int rank) {
  MeshPoint place;
  for (const Axis axis : kInsideOut) {
    place[axis] = rank % mesh[axis];
    rank /= mesh[axis];
  }
  CHECK_EQ(rank, 0);
  return place;
}

int rank_of(const MeshPoint& mesh, const MeshPoint& place) {
  int rank = 0, stride = 1;
  for (const Axis axis : kInsideOut) {
    CHECK(place[axis] >= 0 && place[axis] < mesh[axis]);
    rank += stride * place[axis];
    stride *= mesh[axis];
  }
  return rank;
}

std::vector<int> group_of(const MeshPoint& mesh, int rank,
                          const std::vector<Axis>& axes) {
  std::vector<int> out = {rank};
  const MeshPoint here = place_of(mesh, rank);
  for (const Axis axis : axes) {
    std::vector<int> more;
    for (const int r : out) {
      MeshPoint place = place_of(mesh, r);
      for (int i = 0; i < mesh[axis]; ++i) {
        place[axis] = i;
        if (i != here[axis]) more.push_back(rank_of(mesh, place));
      }
    }
    out.insert(out.end(), more.begin(), more.end());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<std::vector<int>> groups(const MeshPoint& mesh,
                                     const std::vector<Axis>& axes) {
  int world = 1;
  for (const Axis axis : kInsideOut) world *= mesh[axis];
  std::vector<std::vector<int>> out;
  for (int rank = 0; rank < world; ++rank) {
    std::vector<int> group = group_of(mesh, rank, axes);
    if (group.front() == rank) out.push_back(std::move(group));
  }
  return out;
}

const std::vector<Axis>& shared_weight_axes() {
  static const std::vector<Axis>& axes =
      *new std::vector<Axis>{Axis::kData, Axis::kExpert, Axis::kSequence};
  return axes;
}

const std::vector<Axis>& expert_weight_axes() {
  static const std::vector<Axis>& axes =
      *new std::vector<Axis>{Axis::kData, Axis::kSequence};
  return axes;
}

}  // namespace tapeline
