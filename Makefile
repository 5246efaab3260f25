# Everything here sets up its own virtual environment in .venv; nothing needs to be installed by hand
# but Python 3.11 or newer and make.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo quick test soak mutants lint format bench figures docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.has-lab ## See the library's main job at work
	$(BIN)/eigenstep demo

# What `make quick` runs: core, the oracles with few steps, the optimizer without its longest tests, and a taste of the
# rest.
QUICK := tests/core tests/oracles tests/optim tests/search/test_search.py tests/manifold/test_minimize.py \
	tests/inference/test_gaussian.py lab/tests/test_models.py lab/tests/train/test_trainer.py
LONG := adversaries bounded contract device portrait storage trainers

quick: $(VENV)/.has-lab $(VENV)/.has-dev ## Run the tests that find most mistakes, in a minute and a half
	EIGENSTEP_ORACLE_STEPS=6 $(BIN)/pytest -n auto -m "not slow" $(QUICK) \
		$(LONG:%=--ignore=tests/optim/test_%.py) $(PYTEST_ARGS)

test: $(VENV)/.has-lab $(VENV)/.has-dev $(VENV)/.has-trainers $(VENV)/.has-cluster ## Run every test, in parallel (PYTEST_ARGS="-k name" selects)
	$(BIN)/pytest -n auto --dist worksteal $(PYTEST_ARGS)

soak: $(VENV)/.has-lab ## Try thousands of random configurations for 15 minutes: does anything break?
	$(BIN)/eigenstep soak --minutes 15 --seed 0 $(SOAK)

mutants: $(VENV)/.has-dev $(VENV)/.has-mutants ## Change the arithmetic in thousands of small ways: do the tests notice? Takes an hour or two (MUTANTS=name selects)
	$(BIN)/python tests/oracles/mutants.py $(MUTANTS)

lint: $(VENV)/.has-lab $(VENV)/.has-dev ## Check style, docstrings, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.has-dev ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.has-lab ## Run the benchmarks; results go to runs/
	$(BIN)/eigenstep bench all

figures: $(VENV)/.has-lab ## Reproduce the paper's figures, with verdicts; results go to runs/reproduce/
	$(BIN)/eigenstep reproduce all --quick

docs: $(VENV)/.has-docs ## Build the documentation site into site/
	$(BIN)/mkdocs build --strict --quiet

clean: ## Remove the environment, caches and built files (runs/ stays)
	rm -rf $(VENV) build dist site mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first, pinned: an open range can pull gigabytes of CUDA libraries.
$(VENV)/.has-torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	@touch $@

# The laboratory, which provides the command line, with everything that it compares with. What laplace-torch asks for
# would pull torchvision, and pypop7 a hundred packages, of which they need nothing.
$(VENV)/.has-lab: $(VENV)/.has-search lab/pyproject.toml
	$(PIP) --editable "lab[peers]"
	$(PIP) --no-deps laplace-torch curvlinops-for-pytorch backpack-for-pytorch asdfghjkl einconv unfoldNd torchmetrics \
		lightning-utilities einops pypop7
	@touch $@

# Trainers; some would pull torchvision or CUDA kernels, of which their optimizers need nothing.
$(VENV)/.has-trainers: $(VENV)/.has-torch pyproject.toml
	$(PIP) --editable ".[trainers]"
	$(PIP) --no-deps timm axolotl addict torchtitan torchdata torch_checkpointing spmd_types tyro typeguard einops
	@touch $@

# .has-EXTRA: the package itself, editable, with one extra of pyproject.toml.
$(VENV)/.has-%: $(VENV)/.has-torch pyproject.toml
	$(PIP) --editable ".[$*]"
	@touch $@
