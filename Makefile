# `make demo` and `make test` are all the set-up there is: each makes .venv itself.
# Needed on the machine: Python >= 3.10, make and a C++ compiler.

PYTHON ?= python3
# Another torch, in an environment of its own: make test TORCH=2.15
TORCH ?=
VENV := $(if $(TORCH),.venv-$(TORCH),.venv)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ifneq ($(TORCH),)
# what a machine has set for pip may hold back a torch that is asked for by name
export PIP_CONSTRAINT := $(CURDIR)/tests/tools/no_cap.txt
endif

# Flags for one's own runs, as in `make test TEST_FLAGS="-x -k adamw"`.
TEST_FLAGS ?= -n auto
BENCH_FLAGS ?=
FUZZ_FLAGS ?=
PROGRAM_FLAGS ?=
DEMO_FLAGS ?=
MATRIX_FLAGS ?=
WHEEL_FLAGS ?=
GPU_FLAGS ?=
REPLAY_FLAGS ?=
# The C++ that is no text of Python.
HEADERS := fuseopt/codegen/cpp/include/*.h fuseopt/runtime/cpp/*.h fuseopt/runtime/guards/*.h fuseopt/runtime/tables/*.h

.PHONY: help demo test test-share test-all fuzz fuzz-programs fuzz-optimizers fuzz-events fuzz-stores fuzz-states replay wild matrix newest wheel gpu bench bench-gpu docs lint format clean

help:
	@echo "make demo      train a small GPT-2 with the compiled step, beside eager"
	@echo "make test      the tests"
	@echo "make test-share  of the slow tests a tenth, another one for each commit"
	@echo "make test-all  the tests, the slow ones too"
	@echo "make fuzz      2,000 random programs and optimizers, other ones each time"
	@echo "make replay    does what the tests compile differ from the last commit?"
	@echo "make wild      trainings with public packages, and the examples"
	@echo "make matrix    the wheel with the Pythons and torches that users have"
	@echo "make newest    the wheel with the newest torch, as CI runs it"
	@echo "make wheel     the wheel, with the kernels of common steps built into it"
	@echo "make bench     the benchmarks, on a CPU, in 15 minutes"
	@echo "make bench-gpu the same ones on a GPU"
	@echo "make gpu       on a machine with a GPU: is it right, how fast; nine minutes"
	@echo "make docs      the site, in build/site; a warning is an error"
	@echo "make lint      checks format, style, types and the sentences of the pages"
	@echo "make format    rewrites what formatter and linter can"

demo: $(VENV)/stamp-demo
	$(BIN)/python -m demo.train_gpt2 $(DEMO_FLAGS)

test: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests -m "not slow and not gpu" $(TEST_FLAGS)

# Of the slow tests a tenth, which the commit names.
test-share: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests -m "slow and not gpu" -p tests.tools.share \
		--share 10 $(TEST_FLAGS)

test-all: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests -m "not gpu" $(TEST_FLAGS)

# Programs, optimizers, then what users do. The same ones again: make fuzz
# PROGRAM_FLAGS="--hypothesis-seed=<as it printed>" FUZZ_FLAGS="--first <as it printed>".
# Of the latter, those that an earlier run got done are not run again.
fuzz: fuzz-programs fuzz-optimizers fuzz-events fuzz-stores fuzz-states

fuzz-programs: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests/numerics/test_fuzz_programs.py \
		tests/numerics/test_fuzz_bodies.py -m "not slow" \
		--hypothesis-profile=fuzz --hypothesis-show-statistics -n auto \
		--timeout 3600 $(PROGRAM_FLAGS)

fuzz-optimizers: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.fuzz $(FUZZ_FLAGS)

# A seed is up to three sequences. The same ones again, or what is left:
# make fuzz-events EVENT_FLAGS="--first <as it printed>".
EVENT_FLAGS ?= --count 400
fuzz-events: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.fuzz events $(EVENT_FLAGS)

# Steps that move numbers about. What is left: make fuzz-stores STORE_FLAGS="--first ...".
STORE_FLAGS ?= --count 1000
fuzz-stores: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.fuzz stores $(STORE_FLAGS)

# All sources of numbers and objects, and all states of the caller.
fuzz-states: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests/sources tests/numerics/test_caller_states.py \
		$(TEST_FLAGS)

# A part of the tests: make replay REPLAY_FLAGS="--tests tests/scheduler/test_stages.py".
replay: $(VENV)/stamp-test
	$(BIN)/python -m tests.tools.replay $(REPLAY_FLAGS)

# What is not installed is skipped, and named at the end.
wild: $(VENV)/stamp-test $(VENV)/stamp-wild $(VENV)/stamp-timm
	$(BIN)/python -m pytest tests/wild tests/tools/test_examples.py \
		tests/tools/test_wild_page.py -rs $(TEST_FLAGS)

# Environments of their own, which pip fills. One of them: make matrix
# MATRIX_FLAGS="--pythons 3.12 --torches 2.13".
matrix: $(VENV)/stamp-test
	$(BIN)/python -m tests.tools.matrix $(MATRIX_FLAGS)

# The newest torch that setup.cfg admits, in an environment that pip fills.
newest: $(VENV)/stamp-test
	$(BIN)/python -m tests.tools.matrix --newest

# Goes on where an earlier run stopped. All there is: BENCH_FLAGS="--suite full".
bench: $(VENV)/stamp-test $(VENV)/stamp-bench
	$(BIN)/python -m bench run $(BENCH_FLAGS)

bench-gpu: $(VENV)/stamp-test $(VENV)/stamp-bench
	$(BIN)/python -m bench run --device cuda $(BENCH_FLAGS)

# Nothing is installed: the Python that is there has torch, as in
# make gpu PYTHON=python3 GPU_FLAGS="--sections machine,correctness --budget 120", which
# comes first. Results go to bench/results; another folder: OUT=DIR, or
# GPU_FLAGS="--out DIR".
# Without a GPU, rehearse: GPU_FLAGS="--rehearse cpu" (or interpreter, or sim).
gpu:
	PYTHONPATH=. PYTHONUNBUFFERED=1 $(PYTHON) -m bench.gpu $(GPU_FLAGS)

# Into dist. Kernels of few steps: make wheel WHEEL_FLAGS="--only AdamW Lion".
wheel: $(VENV)/stamp-test
	$(BIN)/python -m tests.tools.wheel $(WHEEL_FLAGS)

docs: $(VENV)/stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(HEADERS)
	$(BIN)/mypy
	$(BIN)/python -m tests.tools.prose

format: $(VENV)/stamp-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(HEADERS)

clean:
	rm -rf .venv .venv-* build demo/out bench/out fuseopt.egg-info

# By themselves, for they ask for torchvision: each wheel of that loads beside one build
# of torch alone, and tests/wild does without. The rest that they ask for is there.
# torchtitan asks for data sets and services of logs, which the tests do without.
$(VENV)/stamp-timm: $(CONSTRAINTS) | $(VENV)/stamp-wild
	$(PIP) install --constraint $(CONSTRAINTS) --no-deps \
		timm ultralytics ultralytics-thop torchtitan spmd_types torch_checkpointing
	touch $@

# One stamp for each extra: a target installs what it needs and no more. Every
# install reads the constraints, so that nothing can change the version of torch.
$(VENV)/stamp-%: setup.cfg pyproject.toml $(CONSTRAINTS) | $(VENV)/stamp
	$(PIP) install --constraint $(CONSTRAINTS) "setuptools >= 77"
	$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation \
		--editable ".[$*]"
	touch $@

# The versions of the tests, but for torch, and for what a torch pins itself.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/stamp
	grep -v -E '^(torch|triton|setuptools)==' constraints.txt > $@
	echo "torch==$(TORCH).*" >> $@

# A stamp rather than the interpreter's file, which is there before pip is.
$(VENV)/stamp:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@
