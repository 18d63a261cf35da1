#!/usr/bin/env bash
# What a GPU runner executes: run every cell that the installed packages allow, write evidence and MATRIX.md, print the table.
# Works offline; uses the packages that are there and says which rows are untested.
# usage: ci/gpu.sh OUT_DIR [attnmatrix run options...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1; shift
python=${PYTHON:-python3}
mkdir -p "$out/evidence"
"$python" -c 'import attnmatrix.matrix' 2>/dev/null || "$python" -m pip install --quiet --no-deps --no-build-isolation --editable . || exit 2
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())' || exit 2
"$python" -m attnmatrix.matrix list backends
"$python" -m attnmatrix.matrix run --device cuda --evidence "$out/evidence/gpu.jsonl" "$@"
code=$?
"$python" -m attnmatrix.matrix render --evidence "$out/evidence" --out "$out/MATRIX.md" || exit 2
exit $code
