// Prints docs/config.md: bazel run //tools/config:print_docs >docs/config.md
#include <iostream>

#include "tools/config/config.h"

int main() { std::cout << tapeline::config_markdown(); }
