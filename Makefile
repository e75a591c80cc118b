# The two commands:  make book  (build the book)  and  make test  (run every test).
# `make help` lists the rest. Needs Python >= 3.11 with venv, git and make.

PY   ?= python3
PORT ?= 8000

VENV := .venv
BIN  := $(VENV)/bin
HTML := build/_build/html
PIP  := $(BIN)/python -m pip install -q --disable-pip-version-check

# One thread and a fixed hash seed: stored outputs must not depend on the machine.
export OPENBLAS_NUM_THREADS := 1
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export PYTHONHASHSEED := 0
# The Jupyter tools warn about their own old settings folders; this asks for the current ones.
export JUPYTER_PLATFORM_DIRS := 1

.DEFAULT_GOAL := help
.PHONY: help book test serve lab outputs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.done: requirements.lock pyproject.toml
	@$(PY) -c 'import sys; sys.exit("k3np needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Say: make PY=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Making $(VENV) (once; about a minute) ..."
	@rm -f $@
	$(PY) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c "import matplotlib.font_manager"  # else the first chapter says it is building a font cache
	@touch $@

book: $(VENV)/.done ## execute the notebooks and build the book
	@$(BIN)/python tools/build_book.py --html $(HTML)

test: $(VENV)/.done ## run every test, the notebooks' stored outputs included
	@$(BIN)/python -m pytest --all-kinds

serve: book ## build the book and serve it on 127.0.0.1 (PORT=8000)
	@echo "Open http://127.0.0.1:$(PORT)/  (Ctrl-C stops the server)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory $(HTML)

lab: $(VENV)/.done ## open the chapters in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=notebooks

outputs: $(VENV)/.done ## execute the notebooks in place and store their outputs
	$(BIN)/python tools/execute.py notebooks/*.ipynb

lint: $(VENV)/.done ## check style and spelling
	$(BIN)/ruff check .
	$(BIN)/codespell book k3np tests tools $(wildcard benchmarks) *.md

clean: ## remove what was built (not .venv)
	rm -rf build dist .pytest_cache .ruff_cache
