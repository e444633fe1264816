// Snapshot: saved training state that is complete and verified, or invisible.
//
//   <root>/step_0000120/
//     rank00000.safetensors    tensors, by canonical name; of a job of several
//                              ranks a file of each that writes, and
//                              tensors.index.json says which holds what
//     state.json               what is not a tensor: counters, schedule
//     config.resolved.toml ... any further text
//     MANIFEST.json            format version, step, layout, size and XXH3-128
//                              of every file and of every tensor, own hash
//   <root>/LATEST              name of the newest, for people and scripts
//
// Saving writes into step_N.tmp-<nonce>, each file fsynced and read back
// for its hash, the manifest last, then renames the folder, fsyncs the root and
// replaces LATEST; only then are older snapshots removed. A crash at any point
// leaves the earlier snapshots as they were. A step that is there and valid is
// not written again; one that is there and damaged is set aside first.
//
// Loading takes the newest folder whose manifest, sizes and hashes are right
// and says which file spoiled a newer one. A folder named explicitly is loaded
// or refused. Not thread-safe; one process at a time writes below a root, or
// the ranks of one job: one begins a snapshot, all write their parts, the one
// ends it. Keys are canonical names, so whatever layout wrote a snapshot, any
// other one reads it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"

namespace tapeline {

struct SnapshotContents {
  int64_t step = 0;
  Json layout;  // ranks and degrees of parallelism
  Json state;
  std::vector<NamedBytes> tensors;           // memory that outlives the call
  std::map<std::string, std::string> texts;  // file name -> bytes
};

struct SnapshotStore {
  std::string root;
  int keep = 2;  // how many usable ones retention leaves; at least 2
};

// Bytes that one snapshot takes on disk, about.
uint64_t snapshot_bytes(const SnapshotContents& contents);
// ResourceExhausted if the file system of `folder`, which exists, lacks room
// for `count` snapshots of so many bytes and 5 % more.
absl::Status check_disk_space(const std::string& folder, uint64_t bytes,
                              int count);

// Returns the folder. What retention could not remove is appended to
// `warnings`, a line each; it does not make the save fail.
absl::StatusOr<std::string> save_snapshot(const SnapshotStore& store,
                                          const SnapshotContents& contents,
                                          std::vector<std::string>* warnings);

// The same in three steps, for the ranks of a job that see one file system. The
// folder to write parts into; empty if a usable snapshot of the step is there
// already. `bytes` is what all parts take.
absl::StatusOr<std::string> begin_snapshot(const SnapshotStore& store,
                                           int64_t step, uint64_t bytes);
// On any rank, a number of its own from 0 on. What the one that ends the
// snapshot has to know of it.
absl::StatusOr<std::string> write_snapshot_part(
    const std::string& folder, int part,
    const std::vector<NamedBytes>& tensors);
// `parts` is what write_snapshot_part() returned for parts 0, 1, ...;
// contents.tensors is not looked at. Returns the folder as save_snapshot().
absl::StatusOr<std::string> end_snapshot(const SnapshotStore& store,
                                         const std::string& folder,
                                         const SnapshotContents& contents,
                                         const std::vector<std::string>& parts,
                                         std::vector<std::string>* warnings);

// Snapshots later than `step` no longer belong to a run that continues from it:
// they are renamed to <name>.superseded[-k], which nothing loads or removes.
absl::Status set_aside_later_snapshots(const std::string& root, int64_t step);

// A snapshot whose files were all verified.
struct Snapshot {
  std::string path;
  int64_t step = 0;
  Json layout;
  Json state;
  std::unique_ptr<SafetensorsReader> tensors;
};

// DataLoss names the first wrong file, NotFound a folder that is not there.
absl::StatusOr<Snapshot> load_snapshot(const std::string& path);
// The newest usable one. What is wrong with newer ones is appended to
// `rejected`, a line each. NotFound: there is none; DataLoss: none is usable;
// any other error: root cannot be listed.
absl::StatusOr<Snapshot> load_latest_snapshot(
    const std::string& root, std::vector<std::string>* rejected);

// The step_N folders below root, newest first; without root, none.
absl::StatusOr<std::vector<std::string>> list_snapshots(
    const std::string& root);
std::string snapshot_name(int64_t step);  // step_0000120

}  // namespace tapeline
