#!/bin/bash
# docs/config.md is what the table of settings says.
set -euo pipefail
if ! diff -u docs/config.md <(tools/config/print_docs); then
  echo "stale; run: bazel run //tools/config:print_docs >docs/config.md" >&2
  exit 1
fi
