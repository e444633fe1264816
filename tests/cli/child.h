// The built tapeline binary as a child process, as a user runs it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tapeline {

struct ChildOptions {
  std::map<std::string, std::string> environment;  // besides this process's
  std::string folder;                 // working directory; empty: this one's
  std::function<void()> before_exec;  // in the child: limits, mounts
};

struct ChildResult {
  int code = -1;  // -1: ended by a signal
  int signal = 0;
  std::string out, err;
};

// A running child; its output goes to files.
class Child {
 public:
  Child(const std::vector<std::string>& arguments, ChildOptions options = {});
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();  // kills it if it still runs

  pid_t pid() const { return pid_; }
  void send(int signal) const;
  bool running();
  // Its output to stdout so far.
  std::string out() const;
  ChildResult wait();

 private:
  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
  std::string folder_;  // of the output files
};

// Runs `tapeline <arguments>` to its end.
ChildResult tapeline_run(const std::vector<std::string>& arguments,
                         ChildOptions options = {});

// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder();
  std::string operator/(const std::string& name) const;
  const std::string& path() const { return path_; }
  // Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
};

// Text of verses made up from a few words: enough to train on.
std::string sample_text(int lines);

// A small model with every part of the family and steps of a few milliseconds:
// 1 dense and 2 MoE layers, 16 of at most 64 keys selected, MTP, 4 experts.
// Trains on <folder>/text.txt, which it writes; its run is <folder>/runs/small.
std::string small_config(const TempFolder& folder);

// Every file below a folder: path -> bytes.
std::map<std::string, std::string> files_below(const std::string& folder);

}  // namespace tapeline
