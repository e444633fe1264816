// tapeline: train, sample and measure language models.

#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/edit_distance.h"
#include "runtime/pool.h"
#include "tools/tapeline/verbs.h"

namespace tapeline {
namespace {

struct Verb {
  std::string name;
  int (*run)(const Arguments&);
  std::string help;
};

const std::vector<Verb>& verbs() {
  static const std::vector<Verb>& verbs = *new std::vector<Verb>{
      {"train", train_verb, "train a model as a config file says"},
      {"generate", generate_verb, "continue a prompt"},
      {"eval", eval_verb, "loss and bits per byte of a text"},
      {"plan", plan_verb, "memory of a run, before it runs"},
      {"bench", bench_verb, "time and memory of a forward and backward pass"},
      {"ckpt", ckpt_verb, "list the tensors of a folder, or copy a model"},
      {"parity", parity_verb, "compare with another implementation's results"},
      {"schedule", schedule_verb, "make, check, time and draw a schedule"},
  };
  return verbs;
}

void print_help(std::ostream& out) {
  out << "usage: tapeline <verb> [flags]\n";
  for (const Verb& verb : verbs()) {
    out << "  " << verb.name << std::string(12 - verb.name.size(), ' ')
        << verb.help << "\n";
  }
  out << "tapeline <verb> --help lists a verb's flags\n";
}

int run(const Arguments& words) {
  if (words.size() < 2) {
    return fail(kExitUsage, "no verb given; see tapeline --help");
  }
  const std::string& name = words[1];
  if (name == "--help" || name == "-h" || name == "help") {
    print_help(std::cout);
    return end_output();
  }
  const Arguments arguments(words.begin() + 2, words.end());
  std::vector<std::string> known;
  for (const Verb& verb : verbs()) {
    if (verb.name == name) return verb.run(arguments);
    known.push_back(verb.name);
  }
  return fail(kExitUsage,
              absl::StrCat("no verb '", name, "'", suggestion(name, known),
                           "; see tapeline --help"));
}

// Memory ran out where nothing can be undone: say so and end.
[[noreturn]] void end_out_of_memory(const std::string& what) {
  std::_Exit(fail(kExitOutOfMemory,
                  what + "; lower train.seq_len or model sizes, or use a "
                         "machine with more memory"));
}

}  // namespace
}  // namespace tapeline

int main(int argc, char** argv) {
  // A file that grows past RLIMIT_FSIZE is an error of its write, not a death.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  tapeline::out_of_memory = [](const std::string& report) {
    tapeline::end_out_of_memory(report);
  };
  std::set_new_handler([] { tapeline::end_out_of_memory("out of memory"); });
  tapeline::set_command_line({argv, argv + argc});
  // Our own code throws nothing; libraries do.
  try {
    return tapeline::run(tapeline::command_line());
  } catch (const std::bad_alloc&) {
    tapeline::end_out_of_memory("out of memory");
  } catch (const std::system_error& e) {
    return tapeline::fail(tapeline::kExitOutOfMemory,
                          absl::StrCat("the system refused a resource: ",
                                       e.what(), "; lower --threads"));
  } catch (const std::exception& e) {
    return tapeline::fail(
        tapeline::kExitBadInput,
        absl::StrCat("unexpected error: ", e.what(), "; please report it"));
  }
}
