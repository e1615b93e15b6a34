# Every target installs what it needs first, on a fresh machine too: see tools/in_env.py.
PYTHON ?= python3
RUN = $(PYTHON) tools/in_env.py --
TEST = $(PYTHON) tools/in_env.py --extra test --

.DEFAULT_GOAL := help
.PHONY: help demo test lint format pytest clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## simulate a small kernel: its result, bank conflicts and races
	@$(RUN) -m layouts.simulator.demo

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

clean: ## remove what builds and tools left, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
