// MANIFEST.json of a snapshot: what must be there, and its fingerprint.
//
// The text is one JSON object whose last member "xxh3" is the hash of the text
// without it; a text that differs in any byte from what these values are
// written as is refused.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

inline constexpr int64_t kSnapshotFormat = 1;
inline constexpr char kManifestFile[] = "MANIFEST.json";
inline constexpr char kStateFile[] = "state.json";
// Of the one process that wrote, or of the first.
inline constexpr char kTensorFile[] = "rank00000.safetensors";
// Where there are several: which holds what, as a Hugging Face index.
inline constexpr char kIndexFile[] = "tensors.index.json";

struct Manifest {
  struct File {
    std::string name;
    int64_t bytes = 0;
    std::string xxh3;
  };
  int64_t format = 0, step = 0;
  Json layout;
  std::vector<File> files;
  Json tensors;  // name -> {dtype, shape, file, xxh3}
};

std::string manifest_text(const Manifest& manifest);
// `name` stands for the text in errors, all of which are DataLoss.
absl::StatusOr<Manifest> parse_manifest(std::string_view text,
                                        std::string_view name);

// Reads the file once.
absl::StatusOr<Manifest::File> fingerprint(const std::string& folder,
                                           const std::string& name);
// The manifest of a folder, with every file there in its size, and with
// `hashes` also in its bytes.
absl::StatusOr<Manifest> check_snapshot(const std::string& path, bool hashes);

}  // namespace tapeline
