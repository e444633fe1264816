#include "kernels/bench/bench.h"

int main(int argc, char** argv) {
  return tapeline::bench::run_process(argc, argv);
}
