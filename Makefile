# The front door. Each target sets up what it needs: `make demo` on a fresh clone is enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-lab test-svm test-quick test-device test-gpu test-newest release-check release check budget format bench docs clean

help:
	@echo "make demo    train on real images over 2 processes, and compare with 1 (about a minute)"
	@echo "make test    run the tests (about 9 minutes on two cores)"
	@echo "make test-lab    run lab/tests and all that is long (minutes)"
	@echo "make test-svm    run svm/tests"
	@echo "make test-device run all of tests/device, on an emulated accelerator (minutes; needs g++)"
	@echo "make test-gpu    the same on a real accelerator, with step times: DEVICE=cuda; four minutes; writes a report to be sent to us"
	@echo "make test-quick  run pure logic (about a minute): no process, no compiler"
	@echo "make test-newest  run the tests of frameworks with their newest releases, in an environment of its own"
	@echo "make release-check  install the wheel into empty environments and use it: PYTHONS='python3.10 python3.13'"
	@echo "make release  build all distributions from the tag of this commit into dist, check them, write the notes"
	@echo "make check   ruff, mypy --strict, import-linter, the rules of prose and of the house"
	@echo "make format  let ruff format and fix what it can"
	@echo "make bench   run the experiments (an hour or more; results land in lab/results)"
	@echo "make docs    build the docs site into build/site, strictly"
	@echo "make clean   remove .venv and caches"

# hatchling first and no build isolation: so the build itself is pinned as well.
$(STAMP): pyproject.toml lab/pyproject.toml lossy/pyproject.toml plan/pyproject.toml servers/pyproject.toml svm/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt hatchling
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
	  --no-build-isolation -e '.[all,dev,docs]' -e lossy -e plan -e servers -e lab -e svm
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/paceline demo $(ARGS)

# One more worker than cores: tests of lost peers, launches and emulated links mostly wait. With six on two cores, both are
# always busy, everything takes longer, and ranks miss deadlines.
WORKERS := $(shell expr $$(nproc) + 1)
unexport PYTHONDONTWRITEBYTECODE  # or each of some 500 interpreters compiles the package and its tests again

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not lab" $(ARGS)

# All of lab/tests, and what is long elsewhere: whole experiments, peers, thousands of schedules.
test-lab: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile=explore $(ARGS) lab/tests
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile=explore -m lab $(ARGS) tests lossy/tests plan/tests servers/tests svm/tests

test-svm: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS) svm/tests

# All that runs on the emulated accelerator; `make test` runs what is short of it, `make test-lab` the rest.
test-device: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS) tests/device

# The device's suites on a real accelerator with its own backend; exit code 2 without one.
DEVICE ?= cuda
test-gpu: $(STAMP)
	cd tests && $(abspath $(BIN))/python -m device.real --device $(DEVICE) --report $(CURDIR)/paceline-$(DEVICE).json $(ARGS)

# What carries none of the marks of tests/harness/start_guard.py, and fails if it starts anything.
test-quick: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --quick $(ARGS)

# Not what we pin but what a user gets today; red here means that a release of theirs has changed something.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade \
	  $$(grep ^torch== constraints.txt) -e '.[all]' -e lossy -e plan -e servers -e lab -e svm pytest pytest-rerunfailures pytest-timeout pytest-xdist hypothesis pyyaml accelerate pytorch-lightning transformers \
	  'ray[train]'
	$(VENV)-newest/bin/python -m pytest tests/integrations tests/launch/test_clusters.py $(ARGS)
	$(VENV)-newest/bin/python -m pytest tests/journeys/test_docs.py -k guide/ray.md $(ARGS)

# What a release has to pass: sdist, wheel, and the README's lines in an environment with nothing else.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
release-check: $(STAMP)
	$(BIN)/python tests/harness/installed_smoke.py $(PYTHONS)

# Publishes nothing: CONTRIBUTING.md has the one command that does.
release: $(STAMP)
	cd tests && $(abspath $(BIN))/python -m harness.release $(CURDIR)/dist
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt twine
	$(VENV)-release/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/python tests/harness/installed_smoke.py $(PYTHONS)
	@echo "dist/ is ready, with NOTES.md; CONTRIBUTING.md says how to publish it"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/harness/prose_lint.py
	$(BIN)/python tests/harness/house_lint.py

# Lines, files and public names of every room; `make check` holds them to tests/harness/house_budget.json.
budget: $(STAMP)
	@$(BIN)/python tests/harness/house_lint.py --print

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
	rm -rf $(VENV) $(VENV)-newest $(VENV)-release build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
