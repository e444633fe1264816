#include "tests/cli/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "runtime/check.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

std::string binary() {
  const std::string relative = "tools/tapeline";
  const char* root = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (root == nullptr || workspace == nullptr) {
    // Without Bazel: in a checkout, or beside the program.
    return access(relative.c_str(), X_OK) == 0 ? relative : "./tapeline";
  }
  return std::string(root) + "/" + workspace + "/" + relative;
}

std::string slurp(const std::string& path) {
  const absl::StatusOr<std::string> text = read_file(path);
  return text.ok() ? *text : "";
}

std::string scratch() {
  // In memory where there is such a folder: thousands of fsyncs.
  const char* base = std::getenv("TEST_TMPDIR");
  std::string path = access("/dev/shm", W_OK) == 0 ? "/dev/shm"
                     : base != nullptr             ? base
                                                   : "/tmp";
  path += "/tapeline-XXXXXX";
  CHECK(mkdtemp(path.data()) != nullptr) << path;
  return path;
}

void redirect(const std::string& path, int to) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || dup2(file, to) < 0) _exit(126);
}

}  // namespace

Child::Child(const std::vector<std::string>& arguments, ChildOptions options)
    : folder_(scratch()) {
  const std::string program = binary();
  std::vector<char*> words = {const_cast<char*>(program.c_str())};
  for (const std::string& word : arguments) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  pid_ = fork();
  CHECK(pid_ >= 0);
  if (pid_ > 0) return;
  redirect(folder_ + "/out", STDOUT_FILENO);
  redirect(folder_ + "/err", STDERR_FILENO);
  unsetenv("BUILD_WORKING_DIRECTORY");
  for (const auto& [name, value] : options.environment) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  if (options.before_exec) options.before_exec();
  if (!options.folder.empty() && chdir(options.folder.c_str()) != 0) {
    _exit(126);
  }
  execv(words[0], words.data());
  _exit(127);
}

Child::~Child() {
  if (running()) {
    ::kill(pid_, SIGKILL);
    wait();
  }
  remove_path(folder_).IgnoreError();
}

void Child::send(int signal) const { ::kill(pid_, signal); }

bool Child::running() {
  if (!ended_ && waitpid(pid_, &status_, WNOHANG) == pid_) ended_ = true;
  return !ended_;
}

std::string Child::out() const { return slurp(folder_ + "/out"); }

ChildResult Child::wait() {
  if (!ended_) {
    waitpid(pid_, &status_, 0);
    ended_ = true;
  }
  ChildResult result;
  if (WIFEXITED(status_)) {
    result.code = WEXITSTATUS(status_);
  } else {
    result.signal = WTERMSIG(status_);
  }
  result.out = out();
  result.err = slurp(folder_ + "/err");
  return result;
}

ChildResult tapeline_run(const std::vector<std::string>& arguments,
                         ChildOptions options) {
  return Child(arguments, std::move(options)).wait();
}

TempFolder::TempFolder() : path_(scratch()) {}
TempFolder::~TempFolder() { remove_path(path_).IgnoreError(); }
std::string TempFolder::operator/(const std::string& name) const {
  return path_ + "/" + name;
}
std::string TempFolder::write(const std::string& name,
                              const std::string& text) const {
  const std::string path = path_ + "/" + name;
  CHECK(make_directories(parent_path(path)).ok());
  CHECK(write_file_atomic(path, text).ok());
  return path;
}

std::string sample_text(int lines) {
  static const char* const words[] = {"and", "the",   "king", "went",  "up",
                                      "to",  "house", "of",   "bread", "day"};
  std::string text;
  uint32_t state = 7;
  for (int i = 0; i < lines; ++i) {
    for (int w = 0; w < 8; ++w) {
      state = 1664525 * state + 1013904223;
      text += words[(state >> 16) % 10];
      text += w == 7 ? ".\n" : " ";
    }
  }
  return text;
}

std::string small_config(const TempFolder& folder) {
  const std::string text = folder.write("text.txt", sample_text(200));
  return folder.write("small.toml",
                      "seed = 3\n"
                      "[run]\n"
                      "dir = \"" +
                          folder / "runs" +
                          "\"\n"
                          "name = \"small\"\n"
                          "[data]\n"
                          "train = \"" +
                          text +
                          "\"\n"
                          "val = \"" +
                          text + "\"\n" + R"(
[train]
steps = 6
seq_len = 64
micro_batches = 2
threads = 1
snapshot_every = 2
eval_every = 4
[sample]
prompt = "and "
max_tokens = 8
[optimizer]
name = "muon"
lr = 4e-3
[loss]
mtp_weight = 0.1
balance_coefficient = 1e-3
z_coefficient = 1e-4
indexer_coefficient = 1.0
router_bias_rate = 1e-3
[debug]
hash_every = 1
[model]
architectures = ["MlaLmForCausalLM"]
model_type = "glm_moe_dsa"
vocab_size = 256
max_position_embeddings = 64
hidden_size = 32
num_hidden_layers = 3
num_nextn_predict_layers = 1
mlp_layer_types = ["dense", "sparse", "sparse"]
indexer_types = ["full", "full", "shared"]
first_k_dense_replace = 1
intermediate_size = 48
moe_intermediate_size = 24
num_attention_heads = 2
num_key_value_heads = 2
q_lora_rank = 24
kv_lora_rank = 16
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
index_topk = 16
index_n_heads = 2
index_head_dim = 16
n_routed_experts = 4
num_experts_per_tok = 2
n_shared_experts = 1
)");
}

std::map<std::string, std::string> files_below(const std::string& folder) {
  std::map<std::string, std::string> files;
  const absl::StatusOr<std::vector<std::string>> names = list_directory(folder);
  if (!names.ok()) return files;
  for (const std::string& name : *names) {
    const std::string path = join_path(folder, name);
    if (is_directory(path)) {
      files.merge(files_below(path));
    } else {
      files[path] = slurp(path);
    }
  }
  return files;
}

}  // namespace tapeline
