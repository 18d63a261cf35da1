#!/usr/bin/env bash
# What a GPU runner executes: every cell that the installed packages allow, evidence, MATRIX.md, and the table in the terminal.
# Works offline with the packages that are there; rows whose packages are absent are listed as untested.
# usage: ci/gpu.sh OUT_DIR [attnmatrix run options, such as -n 8 or --backend B]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
python=${PYTHON:-python3}
mkdir -p "$out/evidence"
if ! "$python" -c 'import attnmatrix.matrix' 2> /dev/null; then
  "$python" -m pip install --quiet --no-deps --no-build-isolation --editable . || exit 2
fi
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())' || exit 2
"$python" -m attnmatrix.matrix list backends || exit 2
"$python" -m attnmatrix.matrix run --device cuda --evidence "$out/evidence/gpu.jsonl" "$@"
code=$?
"$python" -m attnmatrix.matrix render --evidence "$out/evidence" --out "$out/MATRIX.md" || exit 2
exit $code
