// Ranks of a job as points of a mesh, and the groups that communicate.
//
// Axes, outermost first: pp pipeline stages, dp replicas of everything, ep
// ranks that share the experts of a layer, sp parts of a sequence, tp parts of
// a matrix. So ranks that talk most are neighbours, and the ranks of one stage
// are in one piece: expert parallelism lies inside a stage. Pure functions of
// numbers; dp and pp are what training uses today.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tapeline {

enum class Axis { kPipeline, kData, kExpert, kSequence, kTensor };

// Extents, or a place: by axis.
struct MeshPoint {
  int pp = 1, dp = 1, ep = 1, sp = 1, tp = 1;
  int& operator[](Axis axis);
  int operator[](Axis axis) const {
    return const_cast<MeshPoint&>(*this)[axis];
  }
  friend bool operator==(const MeshPoint&, const MeshPoint&) = default;
};
// "pp 2, dp 4, ep 1, sp 1, tp 1".
std::string to_string(const MeshPoint& mesh);

// Mesh of `world` ranks; InvalidArgument unless its extents are at least 1 and
// their product is world.
absl::Status check_mesh(const MeshPoint& mesh, int world);

// Where a rank lies, from 0 along each axis, and back.
MeshPoint place_of(const MeshPoint& mesh, int rank);
int rank_of(const MeshPoint& mesh, const MeshPoint& place);

// The ranks that differ from `rank` along these axes alone, itself included,
// ascending.
std::vector<int> group_of(const MeshPoint& mesh, int rank,
                          const std::vector<Axis>& axes);
// All such groups, by first rank. Every rank that makes communicators of them
// in this order makes them in one order.
std::vector<std::vector<int>> groups(const MeshPoint& mesh,
                                     const std::vector<Axis>& axes);

// Along which ranks gradients are added up: of weights that every rank of a
// stage has, and of experts, of which each ep rank has its own. Parts of a
// sequence see the same weights; those of a matrix do not.
const std::vector<Axis>& shared_weight_axes();
const std::vector<Axis>& expert_weight_axes();

}  // namespace tapeline
