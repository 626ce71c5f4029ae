# Two commands for a newcomer: `make train` and `make test`. Everything lives in .venv; `make clean` removes it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORES  := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

BROWSER := $(shell for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	command -v $$name && break; done)

COMPILER := $(shell command -v $(firstword $(CC)))

# A stamp per set of packages: installing again is needed only when pyproject.toml or a compiled library changes.
BASE := $(VENV)/.installed
FULL := $(VENV)/.installed-dev
# The set of versions that is tested. An install by hand takes whatever fits, and the torch that is there.
CONSTRAINTS := packaging/constraints.txt
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)
COMPILED := hatch_build.py $(wildcard csrc/*.[ch] csrc/winograd/*.[ch])

.PHONY: help train test lint format slow gpu external native fuzz faults soak docs docs-serve constraints wheel matrix audit sbom clean

help:
	@echo "make train   install and train the quickstart recipe (CPU, about a minute)"
	@echo "make test    install and run the whole test suite"
	@echo "make lint    formatting, lint, types, import direction, unique names"
	@echo "make format  apply the formatter and the safe lint fixes"
	@echo "make slow    the tests that take minutes"
	@echo "make gpu     the tests that need a CUDA GPU, in the environment of PYTHON"
	@echo "make external  the tests against third-party programs; each names what to install"
	@echo "make native  compile the fast JPEG decoder and convolutions in place; an install does it too, where there is a C compiler"
	@echo "make fuzz    mutated files for every parser (FUZZ_SECONDS), and a million for that decoder, under sanitizers"
	@echo "make faults  the fault matrix: kills, power loss, failing disks, ...; 40 minutes on two cores"
	@echo "make soak    an hour of random faults (SOAK_MINUTES)"
	@echo "make docs    the documentation site, built strictly: build/site; make docs-serve shows it while you write"
	@echo "make constraints  renew packaging/constraints.txt, the versions that make train, make test and CI install"
	@echo "make matrix  the suite with every supported torch, in an environment each; ARGS=\"--only 3.11:2.15\" for one"
	@echo "make wheel   the wheel with the compiled libraries, and the source archive: dist/"
	@echo "make audit   known vulnerabilities of the installed packages, by pip-audit"
	@echo "make sbom    a software bill of materials: dist/reconv.cdx.json (CycloneDX)"
	@echo "make clean   remove .venv and caches; runs/ stays"

train: $(BASE)
	$(BIN)/reconv train quickstart

# malloc keeps what was freed: otherwise each larger tensor is new memory, which the kernel has to map and to clear.
MALLOC := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912

# Compiled test modules are kept, also where the environment says not to write them: with each assertion to rewrite, a
# worker takes 10 s longer to collect the tests. `make clean` removes them.
BYTECODE := PYTHONDONTWRITEBYTECODE=

# One worker more than cores: tests wait for processes and disks a third of their time.
WORKERS ?= $$(($(CORES) + 1))

# One torch thread per worker: xdist already uses every core. Where a run asks for more, they sleep while they wait for
# each other: on a busy core, waiting took four fifths of such a test.
test: $(FULL)
	$(if $(BROWSER),,@echo "No Chromium or Chrome on the PATH: the report's tests in a browser are left out.")
	$(if $(COMPILER),,@echo "No C compiler on the PATH: the tests of the compiled libraries are left out.")
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(MALLOC) $(BYTECODE) $(BIN)/python -m pytest \
		-n $(WORKERS) --dist worksteal --ignore tests/external -m "not slow and not gpu and not external$(if $(BROWSER),, and not browser)$(if $(COMPILER),, and not native)" $(ARGS)

slow: $(FULL)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist worksteal -m slow $(ARGS)

# On a GPU machine torch is usually there already, so no .venv is made.
gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

external: $(FULL)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m external tests/external $(ARGS)

lint: $(FULL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_source.py

format: $(FULL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml $(CONSTRAINTS) $(COMPILED) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(FULL): pyproject.toml $(CONSTRAINTS) $(COMPILED) | $(BIN)/python
	$(INSTALL) -e ".[test,dev]"
	@touch $(BASE) $@

native: $(FULL)
	$(BIN)/python hatch_build.py

FUZZ_SECONDS ?= 60

fuzz: $(FULL)
	$(BIN)/python tests/fuzz --seconds $(FUZZ_SECONDS) $(ARGS)
	$(if $(COMPILER),csrc/fuzz/run,@echo "No C compiler on the PATH: the compiled JPEG decoder is left out.")

SOAK_MINUTES ?= 60

faults: $(FULL)
	$(BIN)/python tests/faults/matrix --workers $(CORES) --soak-minutes 2 --markdown docs/results/faults.md $(ARGS)

soak: $(FULL)
	$(BIN)/python tests/faults/matrix --workers $(CORES) --classes soak --soak-minutes $(SOAK_MINUTES) $(ARGS)

DOCS := $(VENV)/.installed-docs

$(DOCS): pyproject.toml $(CONSTRAINTS) | $(BASE)
	$(INSTALL) -q -e ".[docs]"
	@touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/generators/outside_requests.py build/site
	@echo "build/site"

docs-serve: $(DOCS)
	$(BIN)/mkdocs serve

N ?= 40


# Resolve everything again, in an environment that is removed afterwards, with the newest releases that fit.
constraints:
	$(PYTHON) packaging/renew_constraints.py

# Tools about the packages of .venv have a place of their own, so that they are not among them.
AUDIT := .venv-audit

$(AUDIT)/.installed: packaging/audit-requirements.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --disable-pip-version-check -q -r $<
	@touch $@

audit: $(BASE) $(AUDIT)/.installed
	$(AUDIT)/bin/python packaging/audit.py $(BIN)/python

sbom: $(BASE) $(AUDIT)/.installed
	@mkdir -p build dist
	sed "s/^dynamic = .*/version = \"$$($(BIN)/python -c 'import reconv; print(reconv.__version__)')\"/" pyproject.toml \
		> build/pyproject.toml
	$(AUDIT)/bin/cyclonedx-py environment --pyproject build/pyproject.toml --output-reproducible --of JSON \
		-o dist/reconv.cdx.json $(BIN)/python
	@echo "dist/reconv.cdx.json"

# The tools of releases have a place of their own too.
RELEASE := .venv-release

$(RELEASE)/.installed: packaging/release-requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check -q -r $<
	@touch $@

wheel: $(RELEASE)/.installed
	rm -f dist/reconv-*.whl dist/reconv-*.tar.gz
	$(RELEASE)/bin/python packaging/build_wheel.py

matrix:
	$(PYTHON) packaging/matrix.py $(ARGS)

clean:
	rm -f reconv/data/decode/_jpeg.so reconv/inference/backends/_winograd.so
	rm -rf $(VENV) $(AUDIT) $(RELEASE) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find reconv benchmarks examples tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
