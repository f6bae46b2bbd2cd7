# Everything from a fresh clone, with Python >= 3.11, pip and make alone: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are.
# On a terminal pip shows how far it is.
PIP := $(BIN)/python -m pip install $(shell [ -t 2 ] || echo --quiet) --disable-pip-version-check --no-compile -c constraints.txt
# Where to take torch from, if not from where all else comes; PyTorch has an index of builds for CPUs alone.
TORCH_INDEX ?=
# Stamps and not the folder itself: one is there only when its install was finished, and old when a requirement changed.
STAMP := $(VENV)/.installed
RECORD ?= /tmp/zeroshard-evidence
EVIDENCE := OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support $(BIN)/python -m evidence
CORE := $(VENV)/.core

.DEFAULT_GOAL := help
.PHONY: help demo test soak gpu mutants evidence lint types layers docs figures notebooks audit check clean

help:  ## Say what can be made.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(CORE)  ## Train a small GPT with ZeRO stage 2 on two ranks, let it write, compare the stages' memory, and report.
	rm -rf runs/demo
	$(BIN)/zeroshard train --config configs/demo.toml
	$(BIN)/python examples/stages_memory.py --run runs/demo
	$(BIN)/zeroshard report runs/demo
	@echo
	$(BIN)/zeroshard generate runs/demo --prompt "If the" --temperature 0.5 --top-p 0.9 --max-new-tokens 150
	@echo
	@echo "Open runs/demo/report.html in a browser: loss, memory and speed of this run. What to try next:"
	@echo "  train on your own text:  $(BIN)/zeroshard train --config configs/demo.toml --data text --data.path FILE.txt --out runs/mine"
	@echo "  let it write more:       $(BIN)/zeroshard generate runs/demo --prompt 'The class' --temperature 0.5 --top-p 0.9"
	@echo "  which stage for 8 GPUs:  $(BIN)/zeroshard plan --model gpt2-1.5b --gpus 8 --gpu a100-80gb"

test: $(STAMP)  ## Run the tests.
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# PART: a word, for a small part of what `make test` leaves out; another word chooses another part.
soak: $(STAMP)  ## Run all of the tests: every combination where `make test` takes every pair, more fuzzing, more kills.
	$(BIN)/python -m pytest $(if $(PART),--part $(PART),--soak --kills 100) -n auto --maxprocesses 4 --dist worksteal

gpu: $(STAMP)  ## Measure what only a GPU can say, in a quarter of an hour (ARGS="--seconds 200 --only norms").
	$(BIN)/python benchmarks/gpu/quarter.py $(ARGS)

# ONLY: names of mutants, or beginnings of names with a * after them. JOBS: how many run at once.
mutants: $(STAMP)  ## Make mistakes in copies of the package, one by one; a test must see each (ONLY="norm* clip*" JOBS=2).
	PYTHONPATH=tests:tests/support $(BIN)/python -m mutants --jobs $(or $(JOBS),1) $(if $(ONLY),--only $(foreach name,$(ONLY),'$(name)'))

# ROOM: tests. RECORD: where what they run and see is kept, outside of the repository. NUM, SEED: of mistakes.
evidence: $(STAMP)  ## Find which tests see what, and mark those as redundant that others make so (ROOM=tests/optim).
	$(EVIDENCE) record $(RECORD) $(or $(ROOM),tests)
	$(EVIDENCE) try $(RECORD) --num $(or $(NUM),1000) --seed $(or $(SEED),1)
	$(EVIDENCE) choose $(RECORD) --write

lint: $(STAMP)  ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## Check types.
	$(BIN)/ty check --python $(VENV)

layers: $(STAMP)  ## Check that imports only point down.
	$(BIN)/lint-imports

docs: $(STAMP)  ## Build the documentation site into site/; a broken link fails.
	$(BIN)/zensical build --strict --clean
	find site \( -name "*.py" -o -name ruff.toml \) -delete  # what draws pages is no page

figures: $(STAMP)  ## Draw the pictures of docs/concepts.md again.
	$(BIN)/python docs/figures/draw.py

notebooks: $(STAMP)  ## Run the notebooks, store what they show, and write it as a page of the documentation.
	$(BIN)/python notebooks/execute.py notebooks/zero.ipynb
	$(BIN)/python notebooks/as_page.py notebooks/zero.ipynb docs/notebook.md

audit: $(CORE)  ## Look for known vulnerabilities in the tested versions; asks PyPI.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip-audit>=2.9"
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

check: lint types layers test  ## All of the checks.

clean:  ## Remove the virtual environment and what tools leave; runs/ and data/ stay.
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# What `make demo` needs: the package, and what draws the report.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("zeroshard needs Python 3.11 or later: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing torch and what else zeroshard needs into $(VENV): 1 to 5 minutes."
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) torch)
	$(PIP) -e ".[report]"
	@touch $@

$(STAMP): $(CORE)
	@echo "Installing what tests and checks need into $(VENV): about a minute."
	$(PIP) -e ".[dev]"
	@touch $@
