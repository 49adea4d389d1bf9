# Two commands to know: `make train` and `make test`.  Both install into .venv first, if they have to.
PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/pip --disable-pip-version-check install --quiet
SPECIFIED := pyproject.toml constraints.txt

.PHONY: train test lint bench clean

train: .venv/installed
	$(BIN)/megabatch train $(ARGS)

test: lint
	$(BIN)/pytest $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# PHOTOS=folder, of class/photo.jpg, for bench input: no photos come with the code.
bench: .venv/installed-dev
	$(BIN)/megabatch bench train --json bench-train.json
	$(BIN)/megabatch bench allreduce --json bench-allreduce.json
	$(BIN)/megabatch bench optimizer --json bench-optimizer.json
	$(BIN)/megabatch bench planning --json bench-planning.json
	$(BIN)/megabatch bench startup --json bench-startup.json
	$(if $(PHOTOS),$(BIN)/megabatch bench input --source $(PHOTOS) --json bench-input.json)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist bench-*.json

.venv/installed: $(SPECIFIED)
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps torchvision timm
	touch $@
