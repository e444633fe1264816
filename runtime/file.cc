#include "runtime/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "runtime/check.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

absl::StatusCode code_of(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EIO:
      return absl::StatusCode::kDataLoss;
    case ENOTDIR:
    case EISDIR:
    case ENOTEMPTY:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

std::string_view hint_for(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free some space or write to another disk";
    case EACCES:
    case EPERM:
      return "; check the permissions of the file and its folder";
    case EMFILE:
      return "; raise the limit with ulimit -n";
    default:
      return "";
  }
}

absl::Status failure(std::string_view call, const std::string& path,
                     int error) {
  std::string text(path);
  text.append(": ").append(call).append(" failed: ").append(strerror(error));
  text.append(hint_for(error));
  return absl::Status(code_of(error), text);
}

// Repeats a call that a signal interrupted.
template <class F>
auto retry(F&& f) {
  for (;;) {
    const auto result = f();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// The fault point of a call that is not a write.
int fault_before_call() {
  const Fault fault = next_fault(0);
  if (fault.kill) std::raise(SIGKILL);
  if (fault.error != 0) {
    errno = fault.error;
    return -1;
  }
  return 0;
}

ssize_t write_once(int descriptor, const char* data, size_t bytes) {
  const Fault fault = next_fault(bytes);
  ssize_t wrote = 0;
  if (fault.bytes > 0) wrote = ::write(descriptor, data, fault.bytes);
  if (fault.kill) std::raise(SIGKILL);
  if (fault.error != 0) {
    errno = fault.error;
    return -1;
  }
  return wrote;
}

int fsync_once(int descriptor) {
  return fault_before_call() < 0 ? -1 : ::fsync(descriptor);
}

int unlink_once(const char* path) {
  return fault_before_call() < 0 ? -1 : ::unlink(path);
}

std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> count{0};
  const size_t slash = path.rfind('/');
  const size_t name = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(0, name) + "." + path.substr(name) + ".tmp-" +
         std::to_string(getpid()) + "-" + std::to_string(count.fetch_add(1));
}

}  // namespace

File::File(std::string path, int descriptor, uint64_t size)
    : path_(std::move(path)), descriptor_(descriptor), size_(size) {}
File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}
File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}
File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

absl::StatusOr<File> File::open(const std::string& path) {
  // Nonblocking, so that opening a FIFO returns and is refused below.
  const int descriptor = retry(
      [&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  if (descriptor < 0) return failure("open", path, errno);
  File file(path, descriptor, 0);
  struct stat info;
  if (::fstat(descriptor, &info) < 0) return failure("fstat", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(path + ": not a regular file");
  }
  file.size_ = static_cast<uint64_t>(info.st_size);
  return file;
}

absl::Status File::read_at(uint64_t offset, void* to, size_t bytes) const {
  auto* out = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = retry([&] {
      return ::pread(descriptor_, out, std::min<size_t>(bytes, size_t{1} << 30),
                     static_cast<off_t>(offset));
    });
    if (got < 0) return failure("read", path_, errno);
    if (got == 0) {
      return absl::DataLossError(
          path_ + ": ends at byte " + std::to_string(offset) + ", " +
          std::to_string(bytes) + " bytes early; the file is cut or changing");
    }
    out += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

FileWriter::FileWriter(std::string path, std::string temporary, int descriptor)
    : path_(std::move(path)),
      temporary_(std::move(temporary)),
      descriptor_(descriptor) {}
FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}
FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
  // Best effort: what stays behind has a name that no reader opens.
  if (!temporary_.empty()) unlink_once(temporary_.c_str());
}

absl::StatusOr<FileWriter> FileWriter::create(const std::string& path) {
  std::string temporary = temporary_name(path);
  const int descriptor = retry([&] {
    return ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                  0644);
  });
  if (descriptor < 0) return failure("create", temporary, errno);
  return FileWriter(path, std::move(temporary), descriptor);
}

