# Troupe: the same targets on a laptop, in CI and on a GPU host. `make` alone explains them.

PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
CONFIG ?= deployments/configs/laptop.yaml
PYTEST_ARGS ?=
# Two processes, one of which has all tests of Ray (tests/conftest.py); one is enough where PYTEST_ARGS names a file.
TWO := -n 2 --no-loadscope-reorder
PARALLEL ?= $(if $(filter tests/%,$(PYTEST_ARGS)),,$(TWO))

export RAY_USAGE_STATS_ENABLED ?= 0
# Each of the application's processes would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

# The release that torch's CUDA builds bring. Kernels are tested in its interpreter where there is no GPU. It lies apart,
# for within reach every process would import it: 0.1 GiB and half a second each.
TRITON := triton==3.7.1

STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# With PY set to another interpreter (a GPU host that has everything already) no environment is made.
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(STAMP))

.DEFAULT_GOAL := help
.PHONY: help venv lint test test-unit test-slow test-gpu durations demo serve bench bench-gpu bench-faults constraints site clean

help: ## Say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## Make .venv with exact versions (PYTHON=python3.12 chooses the interpreter)

# torch goes first and by itself, so that the machine's own build of it (CPU or CUDA) is kept by all that follows.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Troupe needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make venv PYTHON=python3.12")'
	@echo "Installing into $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --editable '.[dev]'
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) --no-deps --target $(VENV)/triton '$(TRITON)'
	@touch $@

lint: $(READY) ## Check style and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

test: $(READY) ## Run every test that needs neither a GPU nor minutes
	@$(PY) -m pytest -m "not gpu and not slow" $(PARALLEL) $(PYTEST_ARGS)

test-unit: $(READY) ## Run the tests that import no torch (tests/unit.txt): a minute on two cores
	@$(PY) -m pytest -p tests.support.without_torch -p no:schemathesis -m "not gpu and not slow and not ray and not torch" $(TWO) \
		@tests/unit.txt $(PYTEST_ARGS)

test-slow: $(READY) ## Run the tests that take minutes on two cores
	@$(PY) -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

durations: $(READY) ## Run what make test does, write tests/durations.json (its order), and check tests/budget.json (CPU seconds)
	@$(PY) -m pytest -m "not gpu and not slow" $(TWO) --junitxml=out/durations.xml
	@$(PY) .ci/durations.py out/durations.xml > tests/durations.json.new
	@mv tests/durations.json.new tests/durations.json
	@$(PY) .ci/durations.py out/durations.xml --budget

test-gpu: $(READY) ## Run the tests that need CUDA devices
	@$(PY) -m pytest -m gpu $(PYTEST_ARGS)

demo: $(READY) ## Start everything, make pictures, an edit and a clip in out/, stop everything
	@$(PY) -m deployments.cli.main demo

serve: $(READY) ## Serve CONFIG (deployments/configs/laptop.yaml) on 127.0.0.1:8000 until Ctrl-C
	@$(PY) -m deployments.cli.main serve $(CONFIG)

bench: $(READY) ## Measure on this machine's CPU, with a plot in out/bench; the last line of output is one JSON document
	@$(PY) -m benchmarks.model_step flux-shapes --makers eager ours
	@$(PY) -m benchmarks.bare flux-shapes
	@$(PY) -m benchmarks.application flux-shapes --config laptop --side 0 --parts pictures,at_once,footprint
	@$(PY) -m benchmarks.load --plot out/bench/load.png

bench-gpu: $(READY) ## Measure a step on all GPUs of this host, beside its peers, into out/bench-gpu (10 minutes)
	@$(PY) -m benchmarks.peers.run out/bench-gpu --limit-s 600

bench-faults: $(READY) ## Kill processes of the application at random for ten minutes, and say what its clients saw
	@$(PY) -m benchmarks.faults

constraints: $(READY) ## Write constraints.txt from what is installed
	@$(PY) .ci/constraints.py > constraints.txt.new
	@mv constraints.txt.new constraints.txt

# The site's tools and the package's share no environment: neither needs the other's versions.
SITE := $(VENV)/site/bin/mkdocs

$(SITE): pyproject.toml
	@$(PYTHON) -m venv $(VENV)/site
	@$(VENV)/site/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(VENV)/site/requirements.txt
	@$(VENV)/site/bin/python -m pip --disable-pip-version-check install -qq --requirement $(VENV)/site/requirements.txt
	@touch $@

site: $(SITE) ## Build the documents as a site in out/site, with links and anchors checked
	@NO_MKDOCS_2_WARNING=1 $(SITE) build --strict --quiet
	@echo "out/site/index.html"

clean: ## Remove the environment, outputs and caches
	rm -rf $(VENV) out build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
