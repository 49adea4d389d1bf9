# Two commands to know: `make train` and `make test`.  Both install into .venv first, if they have to.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-deps
# Only files whose sha256 is in requirements/, and none that has to be built: a build would fetch what has no hash.
LOCKED := $(PIP) --require-hashes --only-binary :all:

# Tests start hundreds of processes: each would compile our files anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-fast test-lab lint wheel bench matrix audit licences clean

train: .venv/installed
	$(BIN)/megabatch train $(ARGS)

# Three processes on two cores: a good third of the time is spent waiting, for processes that start and for timeouts.
# worksteal keeps the tests of a file, and the fixtures they share, in one process until another has nothing to do.
PYTEST := $(BIN)/pytest --numprocesses=3 --dist=worksteal

test: lint
	$(PYTEST) -m "fast or ranks" $(ARGS)

# No ranks: a minute.
test-fast: lint
	$(PYTEST) -m fast $(ARGS)

# The tests of lab/: benches, chaos, fuzz, studies and the fake CUDA.
test-lab: .venv/installed-dev
	$(PYTEST) -m lab $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds dist/megabatch-*.whl with the pinned build tool.
wheel: .venv/installed
	$(BIN)/python -m hatchling build -t wheel -d dist

# PHOTOS=folder, of class/photo.jpg, for bench input: no photos come with the code.
bench: .venv/installed-dev
	$(BIN)/megabatch bench train --json bench-train.json
	$(BIN)/megabatch bench allreduce --json bench-allreduce.json
	$(BIN)/megabatch bench optimizer --json bench-optimizer.json
	$(BIN)/megabatch bench planning --json bench-planning.json
	$(BIN)/megabatch bench startup --json bench-startup.json
	$(if $(PHOTOS),$(BIN)/megabatch bench input --source $(PHOTOS) --json bench-input.json)

# Tests the wheel with each pair of Python and torch in tools/matrix.py; PAIRS="3.12:2.13.0" tests others.
matrix: .venv/installed-dev
	$(BIN)/python tools/matrix.py $(PAIRS)

# Known vulnerabilities of the pinned versions.  --strict: what could not be looked up is no clean result.
audit: .venv-audit/installed
	.venv-audit/bin/pip-audit --strict --disable-pip --progress-spinner off \
		-r requirements/train.txt -r requirements/torch.txt -r requirements/dev.txt || \
		{ echo "make audit: not clean: a package above has a known vulnerability, or the database cannot be reached"; exit 1; }

licences: .venv/installed-dev
	$(BIN)/python tools/licences.py

clean:
	rm -rf .venv .venv-audit .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist bench-*.json

# Where pip finds torch without CUDA (by --find-links or an index that it is told of), that is the one to take.
.venv/installed: pyproject.toml lab/pyproject.toml requirements/train.txt requirements/torch.txt requirements/torch-cpu.txt
	$(PYTHON) -m venv .venv
	if $(PIP) --dry-run $$(grep -o '^torch==[^ ]*' requirements/torch-cpu.txt) 2>/dev/null; \
		then $(LOCKED) -r requirements/train.txt -r requirements/torch-cpu.txt; \
		else $(LOCKED) -r requirements/train.txt -r requirements/torch.txt; fi
	$(PIP) --no-build-isolation --editable . --editable lab
	touch $@

.venv/installed-dev: .venv/installed requirements/dev.txt
	$(LOCKED) -r requirements/dev.txt
	touch $@

.venv-audit/installed: requirements/audit.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --no-deps --require-hashes --only-binary :all: -r requirements/audit.txt
	touch $@
