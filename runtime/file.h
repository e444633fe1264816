// Files: reading at an offset, and writing that is complete or absent.
//
// A written file appears under its name only after its bytes are on disk: they
// go to a temporary neighbour, which is fsynced, closed and renamed, and then
// the folder is fsynced. After a crash or an error at any point the name holds
// the old bytes or the new ones, never a mixture. A failed fsync is final: it
// is not repeated on the same file.
// Interrupted calls are repeated and short ones continued. Every error names
// the call, the path and the system's reason: NotFound, PermissionDenied,
// ResourceExhausted (disk full, too many files), DataLoss (EIO, file shorter
// than it was), FailedPrecondition (wrong kind of file), Internal otherwise.
// Reads are thread-safe; a FileWriter belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tapeline {

// A regular file open for reading. Movable; closed on destruction.
class File {
 public:
  static absl::StatusOr<File> open(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // when it was opened
  // Exactly `bytes` bytes at `offset`; a file that has shrunk is DataLoss.
  absl::Status read_at(uint64_t offset, void* to, size_t bytes) const;

 private:
  File(std::string path, int descriptor, uint64_t size);
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

// A file being written. Its name shows it only after a successful commit();
// destroyed before that, it leaves nothing behind.
class FileWriter {
 public:
  static absl::StatusOr<FileWriter> create(const std::string& path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();

  absl::Status append(const void* data, size_t bytes);
  absl::Status append(std::string_view text) {
    return append(text.data(), text.size());
  }
  // fsync, close, rename over the name, fsync of the folder.
  absl::Status commit();

 private:
  FileWriter(std::string path, std::string temporary, int descriptor);
  std::string path_, temporary_;
  int descriptor_ = -1;
};

// The whole file; larger than max_bytes is an error before anything is read.
absl::StatusOr<std::string> read_file(const std::string& path,
                                      uint64_t max_bytes = 100'000'000);
absl::Status write_file_atomic(const std::string& path, std::string_view text);

// Makes names created, renamed or removed in the folder durable.
absl::Status sync_directory(const std::string& path);
// Renames without syncing; `to` may be an existing file or empty folder.
absl::Status rename_path(const std::string& from, const std::string& to);
// The folder and its parents, mode 0700 where new; existing ones are fine.
absl::Status make_directories(const std::string& path);
// Removes a file, or a folder with all it holds. Absent is fine.
absl::Status remove_path(const std::string& path);
// Names in the folder without "." and "..", sorted.
absl::StatusOr<std::vector<std::string>> list_directory(
    const std::string& path);
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
// Bytes that this user may still write on the file system of `path`.
absl::StatusOr<uint64_t> free_disk_bytes(const std::string& path);

// "a/b/c" -> "a/b"; "c" -> "."; "/c" -> "/".
std::string parent_path(const std::string& path);
// "a" + "b" -> "a/b"; an absolute second part stands alone.
std::string join_path(const std::string& folder, const std::string& name);

}  // namespace tapeline
