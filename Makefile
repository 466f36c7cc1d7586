# The front door. Each target sets up what it needs: `make demo` on a fresh clone is enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-lab test-svm test-quick test-device test-gpu test-newest test-engines release-check release check budget format bench docs clean

help:
	@echo "make demo    train on real images over 2 processes, and compare with 1 (about a minute)"
	@echo "make test    run the tests (about 7 minutes on two cores)"
	@echo "make test-lab    run lab/tests and all that is long (minutes)"
	@echo "make test-svm    run svm/tests"
	@echo "make test-device run all of tests/device, on an emulated accelerator (minutes; needs g++)"
	@echo "make test-gpu    the same on a real accelerator, with step times: DEVICE=cuda; four minutes; writes a report to be sent to us"
	@echo "make test-quick  run pure logic (about a minute): no process, no compiler"
	@echo "make test-newest  test against the newest torch and frameworks, in an environment of its own (several GB)"
	@echo "make test-engines install Slurm (as root, by apt-get) and Ray, and train under them, torchrun and what Kubernetes does (minutes)"
	@echo "make release-check  install the wheel into empty environments and use it: PYTHONS='python3.10 python3.13'"
	@echo "make release  build all distributions from the tag of this commit into dist, check them, write the notes"
	@echo "make check   ruff, mypy --strict, import-linter, the rules of prose and of the house"
	@echo "make format  let ruff format and fix what it can"
	@echo "make bench   run the experiments (an hour or more; results land in lab/results)"
	@echo "make docs    build the docs site into build/site, strictly"
	@echo "make clean   remove .venv and caches"

# hatchling first and no build isolation: so the build itself is pinned as well.
$(STAMP): pyproject.toml adasum/pyproject.toml lab/pyproject.toml lossy/pyproject.toml plan/pyproject.toml recipes/pyproject.toml servers/pyproject.toml svm/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt hatchling
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
	  --no-build-isolation -e '.[all,dev,docs]' -e adasum -e lossy -e plan -e recipes -e servers -e lab -e svm
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/paceline demo $(ARGS)

# One more worker than cores: tests of lost peers, launches and emulated links mostly wait. With six on two cores, both are
# always busy, everything takes longer, and ranks miss deadlines.
WORKERS := $(shell expr $$(nproc) + 1)
unexport PYTHONDONTWRITEBYTECODE  # or each of some 500 interpreters compiles the package and its tests again

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not lab and not engines" $(ARGS)

# All of lab/tests, and what is long elsewhere: whole experiments, peers, thousands of schedules.
test-lab: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile=explore -m "not engines" $(ARGS) lab/tests
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile=explore -m lab $(ARGS) tests adasum/tests lossy/tests plan/tests recipes/tests servers/tests svm/tests

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

# Not what we pin but what a user gets today; red here means that a release of theirs has changed something. The registry has
# torch's newest release only as a CUDA build, several GB, which runs on the CPU as well. A cap on pip's releases is lifted.
NEWEST := tests/ddp/test_against_torch.py tests/ddp/test_compile.py tests/ddp/test_torch_surface.py tests/ddp/test_tensor_parallel.py \
  tests/integrations tests/launch/test_clusters.py
# In one process: Ray Train takes the newest of several clusters on a machine for its own, and waits for the others in vain.
NEWEST_RAY := tests/integrations/test_ray_train.py
test-newest:
	@echo "test-newest: torch's newest release is a CUDA build of several GB; docs/versions.md says what the last run found"
	$(PYTHON) -m venv $(VENV)-newest
	PIP_CONSTRAINT=/dev/null $(VENV)-newest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade torch \
	  -e '.[all]' -e adasum -e lossy -e plan -e recipes -e servers -e lab -e svm pytest pytest-rerunfailures pytest-timeout \
	  pytest-xdist hypothesis pyyaml skops accelerate pytorch-lightning transformers 'ray[train]'
	$(VENV)-newest/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not lab" $(NEWEST) --ignore $(NEWEST_RAY) $(ARGS)
	$(VENV)-newest/bin/python -m pytest $(NEWEST_RAY) $(ARGS)
	$(VENV)-newest/bin/python -m pytest tests/journeys/test_docs.py -k guide/ray.md $(ARGS)

# Elastic trainings whose ranks an engine starts. What they need beside us lies in build/engines, so that no other test sees it.
ENGINES := build/engines
test-engines: $(STAMP)
	which slurmctld slurmd || apt-get install --yes --no-install-recommends slurm-wlm
	test -e $(ENGINES)/ray || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --target $(ENGINES) \
	  -c constraints.txt ray dnslib kubernetes-validate
	PYTHONPATH=$(CURDIR)/$(ENGINES) $(BIN)/python -m pytest -m engines lab/tests/engines $(ARGS)

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
