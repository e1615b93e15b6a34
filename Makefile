# Every target installs what it needs first, on a fresh machine too: see tools/in_env.py.
PYTHON ?= python3
RUN = $(PYTHON) tools/in_env.py --
TEST = $(PYTHON) tools/in_env.py --extra test --
BENCH = $(PYTHON) tools/in_env.py --extra bench --

.DEFAULT_GOAL := help
.PHONY: help demo test lint format pytest gpu-test bench docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## run attention on what the machine has, check it, and say how exact and how fast it is
	@$(RUN) -m cute_attn.demo

test: lint pytest ## everything that CI checks; needs no GPU

lint: ## formatting, ruff and mypy
	@$(TEST) -m ruff format --check .
	@$(TEST) -m ruff check .
	@$(TEST) -m mypy

format: ## reformat and mend what ruff can
	@$(TEST) -m ruff format .
	@$(TEST) -m ruff check --fix .

pytest: ## the tests alone, the built and installed wheel's among them
	@$(TEST) -m pytest

gpu-test: ## the tests that need a GPU, recorded in benchmarks/results/gpu_tests.json
	@$(TEST) -m tests.gpu.record

bench: ## speed and host time beside the peers, on a GPU, into benchmarks/results
	@$(BENCH) -m benchmarks prefill --json benchmarks/results/prefill.json
	@$(BENCH) -m benchmarks decode --configs seed --json benchmarks/results/decode.json
	@$(BENCH) -m benchmarks decode-sweep --json benchmarks/results/decode_sweep.json
	@$(BENCH) -m benchmarks host --json benchmarks/results/host.json
	@$(BENCH) -m benchmarks picture

docs: ## pictures, and the README's figures from benchmarks/results
	@$(RUN) -m tools.draw_pictures
	@$(RUN) -m tools.update_readme

clean: ## remove what builds and tools left, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
