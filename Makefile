# Two commands do everything, set-up included: `make demo` and `make test`. `make help` lists the rest.
.DEFAULT_GOAL := help
PY := .venv/bin/python
# Tests and the demo run on the CPU wherever they are; GPU work has its own targets.
CPU := env JAX_PLATFORMS=cpu
WORKERS ?= auto

.PHONY: help demo test test-slow test-gpu sanitize bench report lint format wheel clean setup setup-test setup-dev

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: setup  ## a quantization-aware training study on the CPU: a table, a plot and a checkpoint in runs/demo
	$(CPU) $(PY) -m jlaqat.cli study --config study/demo --directory runs/demo

test: setup-test  ## the tests that CI runs (under 15 minutes on 2 cores)
	$(CPU) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

OP_TESTS := tests/test_ops.py tests/test_ops_transforms.py

test-slow: setup-test  ## the tests marked slow, and all tests of the op, compiled as users' programs are
	$(CPU) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m slow $(OP_TESTS:%=--ignore=%)
	$(CPU) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(OP_TESTS)

test-gpu: setup-test  ## the tests that need an NVIDIA GPU
	env JAX_PLATFORMS=cuda $(PY) -m pytest -q tests/gpu

sanitize: setup-test  ## every kernel under compute-sanitizer, on an NVIDIA GPU (about 2 minutes)
	$(PY) tests/gpu/sanitize.py

bench: setup-test  ## the kernels' times and their peers', on an NVIDIA GPU (a quarter of an hour on 16 cores; resumes), then the report
	$(PY) benchmarks/ceilings.py
	test -d benchmarks/fla_configs || $(PY) benchmarks/fla_configs.py
	test -d benchmarks/fla_configs || $(PY) benchmarks/bench_kernels.py --backends fla --stages targets --search-fla
	$(PY) benchmarks/bench_kernels.py --jobs 12
	$(PY) benchmarks/counters.py
	$(PY) benchmarks/report.py

report: setup-test  ## docs/performance.md and its plots, from the JSON in benchmarks/results
	$(PY) benchmarks/report.py

lint: setup-test  ## style, import order and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup-test  ## rewrite the code in the project's style
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

wheel: setup-test  ## build dist/*.whl and the source archive
	$(PY) -m build

clean:  ## remove what was built, the environment included
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup:
	@scripts/setup.sh
setup-test:
	@scripts/setup.sh test
setup-dev:  ## the environment for working on jlaqat, with the pre-commit hooks
	@scripts/setup.sh dev
	.venv/bin/pre-commit install