absl::Status FileWriter::append(const void* data, size_t bytes) {
  CHECK_GE(descriptor_, 0) << "append to a committed file";
  auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = retry([&] {
      return write_once(descriptor_, from,
                        std::min<size_t>(bytes, size_t{1} << 30));
    });
    if (wrote < 0) return failure("write", path_, errno);
    from += wrote;
    bytes -= static_cast<size_t>(wrote);
  }
  return absl::OkStatus();
}

absl::Status FileWriter::commit() {
  CHECK_GE(descriptor_, 0) << "commit twice";
  if (retry([&] { return fsync_once(descriptor_); }) < 0) {
    return failure("fsync", path_, errno);
  }
  // Not repeated on EINTR: the descriptor is gone either way.
  const int closed = ::close(std::exchange(descriptor_, -1));
  if (closed < 0 && errno != EINTR) return failure("close", path_, errno);
  RETURN_IF_ERROR(rename_path(temporary_, path_));
  temporary_.clear();
  return sync_directory(parent_path(path_));
}

absl::StatusOr<std::string> read_file(const std::string& path,
                                      uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const File file, File::open(path));
  if (file.size() > max_bytes) {
    return absl::InvalidArgumentError(
        path + ": " + std::to_string(file.size()) + " bytes, more than the " +
        std::to_string(max_bytes) + " that are read here");
  }
  std::string text(file.size(), '\0');
  RETURN_IF_ERROR(file.read_at(0, text.data(), text.size()));
  return text;
}

absl::Status write_file_atomic(const std::string& path, std::string_view text) {
  ASSIGN_OR_RETURN(FileWriter writer, FileWriter::create(path));
  RETURN_IF_ERROR(writer.append(text));
  return writer.commit();
}

absl::Status sync_directory(const std::string& path) {
  const int descriptor = retry(
      [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) return failure("open", path, errno);
  const int synced = retry([&] { return fsync_once(descriptor); });
  const int error = errno;
  ::close(descriptor);
  return synced < 0 ? failure("fsync", path, error) : absl::OkStatus();
}

absl::Status rename_path(const std::string& from, const std::string& to) {
  const int renamed = retry([&] {
    if (fault_before_call() < 0) return -1;
    return ::rename(from.c_str(), to.c_str());
  });
  if (renamed < 0) return failure("rename from " + from, to, errno);
  return absl::OkStatus();
}

absl::Status make_directories(const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0700) == 0) continue;
    const int error = errno;
    if (!is_directory(part)) {
      return failure("mkdir", part, error == EEXIST ? ENOTDIR : error);
    }
  }
  return absl::OkStatus();
}

absl::Status remove_path(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) < 0) {
    return errno == ENOENT ? absl::OkStatus() : failure("lstat", path, errno);
  }
  if (!S_ISDIR(info.st_mode)) {
    const int removed = retry([&] { return unlink_once(path.c_str()); });
    return removed < 0 ? failure("unlink", path, errno) : absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> names, list_directory(path));
  for (const std::string& name : names) {
    RETURN_IF_ERROR(remove_path(join_path(path, name)));
  }
  const int removed = retry(
      [&] { return fault_before_call() < 0 ? -1 : ::rmdir(path.c_str()); });
  return removed < 0 ? failure("rmdir", path, errno) : absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> list_directory(
    const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) return failure("opendir", path, errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  const int error = errno;
  ::closedir(folder);
  if (error != 0) return failure("readdir", path, error);
  std::sort(names.begin(), names.end());
  return names;
}

bool path_exists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

bool is_directory(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

absl::StatusOr<uint64_t> free_disk_bytes(const std::string& path) {
  struct statvfs info;
  if (::statvfs(path.c_str(), &info) < 0) {
    return failure("statvfs", path, errno);
  }
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

std::string parent_path(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string join_path(const std::string& folder, const std::string& name) {
  if (folder.empty() || name.starts_with('/')) return name;
  return folder.ends_with('/') ? folder + name : folder + "/" + name;
}

}  // namespace tapeline
