#!/usr/bin/env bash
# Create a virtual environment and install the project with the kernels that run on a CPU.
# usage: ci/install.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --constraint ci/constraints-cpu.txt --editable '.[dev,kernels]' triton
# sglang's wheel holds kernel files that need torch and triton alone; its own dependencies are several GB.
"$venv/bin/python" -m pip install --quiet --no-deps -r ci/kernels-no-deps.txt
