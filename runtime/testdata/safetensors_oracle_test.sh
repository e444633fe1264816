#!/bin/bash
# Reads a file that the Python writer made and lets the Python reader check what
# came out.
set -euo pipefail
oracle=runtime/testdata/safetensors_oracle.py
python3 "$oracle" make "$TEST_TMPDIR/made.safetensors"
runtime/testdata/safetensors_copy \
  "$TEST_TMPDIR/made.safetensors" "$TEST_TMPDIR/copy.safetensors"
python3 "$oracle" check "$TEST_TMPDIR/copy.safetensors"

# The checker itself tells a damaged copy.
python3 - "$TEST_TMPDIR/copy.safetensors" <<'EOF'
import sys
content = bytearray(open(sys.argv[1], "rb").read())
content[-1] ^= 1
open(sys.argv[1] + ".damaged", "wb").write(content)
EOF
if python3 "$oracle" check "$TEST_TMPDIR/copy.safetensors.damaged" 2>/dev/null
then
  echo "the checker accepts a flipped bit" >&2
  exit 1
fi
