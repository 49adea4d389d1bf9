# The two main commands are `make train` and `make test`.  Both install into .venv first if necessary.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-deps
# Only wheels whose sha256 is in requirements/.  Nothing is built, because a build would download files without a hash.
LOCKED := $(PIP) --require-hashes --only-binary :all:

# Tests start hundreds of processes, each of which would otherwise compile our files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-fast test-lab lint wheel ci bench matrix audit licences docs clean

train: .venv/installed
	$(BIN)/megabatch train $(ARGS)

# Three processes on two cores: tests wait for over a third of the time, for processes that start and for timeouts.
# worksteal keeps the tests of a file and their fixtures in one process until another process is idle.
PYTEST := $(BIN)/pytest --numprocesses=3 --dist=worksteal

test: lint
	$(PYTEST) -m "fast or ranks" $(ARGS)

# Tests without ranks: one minute.
test-fast: lint
	$(PYTEST) -m fast $(ARGS)

# The tests of lab/: benches, chaos, fuzz, studies and the fake CUDA.
test-lab: .venv/installed-dev
	$(PYTEST) -m lab $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/prose.py

# Builds dist/megabatch-*.whl with the pinned build tool.
wheel: .venv/installed
	$(BIN)/python -m hatchling build -t wheel -d dist

# Installs and tests the checkout as on a clean machine.
ci:
	.ci/run

# PHOTOS=folder (of class/photo.jpg) adds bench input: the repository has no photos.
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

# Known vulnerabilities of the pinned versions.  --strict: a failed lookup is an error.
audit: .venv-audit/installed
	.venv-audit/bin/pip-audit --strict --disable-pip --progress-spinner off \
		-r requirements/train.txt -r requirements/torch.txt -r requirements/dev.txt || \
		{ echo "make audit: not clean: a package above has a known vulnerability, or the database cannot be reached"; exit 1; }

licences: .venv/installed-dev
	$(BIN)/python tools/licences.py

# Builds the documentation and the API reference into site/; a broken internal link is an error.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean --quiet

clean:
	rm -rf .venv .venv-audit .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist bench-*.json

# Prefer torch without CUDA if pip finds it, through --find-links or a configured index.
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

.venv-docs/installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --no-deps --require-hashes --only-binary :all: -r requirements/docs.txt
	touch $@
