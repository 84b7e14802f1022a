# Everything starts from here: a machine with Python 3.10 to 3.13, make and a compiler. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE  # every process would compile the package, and every worker the tests

CPU_TORCH := https://download.pytorch.org/whl/cpu

.PHONY: help install demo lint unit quick test test-thorough test-breaking test-current test-slurm explore fuzz faults elastic submission-contract planner-regret test-nccl gpu-wheels gpu-proof bench-gpu docs evaluation clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / - /'

install: $(STAMP) ## set up .venv in the checkout, with `holmes` in it

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "install: no $(PYTHON); install Python 3.10 to 3.13, or set PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "install: $(PYTHON) is not a Python 3.10 to 3.13 with venv; install one (Debian: python3-venv), or set PYTHON=" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing packages into $(VENV): some minutes; torch is the largest"
	@test -e /dev/nvidiactl || test -n "$$PIP_EXTRA_INDEX_URL" || echo "  (no GPU here: with PIP_EXTRA_INDEX_URL=$(CPU_TORCH) in the environment, torch's CPU build: docs/install.md)"
	@while sleep 20; do echo "  still installing, $$(date +%T)"; done & ticking=$$!; trap "kill $$ticking" EXIT; \
	  $(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[all]'
	@touch $@

demo: install ## set up, train on the testbed, and write a report
	PATH="$(abspath $(BIN)):$$PATH" bash slurm/demo.sh

lint: install ## ruff (rules and format), mypy, import contracts between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: install ## tests of one module at a time, without processes: under a minute
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not integration and not slurm and not breaking and not gpu and not thorough"

quick: install ## tests that need no Slurm
	$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not slurm and not thorough"

test: lint ## lint, and all tests, including those on the testbed
	$(BIN)/pytest -q -n 5 --dist loadfile --no-loadscope-reorder -m "not slurm and not breaking and not thorough" --durations=10
	$(BIN)/pytest -q -n 5 --dist loadfile --no-loadscope-reorder -m "slurm and not breaking and not thorough" --durations=10 $$(grep -rl 'mark\.slurm' tests --include='test_*.py')

test-thorough: install ## further cases of the tests of `make test`, and longer ones: 10 minutes
	$(BIN)/pytest -q -n 5 --dist loadfile --no-loadscope-reorder -m "thorough and not slurm" --durations=10
	$(BIN)/pytest -q -n 5 --dist loadfile --no-loadscope-reorder -m "thorough and slurm" --durations=10

test-breaking: install ## tests that break NICs, daemons and nodes of a testbed
	$(BIN)/pytest -q -m breaking --durations=10

MINUTES ?= 30

explore: install ## property tests with new seeds and many examples, for MINUTES (30); fails at the end if one failed
	$(BIN)/python tests/support/explore.py $(MINUTES)

fuzz: install ## mutated inputs (plans, sites, records, Slurm's output, sysfs), for MINUTES (30)
	$(BIN)/python tests/support/explore.py $(MINUTES) tests/test_fuzz.py --more 40

faults: install ## at least 24 runs interrupted by random faults; a repeated command continues
	$(BIN)/python tests/support/interruptions.py $(FAULTS)

elastic: install ## twelve random scripts of lost nodes and jobs in elastic runs on the testbed; a repeated command continues
	$(BIN)/python tests/support/elastic_scripts.py $(SCRIPTS)

CONTRACT ?= submitit waiting many_jobs sweepers

submission-contract: install ## compare slurmhet with submitit's slurm, 300 jobs, Hydra's sweepers, on the testbed: 20 minutes
	$(BIN)/pytest -q -rP $(CONTRACT:%=tests/submission/contract/%_contract.py)

# torch with NCCL, which PyPI's own wheel has; three equals signs, or a +cpu wheel of that version would do as well.
VENV_NCCL ?= $(VENV)-nccl
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

test-nccl: ## NCCL's options and every group of seven plans, without a GPU; installs torch's CUDA build (6 GB)
	@test -e $(VENV_NCCL)/.installed || { set -e; echo "installing packages into $(VENV_NCCL): some minutes; torch and CUDA are the largest"; \
	  while sleep 20; do echo "  still installing, $$(date +%T)"; done & ticking=$$!; trap "kill $$ticking" EXIT; \
	  test -x $(VENV_NCCL)/bin/python || $(PYTHON) -m venv $(VENV_NCCL); \
	  $(VENV_NCCL)/bin/python -m pip install --progress-bar off 'torch===$(TORCH)'; \
	  $(VENV_NCCL)/bin/python -m pip install --progress-bar off -c constraints.txt -e '.[train,report,dev]'; touch $(VENV_NCCL)/.installed; }
	$(VENV_NCCL)/bin/python -c 'import torch.distributed as d; assert d.is_nccl_available(), "no NCCL in this torch"'
	$(VENV_NCCL)/bin/pytest -q -m nccl

PYTHON_GPU ?= 3.12

gpu-wheels: install ## download the packages but torch for a GPU machine without a network, into build/wheels (PYTHON_GPU=3.12)
	PYTHON="$(BIN)/python" bash benchmarks/gpu_wheels.sh $(PYTHON_GPU)

gpu-proof: ## checks on one GPU, in 9 minutes (PARTS=start,speed); without .venv uses build/wheels and the machine's torch
	PYTHON="$(PYTHON)" bash benchmarks/gpu_proof.sh $(if $(PARTS),--parts $(PARTS))

bench-gpu: install ## one GPU: TFLOP/s and memory, compared with Megatron-Core's minimal loop
	$(BIN)/python benchmarks/gpu.py $(BENCH)

REGRET ?= build/planner-regret.jsonl
SITES ?= 60

planner-regret: install ## the planner's choice against user-fixed parts of SITES (60) random sites; a repeated command continues
	@mkdir -p $(dir $(REGRET))
	$(BIN)/python benchmarks/planner_per_stage.py $(REGRET:.jsonl=-unequal.jsonl) --sites $(SITES)
	$(BIN)/python benchmarks/planner_regret.py $(REGRET) --sites $(SITES)

# Slurm and Python of Debian 13, fetched by debootstrap, and the Megatron-Core that goes with that Python (some 7 GB, root).
BED_13 ?= /var/lib/holmes-trixie
VENV_CURRENT := $(VENV)-current

test-current: install ## all tests with the newest Python, Megatron-Core and Debian 13's Slurm, and a comparison of both Megatron-Cores
	@set -e; export HOLMES_TESTBED=$(BED_13) HOLMES_TESTBED_RELEASE=trixie; \
	  trap '$(BIN)/holmes testbed down' EXIT; $(BIN)/holmes testbed up --release trixie; \
	  eval "$$($(BIN)/holmes testbed env)"; \
	  if ! test -e $(VENV_CURRENT)/.installed || test pyproject.toml -nt $(VENV_CURRENT)/.installed; then \
	    echo "installing packages into $(VENV_CURRENT): some minutes; torch is the largest"; \
	    in-release /usr/bin/python3 -m venv $(VENV_CURRENT); \
	    in-release $(VENV_CURRENT)/bin/python -m pip install -q -c constraints.txt -e '.[train,report,dev,tensorboard]'; \
	    touch $(VENV_CURRENT)/.installed; \
	  fi; \
	  $(BIN)/python tests/support/two_engines.py in-release $(VENV_CURRENT)/bin/python; \
	  in-release $(VENV_CURRENT)/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not slurm and not breaking"; \
	  in-release $(VENV_CURRENT)/bin/python -m pytest -q -m slurm --ignore tests/faults/test_nic_faults.py --durations=10

test-slurm: install ## the tests on the testbed with another Slurm, installed under SLURM=PREFIX
	@test -n "$(SLURM)" || { echo "test-slurm: give SLURM=PREFIX (holmes testbed up --slurm-source builds one)" >&2; exit 2; }
	HOLMES_TESTBED_SLURM="$(SLURM)" $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m slurm \
	  --durations=10 $$(grep -rl 'mark\.slurm' tests --include='test_*.py' | grep -v test_nic_faults)

docs: install ## the documentation site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

evaluation: install ## the paper's evaluation on the testbed (PART=headline, four-nodes, pairs or full), into benchmarks/results/
	PATH="$(abspath $(BIN)):$$PATH" bash benchmarks/evaluation.sh

clean: ## remove what was built, but no runs
	rm -rf $(VENV) $(VENV_CURRENT) $(VENV_NCCL) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
