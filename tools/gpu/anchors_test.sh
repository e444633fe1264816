#!/bin/sh
# anchors.py where it cannot measure: one line, and the exit code that says so.
set -u
script="$PWD/tools/gpu/anchors.py"
cd "$(mktemp -d)" || exit 2
mkdir torch
export PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1
failures=0
# expect CODE TEXT FILE
expect() {
  code=0
  python3 "$script" "$3" > out 2> err || code=$?
  if [ $code != "$1" ] || [ "$(wc -l < err)" != 1 ] || ! grep -qF "$2" err ||
    [ -s out ]; then
    echo "anchors.py $3: want $1 and one line with '$2', got $code:"
    cat out err
    failures=1
  fi
}
cat > good.jsonl <<'ROWS'
{"op": "env", "device": "a GPU"}
{"op": "gemm", "impl": "cublas", "shape": {"m": 8192, "n": 8192, "k": 8192}, "us": 1500}
{"op": "rmsnorm_fwd", "impl": "torch_F.rms_norm", "shape": {"T": 16384, "H": 7168}, "us": 120}
{"op": "permute_fwd", "impl": "torch_index_select", "shape": {"T": 8192, "H": 7168, "k": 8}, "us": 400}
ROWS
echo 'raise ImportError("No module named torch")' > torch/__init__.py
expect 2 "no PyTorch: No module named torch" good.jsonl
: > empty.jsonl
expect 2 "empty.jsonl: no row of gemm by cublas" empty.jsonl
head -3 good.jsonl > short.jsonl
expect 2 "short.jsonl: no row of permute_fwd" short.jsonl
expect 2 "none.jsonl: No such file" none.jsonl
expect 2 ".: Is a directory" .
echo '[1]' > list.jsonl
expect 2 "list.jsonl: a line is not a JSON object" list.jsonl
echo '{"op":' > cut.jsonl
expect 2 "cut.jsonl: " cut.jsonl
cat > torch/__init__.py <<'TORCH'
class cuda:
    is_available = staticmethod(lambda: False)
TORCH
expect 3 "no GPU" good.jsonl
exit $failures
