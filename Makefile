# Two commands: `make bench` runs the main job on this machine, `make test` runs every test. Both set up .venv first.
.PHONY: bench test lint setup clean

PYTHON := .venv/bin/python

setup:
	@./setup.sh

bench: setup
	.venv/bin/makespan run examples/bfcl.yaml
	.venv/bin/makespan run examples/bfcl_model.yaml
	.venv/bin/makespan ablate examples/traces/bfcl.jsonl.gz --replay --slots 2 --seeds 1 --rungs coupled,+parking,+caas --figure runs/ablation.svg

test: setup lint
	$(PYTHON) -m pytest

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
