# Train Less, from a bare machine with Python 3.11 to 3.13 and pip: `make demo`.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
# Huge pages: a training step on CPUs spends up to a fifth of its time in page faults without them.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-timing test-peers claims mutants bench lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## train a tiny reservoir translator, a few minutes on two CPU cores
	$(BIN)/python -m reservoir.train --config=configs/wmt_ffn_res.py:tiny --workdir=runs/demo

test: lint ## lint, then the quick tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15

test-slow: $(VENV)/.dev ## the tests that take seconds, then the tests that take minutes
	$(BIN)/python -m pytest -m 'medium and not slow' -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadfile --durations=15

test-timing: $(VENV)/.dev ## the test that compares seconds, three minutes on an idle machine
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m timing

test-peers: $(VENV)/.peers ## tests that compare with transformers and peft, which are installed first
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m peers

mutants: $(VENV)/.mutants ## mutation testing of metrics, verdicts and the training step, half an hour; see tests/mutants.py
	rm -rf mutants
	$(BIN)/python -m tests.mutants

claims: $(VENV)/.run ## write results/CLAIMS.md from the runs that are kept in results/; trains nothing
	for folder in $(patsubst %/claims.csv,%,$(wildcard results/*/*/claims.csv)); do \
	  set -- $$(echo $$folder | tr / ' ') && \
	  $(BIN)/python -m $$2.reproduce claims --scale=$$3 --kept --out=$$folder || exit; done
	$(BIN)/python -m benchmarks.claims

bench: $(VENV)/.bench ## compare times with PyTorch and other baselines; see benchmarks/README.md
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.reservoir_step
	$(BIN)/python -m benchmarks.loop_overhead
	$(BIN)/python -m benchmarks.two_processes
	$(BIN)/python -m benchmarks.explicit
	$(BIN)/python -m benchmarks.gmlp
	$(BIN)/python -m benchmarks.lora
	$(BIN)/python -m benchmarks.classify
	$(BIN)/python -m benchmarks.interval_coverage

lint: $(VENV)/.dev ## ruff, without changing files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## ruff, fixing files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove builds and the caches of Python, pytest and ruff
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache mutants
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Each empty file, such as .venv/.run, records when a list of packages was installed.
$(VENV)/.run: requirements.txt | $(BIN)/python
$(VENV)/.dev: requirements-dev.txt requirements.txt | $(BIN)/python
$(VENV)/.bench: benchmarks/requirements.txt $(VENV)/.run
$(VENV)/.peers: tests/requirements-peers.txt $(VENV)/.bench $(VENV)/.dev
$(VENV)/.mutants: tests/requirements-mutants.txt $(VENV)/.dev
$(VENV)/.run $(VENV)/.dev $(VENV)/.bench $(VENV)/.peers $(VENV)/.mutants:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# On Debian, `python3 -m venv` may be unable to install pip. Then use virtualenv.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: PYTHON=$(PYTHON) is not Python 3.11 to 3.13: install one, then run make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) \
	  && $(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv \
	  && PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }
