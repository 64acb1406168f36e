# `make demo` and `make test` each work alone on a fresh machine that has Python 3.11 or newer; a C++ compiler is used
# where there is one. Both make .venv and install exactly what requirements/ pins.
PYTHON ?= python3
# Files go to workers in the order of collection, those with slow tests first; xdist's own has files of a single test
# last, and whole workers wait for one that takes a minute.
PYTEST_ARGS ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# 47 % of the 687 MiB that plain PyTorch needs for this step; the demo's first half shows that it does not fit.
DEMO_BUDGET ?= 325MiB
DEMO := $(BIN)/shoal train --model resnet18_cifar --data digits --batch 128 --epochs 4 --lr 0.05 \
	--budget $(DEMO_BUDGET) --enforce

# The same cases every time; another seed tries others.
FUZZ_SEED ?= 1
FUZZ_CASES ?= 4000

# The trainers of others have an environment of their own.
HOSTS := .venv-hosts/bin

NNUNET := .venv-nnunet/bin

# So has torch's CUDA build: 3 GB to download, 5 to store. PyPI's own index has it; a folder of wheels that pip is told
# of elsewhere may hold a build for the CPU, which would be taken instead.
CUDA := .venv-cuda/bin
PIP_CUDA := env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(CUDA)/python -m pip --disable-pip-version-check -qq
STANDIN := build/cuda-standin

# The site is made without torch and without Shoal itself.
DOCS := .venv-docs/bin

.PHONY: demo test test-slow test-bench test-hosts test-nnunet test-cuda-standin lint sanitize aarch64 docs notebooks wheel build-demo build-test build-hosts build-nnunet build-cuda clean

demo: build-demo
	@echo "== Plain PyTorch inside a wall of $(DEMO_BUDGET): it must run out of memory =="
	@$(DEMO) --planner none --out runs/demo-plain; status=$$?; \
	  if [ $$status -ne 3 ]; then echo "expected exit code 3 (out of memory), got $$status" >&2; exit 1; fi; \
	  echo "exit code 3, as expected"
	@echo "== Shoal inside the same wall =="
	@$(DEMO) --out runs/demo --json runs/demo/result.json
	@$(BIN)/python -c "import json; accuracy = json.load(open('runs/demo/result.json'))['test_accuracy']; \
	  assert accuracy >= 0.95, f'expected a test accuracy of 95 %, got {accuracy:.1%}'"

# Bytecode is written whatever the shell says: workers and the processes of tests would each compile every module again.
test: build-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS) --ignore tests/bench -m "not slow"

# One in twenty-five tests takes two seconds and more: all of them take as long as the others together.
test-slow: build-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS) --ignore tests/bench -m slow

# The benchmarks are no part of the package; what they measure and how they check themselves is tested here.
test-bench: build-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS) tests/bench

# Lightning, Accelerate, Transformers, timm and others train inside a budget; see docs/hosts.
test-hosts: build-hosts
	$(HOSTS)/python -m pytest tests/hosts

# nnU-Net's own commands with Shoal's planner and trainer; see docs/hosts/nnunet.md.
test-nnunet: build-nnunet
	$(NNUNET)/python -m pytest tests/hosts/test_nnunet.py

# CUDA's allocator, streams and dispatch without a GPU; see docs/accelerators.md.
test-cuda-standin: build-cuda
	$(CUDA)/python tests/cuda_standin/build.py $(STANDIN)
	tests/cuda_standin/run $(STANDIN) $(CUDA)/python -m pytest tests/cuda_standin

lint: build-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, in build/site: open build/site/index.html. A link that leads nowhere is an error.
docs: .venv-docs/.docs
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

.venv-docs/.docs: requirements/docs.txt
	@echo "Installing requirements/docs.txt into .venv-docs ..."
	@$(PYTHON) -m venv .venv-docs
	@$(DOCS)/python -m pip --disable-pip-version-check -qq install --no-deps -r $<
	@touch $@

# The tutorials as notebooks: each is made of its page and run from its first cell to its last; what it printed is kept.
TUTORIALS := $(wildcard docs/tutorials/*.md)
notebooks: build-test $(VENV)/.notebooks
	@$(BIN)/jupytext --quiet --update --to ipynb $(TUTORIALS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/execute_notebooks.py $(TUTORIALS:.md=.ipynb)

# One wheel for every Python, in dist/, with the native kernels and without libgomp: torch brings that. It is tested in a
# fresh environment in which no compiler is found.
wheel: build-test .venv-wheel/.wheel
	@rm -rf build/wheel dist && mkdir -p build/wheel
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" .venv-wheel/bin/auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat \
	  --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	@tests/wheel/run $(PYTHON) dist/*.whl

.venv-wheel/.wheel: requirements/wheel.txt
	@$(PYTHON) -m venv .venv-wheel
	@.venv-wheel/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r $<
	@touch $@

# Random calls of the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer; skipped, with the reason,
# where the compiler cannot link them.
sanitize: $(VENV)/.build
	@mkdir -p build/sanitize
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DSHOAL_FUZZ=ON \
	  -DSHOAL_SANITIZE=ON -DSHOAL_FUZZ_SEED=$(FUZZ_SEED) -DSHOAL_FUZZ_CASES=$(FUZZ_CASES) >build/sanitize/configure.log
	@$(BIN)/cmake --build build/sanitize --target sanitize

# The same calls of the kernels that an AArch64 processor runs, cross-compiled, under QEMU.
aarch64: $(VENV)/.build
	@command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null || { \
	  echo "make aarch64: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
	@mkdir -p build/aarch64
	@$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/tests/native/aarch64.cmake -DSHOAL_FUZZ=ON -DSHOAL_FUZZ_SEED=$(FUZZ_SEED) \
	  -DSHOAL_FUZZ_CASES=$(FUZZ_CASES) >build/aarch64/configure.log
	@$(BIN)/cmake --build build/aarch64 --target shoal_native fuzz

# The package itself is installed anew each time: seconds, and never stale.
build-demo: $(VENV)/.demo
	@$(PIP) install --no-deps --no-build-isolation --force-reinstall .

build-test: $(VENV)/.test
	@$(PIP) install --no-deps --no-build-isolation --force-reinstall .

build-hosts: .venv-hosts/.hosts
	@$(HOSTS)/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation --force-reinstall .

.venv-hosts/.hosts: requirements/hosts.txt requirements/build.txt requirements/demo.txt
	@echo "Installing requirements/hosts.txt into .venv-hosts ..."
	@$(PYTHON) -m venv .venv-hosts
	@$(HOSTS)/python -m pip --disable-pip-version-check -qq install --no-deps -r $< || { \
	  echo "make test-hosts: the hosts could not be installed, see pip's line above; no test has run" >&2; exit 1; }
	@touch $@

build-nnunet: .venv-nnunet/.nnunet
	@$(NNUNET)/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation --force-reinstall .

.venv-nnunet/.nnunet: requirements/nnunet.txt requirements/build.txt requirements/demo.txt
	@echo "Installing requirements/nnunet.txt into .venv-nnunet ..."
	@$(PYTHON) -m venv .venv-nnunet
	@$(NNUNET)/python -m pip --disable-pip-version-check -qq install --no-deps -r $< || { \
	  echo "make test-nnunet: nnU-Net could not be installed, see pip's line above; no test has run" >&2; exit 1; }
	@touch $@

build-cuda: .venv-cuda/.cuda
	@$(PIP_CUDA) install --no-deps --no-build-isolation --force-reinstall .

.venv-cuda/.cuda: requirements/cuda.txt requirements/test.txt requirements/build.txt requirements/demo.txt
	@echo "Installing requirements/cuda.txt into .venv-cuda ..."
	@$(PYTHON) -m venv .venv-cuda
	@$(PIP_CUDA) install --no-deps -r $< || { \
	  echo "make test-cuda-standin: torch's CUDA build could not be installed, see pip's line above; no test has run" >&2; \
	  exit 1; }
	@touch $@

$(VENV)/.%: requirements/%.txt requirements/build.txt requirements/demo.txt | $(BIN)/python
	@echo "Installing requirements/$*.txt into $(VENV) ..."
	@$(PIP) install -r $<
	@touch $@

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build dist $(VENV) .venv-hosts .venv-nnunet .venv-cuda .venv-docs .venv-wheel
