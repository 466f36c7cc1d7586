# The front door. Each target sets up what it needs: `make demo` on a fresh clone is enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-lab test-quick test-newest release-check check format bench docs clean

help:
	@echo "make demo    train on real images over 2 processes, and compare with 1 (about a minute)"
	@echo "make test    run the tests (about 6 minutes on two cores)"
	@echo "make test-lab    run the long tests of the experiments (minutes)"
	@echo "make test-quick  run the quick ones (about a minute): no commands, clusters or compilers"
	@echo "make test-newest  run the tests of frameworks with their newest releases, in an environment of its own"
	@echo "make release-check  install the wheel into empty environments and use it: PYTHONS='python3.10 python3.13'"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make format  let ruff format and fix what it can"
	@echo "make bench   run the experiments (an hour or more; results land in lab/results)"
	@echo "make docs    build the docs site into build/site, strictly"
	@echo "make clean   remove .venv and caches"

# setuptools first and no build isolation: so the build itself is pinned as well.
$(STAMP): pyproject.toml lab/pyproject.toml svm/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
	  --no-build-isolation -e '.[all,dev,docs]' -e lab -e svm
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/paceline demo $(ARGS)

# One more worker than cores: tests of lost peers, launches and emulated links mostly wait. With six on two cores, both are
# always busy, everything takes longer, and ranks miss deadlines.
WORKERS := $(shell expr $$(nproc) + 1)
unexport PYTHONDONTWRITEBYTECODE  # or each of some 500 interpreters compiles the package and its tests again

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not lab" $(ARGS)

# The long tests of `lab`: whole experiments, peers. Nothing in the product imports what they test.
test-lab: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile=explore -m lab $(ARGS)

test-quick: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m quick $(ARGS)

# Not what we pin but what a user gets today; red here means that a release of theirs has changed something.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade \
	  $$(grep ^torch== constraints.txt) -e '.[all]' -e lab -e svm pytest pytest-rerunfailures pytest-timeout pytest-xdist hypothesis pyyaml accelerate pytorch-lightning transformers
	$(VENV)-newest/bin/python -m pytest tests/integrations $(ARGS)

# What a release has to pass: sdist, wheel, and the README's lines in an environment with nothing else.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
release-check: $(STAMP)
	$(BIN)/python tests/harness/installed_smoke.py $(PYTHONS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/paceline study all --report lab/results $(ARGS)

# A link or an anchor that leads nowhere fails the build. What the pages' code blocks do is tested by `make test`.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) $(VENV)-newest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
