# Every target makes the virtual environment it needs; nothing has to be installed before.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test evidence faults planted scale wheel lint docs browser bench format clean
.DEFAULT_GOAL := demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip hatchling
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## what privacy costs women and men on Adult: five rules, three seeds
	$(BIN)/evenclip compare --seeds 3 --out demo

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

evidence: $(READY)  ## long checks that `make test` leaves out: memory, and a page that trains for a minute
	$(BIN)/python -m pytest tests/evidence $(ARGS)

faults: $(READY)  ## the long campaign of damaged files, bad input and kills; fills docs/reliability.md
	$(BIN)/python tests/faults/campaign.py $(ARGS)

planted: $(READY)  ## plant one fault after the other in a copy of the package; its tests must fail
	$(BIN)/python tests/planted.py $(ARGS)

browser: $(READY)  ## the report in a real browser; needs Chromium and npm
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	npm install --silent --no-fund --no-audit --fetch-retries 1 --prefix .browser axe-core \
	  || echo "axe-core could not be had from npm: what it looks for is left out"
	$(BIN)/python -m pytest tests/browser

scale: $(READY)  ## sweeps on a Ray cluster of two nodes, and as Slurm's jobs
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray,slurm]'
	$(BIN)/python -m pytest tests/sweep/test_executor.py tests/sweep/test_ray.py tests/sweep/test_slurm.py

EMPTY := build/empty
wheel: $(READY)  ## build it, install the wheel with every extra into an empty environment, and use it
	$(BIN)/python -m pip install --quiet -c constraints.txt build
	rm -rf $(EMPTY) build/dist
	$(BIN)/python -m build --outdir build/dist .
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet -c constraints.txt torch
	$(EMPTY)/bin/python -m pip install --quiet -c constraints.txt "$$(echo build/dist/*.whl)[all,dev]"
	cd $(EMPTY) && bin/evenclip compare toy --seeds 1 --epochs 1 --out report && test -s report/report.html
	$(EMPTY)/bin/python -m pytest tests/training/logs

docs: $(READY)  ## the documentation as a site, in build/docs; a warning is an error
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## step time beside plain SGD and Opacus, floors, growth; fills docs/performance.md
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/floor.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python -m pip install --quiet transformers  # its models are measured; nothing else needs it
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/page.py

clean:
	rm -rf $(VENV) .browser demo build dist .pytest_cache .mypy_cache .ruff_cache
