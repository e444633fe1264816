#include <iostream>

#include "kernels/bench/bench.h"

int main(int argc, char** argv) {
  return tapeline::bench::run(argc, argv, std::cout, std::cerr);
}
