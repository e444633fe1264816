#!/bin/sh
# All tests of the bundle; see run_gpu_tests.py beside this file for the flags.
cd "$(dirname "$0")" || exit 2
# cuBLASLt is the host's.
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
exec python3 run_gpu_tests.py "$@"
