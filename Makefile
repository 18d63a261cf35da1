# `make matrix`: the main job. `make test`: everything. Both create .venv and install on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: matrix test lint typecheck clean

$(VENV)/installed: pyproject.toml ci/constraints-cpu.txt ci/install.sh
	bash ci/install.sh $(PYTHON) $(VENV)
	touch $@

matrix: $(VENV)/installed
	rm -rf out
	$(BIN)/attnmatrix run -n $(JOBS) --evidence out/evidence/run.jsonl; code=$$?; \
	$(BIN)/attnmatrix render --evidence out/evidence --out out/MATRIX.md && exit $$code

test: $(VENV)/installed lint typecheck
	$(BIN)/python -m pytest -q -n $(JOBS)
	$(BIN)/attnmatrix render --check
	$(BIN)/attnmatrix calibrate --check

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/installed
	$(BIN)/python ci/typecheck.py

clean:
	rm -rf $(VENV) out build *.egg-info
