#!/usr/bin/env python3
"""Fails if a hand-written op uses a library of kernels.

    symbols_test.py LIBRARY...

Only matmul may: it calls cuBLASLt, which also shows that the names are seen.
"""

import re
import subprocess
import sys
import unittest

LIBRARIES = re.compile(
    r"cublas|cusparse|cudnn|cutlass|\bcub::|\bthrust::|\bcute::", re.IGNORECASE)
ALLOWED = "matmul"


def names_of(path):
    """Returns the names, defined or used, of all objects in an archive."""
    done = subprocess.run(["nm", "-C", path], capture_output=True, text=True,
                          check=True)
    return [line.split(maxsplit=1)[-1] for line in done.stdout.splitlines()
            if line.strip()]


def op_of(path):
    return re.search(r"kernels/(\w+)/lib\w+\.a$", path).group(1)


class SymbolsTest(unittest.TestCase):
    archives = {}

    def test_hand_written_ops_use_no_library(self):
        self.assertGreater(len(self.archives), 20)
        for op, path in self.archives.items():
            if op == ALLOWED:
                continue
            names = names_of(path)
            with self.subTest(op=op):
                # It is a CUDA build: the op's CUDA side is there.
                self.assertTrue(any("tapeline::cuda::" in n for n in names))
                self.assertEqual([n for n in names if LIBRARIES.search(n)], [])

    def test_matmul_calls_cublas(self):
        names = names_of(self.archives[ALLOWED])
        self.assertIn("cublasLtMatmul", names)

    def test_names_are_recognised(self):
        for name in ("U cublasLtMatmul", "W void cub::DeviceScan::Run()",
                     "W thrust::sort<int*>(int*)", "t cutlass::Kernel2<X>()",
                     "W cute::copy<int>()", "U cudnnCreate"):
            self.assertTrue(LIBRARIES.search(name), name)
        for name in ("T tapeline::cuda::rope_forward()", "U cudaLaunchKernel",
                     "W execute::run()", "W subcub::f()"):
            self.assertFalse(LIBRARIES.search(name), name)


if __name__ == "__main__":
    SymbolsTest.archives = {
        op_of(path): path for path in sys.argv[1:] if path.endswith(".a")}
    unittest.main(argv=sys.argv[:1])
