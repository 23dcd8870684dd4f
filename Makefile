# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs in .venv the first time, and works offline from then on.

PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
LOG := .venv/install.log
READY := .venv/.ready
READY_FOR_DOCS := .venv/.ready-for-docs
MINDSPORE := .venv-mindspore
PAGE := src/ulpscope/report/assets/report.html

.DEFAULT_GOAL := help
.PHONY: help demo test test-plain test-long test-matrix test-mindspore check docs web web-check bench release clean

help:
	@echo 'make demo       two small training runs, one broken operation, and the report that names it'
	@echo 'make test       all tests but the long ones'
	@echo 'make test-plain the same tests in NumPy and Python, without what was compiled; PLAIN=tests/store for a part'
	@echo 'make test-long  whole corpora, hundreds of repetitions, and what needs the peer'
	@echo 'make test-matrix  all tests but the long ones on the oldest and the newest torch, each in an environment of 7 GB; TORCH=2.12.0 names one'
	@echo 'make test-mindspore  the tests that need MindSpore, in an environment of its own (2.9 GB the first time)'
	@echo 'make check      ruff, mypy --strict, import-linter'
	@echo 'make docs       the documentation site, in build/site'
	@echo 'make web        rebuild the report page (needs node and npm)'
	@echo 'make web-check  fail when the committed report page is not what web/ builds'
	@echo 'make bench      the table of ratios; PEER=PYTHON names the Python of an environment with the peer'
	@echo 'make release    VERSION=x.y.z: set the version, close the changelog, commit and tag; pushes nothing'
	@echo 'make clean      remove everything that make has made'
	@echo
	@echo 'Another Python: make test PYTHON=python3.12 (after make clean). Test processes: JOBS=$(JOBS).'

demo: $(READY)
	@$(BIN)/ulpscope demo

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m 'not long'
	@echo 'make test: all tests passed.'

# Left out is what tests neither recording nor arithmetic, so that it is the same whatever was compiled: tests/test_*.py (documents, the wheel,
# the site, automation), tests/report (how a result is shown), cli/test_triton.py (what commands import), hostile/test_repro_scripts.py (text).
PLAIN := --ignore-glob='tests/test_*.py' --ignore=tests/report --ignore=tests/cli/test_triton.py --ignore=tests/hostile/test_repro_scripts.py
test-plain: $(READY)
	@ULPSCOPE_NO_KERNEL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m 'not long' $(PLAIN)
	@echo 'make test-plain: all tests passed.'

test-long: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m long
	@echo 'make test-long: all long tests passed.'

# Downloads gigabytes of CUDA builds, so nothing else asks for it.
test-matrix:
	@JOBS=$(JOBS) $(PYTHON) tools/matrix.py $(TORCH)

# These tests know nothing of torch, so what tests/conftest.py prepares for it is left out.
test-mindspore: $(MINDSPORE)/.ready
	@OMP_NUM_THREADS=1 $(MINDSPORE)/bin/python -m pytest -q --confcutdir=tests/mindspore_live -W default tests/mindspore_live
	@echo 'make test-mindspore: all tests passed.'

check: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy --strict
	@$(BIN)/lint-imports --no-logo --no-cache
	@echo 'make check: nothing to complain about.'

docs: $(READY_FOR_DOCS)
	@$(BIN)/python tools/site.py
	@echo 'make docs: build/site/index.html'

web:
	@cd web && npm ci --no-audit --no-fund && npm run build

web-check:
	@kept=$$(mktemp) && trap 'rm -f "$$kept"' EXIT && cp $(PAGE) "$$kept" && $(MAKE) --no-print-directory web && \
	if cmp -s "$$kept" $(PAGE); then echo 'make web-check: the committed page is what web/ builds.'; \
	else echo '$(PAGE) is not what web/ builds: the new build now stands in its place, look at it and commit it.' >&2; exit 1; fi

bench: $(READY)
	@$(BIN)/python bench/trunk.py $(if $(PEER),--peer-python $(PEER))

release:
	@$(PYTHON) tools/release.py $(VERSION)

clean:
	rm -rf .venv $(MINDSPORE) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis web/node_modules ulpscope-demo
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete

# setuptools and Cython come first, and the package is then built with them and not in an isolated environment: a change to
# pyproject.toml or to what is compiled reinstalls without asking the index again.
$(READY): pyproject.toml packages/legacy/pyproject.toml constraints.txt $(wildcard src/ulpscope/numerics/*.c src/ulpscope/capture/native/*.pyx)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || \
	{ echo 'ulpscope needs Python 3.10 or newer, and "$(PYTHON)" is not: name another one with make PYTHON=python3.12' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
	{ echo 'The environment .venv could not be made with "$(PYTHON) -m venv": on Debian and Ubuntu, install python3-venv.' >&2; exit 1; }
	@echo 'Setting up .venv (the first time takes some minutes; details in $(LOG))'
	@{ $(BIN)/pip install --disable-pip-version-check -c constraints.txt cython setuptools wheel && \
	$(BIN)/pip install --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev,torch]' -e packages/legacy; } > $(LOG) 2>&1 || \
	{ echo 'pip could not install the packages that constraints.txt names: check the network, the proxy and the index that pip asks (pip config list), then run make again; all that pip said is in $(LOG).' >&2; exit 1; }
	@touch $@

# MindSpore asks for an older NumPy than torch is tested with, and neither may need the other: so it has an environment of its own.
$(MINDSPORE)/.ready: pyproject.toml constraints-mindspore.txt $(wildcard src/ulpscope/numerics/*.c)
	@test -x $(MINDSPORE)/bin/pip || $(PYTHON) -m venv $(MINDSPORE)
	@echo 'Setting up $(MINDSPORE) (the first time takes some minutes and 2.9 GB; details in $(MINDSPORE)/install.log)'
	@{ $(MINDSPORE)/bin/pip install --disable-pip-version-check -c constraints-mindspore.txt cython setuptools wheel && \
	$(MINDSPORE)/bin/pip install --disable-pip-version-check --no-build-isolation -c constraints-mindspore.txt -e '.[mindspore]' pytest; } > $(MINDSPORE)/install.log 2>&1 || \
	{ echo 'pip could not install MindSpore as constraints-mindspore.txt names it: check the network and the index that pip asks, then run make test-mindspore again; all that pip said is in $(MINDSPORE)/install.log.' >&2; exit 1; }
	@touch $@

# Only the site needs these: they are those of the extra docs, without building the package again.
$(READY_FOR_DOCS): $(READY)
	@echo 'Installing what the documentation site is built with (details in $(LOG))'
	@{ $(BIN)/python -c "from importlib.metadata import requires; print(*(line.partition(';')[0] for line in requires('ulpscope') if 'extra == \"docs\"' in line), sep='\n')" > $@.txt && \
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -r $@.txt; } >> $(LOG) 2>&1 || \
	{ echo 'pip could not install the extra docs: all that pip said is in $(LOG).' >&2; exit 1; }
	@touch $@
