# A clone needs two commands: `make serve` and `make test`. Both fill .venv on their first run; later runs start at once.
# Everything is installed under constraints.txt, from the index that pip is configured with.

PYTHON ?= python3
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?=
FUZZ_SECONDS ?= 600
FUZZ_SEED    ?= $(shell date +%s)
ARGS   ?=
JOBS   ?= 2
# of a grid of cases a sample runs; `make test CASES=all` runs them all
CASES  ?= sampled
# which share of the files runs: 0/2 or 1/2 for half of them, all if it is empty
SHARE  ?=
EVERY  ?= 53
LOAD   ?= full
# releases of Triton beside that of constraints.txt, with which `make test-compiled` runs the same files
TRITONS ?= 3.7.1 3.8.0 3.9.0
OTHER_RELEASES = $(foreach version,$(TRITONS),$(VENV)/triton-$(version)/.installed)
BENCH  ?= prefill varlen window decode mixed
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve install test test-slow test-compiled test-triton test-newest lint types docs check format test-load test-ray test-security fuzz abuse test-gpu memcheck bench release \
  kernel-package requirements sbom pin-images clean

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# pip would spend half of its time on compiling every module. Python compiles the third that is imported, at the first import
PIP_INSTALL := $(PIP) install -qq --no-compile
unexport PYTHONDONTWRITEBYTECODE
# Wheels for the images: Python 3.11 on x86-64 with glibc 2.36 (Debian 12) or later
LOCK   := $(VENV)/tools/bin/uv pip compile --generate-hashes --only-binary :all: --python-version 3.11 \
  --python-platform x86_64-manylinux_2_36 --no-annotate --quiet --custom-compile-command 'make requirements'
# the CUDA build of torch that pins the Triton version of constraints.txt, and its torchvision
OF_CUDA := 's/^torch==.*/torch==2.11.0/; s/^torchvision==.*/torchvision==0.26.0/'
PYTEST := FA_SERVE_CASES=$(CASES) $(BIN)/pytest -n $(JOBS) --dist worksteal --timeout 300 -q

# Triton's interpreter is chosen when Triton is imported, so interpreted tests have a session of their own. There is no Triton but on Linux
define run_tests
$(if $(filter Linux,$(shell uname -s)),TRITON_INTERPRET=1 FA_SERVE_SHARE=$(SHARE) $(PYTEST) tests --ignore tests/gpu -m '$(1)')
FA_SERVE_SHARE=$(SHARE) $(PYTEST) tests --ignore tests/gpu --ignore-glob '*_compiled.py' -m '$(1)'
endef

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo "  variables: PYTHON=$(PYTHON) HOST=$(HOST) PORT=$(PORT) MODEL=<hub name or folder> ARGS=<more flags> JOBS=$(JOBS) CASES=$(CASES) (or all)"

serve: $(VENV)/.server ## install and serve the embedded model (or MODEL) on HOST:PORT
	@exec $(BIN)/fa-serve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

install: $(VENV)/.server ## install the package with its server into .venv, with the versions that are tested

test: $(VENV)/.test $(VENV)/images/.installed ## install and run the tests that need no GPU, but those of `make test-slow` and `make test-compiled`
	$(call run_tests,not slow)

test-slow: $(VENV)/.test $(VENV)/images/.installed ## the tests marked `slow`: whole programs, servers, browsers, and what takes more than a second
	$(call run_tests,slow)

test-compiled: $(VENV)/.test ## the files named test_*_compiled.py: every kernel compiles for every target, without a GPU
	FA_SERVE_SHARE=$(SHARE) $(PYTEST) $$(find tests -name 'test_*_compiled.py')

test-load: $(VENV)/.test ## the load tests of the service in full: minutes; they print what they measure
	FA_SERVE_LOAD=full $(BIN)/pytest -q -s --timeout 900 tests/server/test_load.py

test-ray: $(VENV)/.test ## the server over two replicas that Ray runs on this machine
	FA_SERVE_TEST_RAY=$${FA_SERVE_TEST_RAY:-1} $(BIN)/pytest -q --timeout 600 tests/server/test_ray.py

test-security: $(VENV)/.test ## the attacks of tests/security, and what another client gets meanwhile (LOAD=short or full)
	FA_SERVE_LOAD=$(LOAD) $(BIN)/pytest -q -s --timeout 900 tests/security

fuzz: $(VENV)/.test ## the fuzzer over all routes for FUZZ_SECONDS (600); a failure prints the steps to keep
	FA_SERVE_LOAD=short FA_SERVE_FUZZ_SECONDS=$(FUZZ_SECONDS) FA_SERVE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest -q -s tests/security/test_fuzz.py

abuse: $(VENV)/.test ## honest streams beside random abuse for an hour (ARGS="--seconds 120")
	$(BIN)/python -m benchmarks.soak.abuse $(ARGS)

test-triton: $(OTHER_RELEASES) ## the kernels compile with the other releases of Triton, those in TRITONS
	for version in $(TRITONS); do PYTHONPATH=$(VENV)/triton-$$version $(PYTEST) \
	  tests/launching/test_launch.py tests/launching/test_compilers.py tests/backends/test_releases_compiled.py \
	  tests/backends/hopper/test_block_sparse_compiled.py; done

# What meets the modules, masks and caches of transformers, also in the engine: models that keep states ask a cache in other words in
# each release. Not what reads files, prints tables, trains plain models, or asks the pinned release the same by another way.
test-newest: $(VENV)/.newest ## the transformers adapter with the packages of requirements-newest.txt
	PYTHONPATH=$(VENV)/newest $(BIN)/python -c 'from transformers import __version__ as v; "transformers==" + v in open("requirements-newest.txt").read() or exit("not the newest: " + v)'
	PYTHONPATH=$(VENV)/newest FA_SERVE_SHARE=$(SHARE) $(PYTEST) tests/hf tests/engine/test_hybrids.py::test_greedy_tokens_are_those_of_generate \
	  $(addprefix --ignore tests/hf/,weights lora test_info.py test_model_location.py test_traced_export.py test_training.py) \
	  $(addprefix --deselect tests/hf/test_families.py::test_,packed decode chunked_prefill custom_mask mutant_is_caught)

lint: $(VENV)/.test ## ruff, hadolint, and the workflows: their schema and zizmor
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --no-progress --quiet .github/workflows

types: $(VENV)/.test ## mypy --strict
	$(BIN)/mypy

docs: $(VENV)/.docs ## build the documentation into site/, strictly and without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "the documentation is in site/index.html; its search needs a server: python3 -m http.server --directory site 8001"

# Each suite has all JOBS processors; what keeps one processor busy, or waits, runs side by side. Ray's tests come behind the suites,
# because Ray starts six processes at once, which import what is compiled to bytecode by then.
check: $(VENV)/.test ## what CI runs
	$(MAKE) lint test test-slow test-compiled
	$(MAKE) --jobs 2 --output-sync=target test-ray types docs $(VENV)/.newest $(OTHER_RELEASES)
	$(MAKE) test-triton test-newest

format: $(VENV)/.test ## let ruff rewrite what it can
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

test-gpu: ## the GPU suite, with PYTHON as it is
	@$(PYTHON) -c 'import torch; torch.cuda.is_available() or exit("make test-gpu: PYTHON=$(PYTHON) sees no GPU")'
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest tests/gpu $(ARGS)

memcheck: ## every EVERYth of the GPU suite's kernel tests under compute-sanitizer, about 100 s; those that capture graphs are skipped
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  --target-processes all $(PYTHON) -m pytest tests/gpu -q --every $(EVERY) \
	  -k '(test_dense or test_paged or test_varlen or test_cases or quantized_hopper or latent or lists or float8 or backward or sizes_of_paged or split_kv) and not engine'

bench: ## the kernels against their peers on the GPU, with PYTHON as it is
	@$(PYTHON) -c 'import torch; torch.cuda.is_available() or exit("make bench: PYTHON=$(PYTHON) sees no GPU")'
	for bench in $(BENCH); do PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/attention/bench_attention.py $$bench $(ARGS); done

release: $(VENV)/.release ## build sdist and wheel in dist/, check both, and try the wheel in a clean environment
	rm -rf build dist
	PIP_CONSTRAINT=$(abspath $(VENV)/constraints.txt) $(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release/check_release.py dist --constraints $(VENV)/constraints.txt

kernel-package: $(BIN)/python ## build the folder that Hugging Face's `kernels` loads, in build/kernel-package
	$(BIN)/python deploy/kernel_package.py build/kernel-package

requirements: $(VENV)/tools/.installed ## write requirements/*.txt again, with a hash for each file of a package
	$(LOCK) requirements/tools.in -o requirements/tools.txt
	$(LOCK) requirements/ray.in -c constraints.txt -o requirements/ray.txt
	$(LOCK) pyproject.toml --extra server --extra otel -c constraints.txt -o requirements/cpu.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match)
	sed $(OF_CUDA) constraints.txt > $(VENV)/constraints-cuda.txt
	$(LOCK) pyproject.toml --extra server --extra otel --extra images -c $(VENV)/constraints-cuda.txt -o requirements/cuda.txt

sbom: $(VENV)/tools/.installed ## list what the images install, as CycloneDX documents in sbom/
	mkdir -p sbom
	for image in cpu cuda; do $(VENV)/tools/bin/python -W ignore -m cyclonedx_py requirements requirements/$$image.txt --pyproject pyproject.toml \
	  --mc-type application --output-reproducible --of JSON -o sbom/fa-serve-$$image.cdx.json; done

pin-images: ## write the digest of each base image into Dockerfile and compose.yaml; needs docker and its registry
	$(PYTHON) deploy/pin_images.py Dockerfile compose.yaml

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) bench_logs build dist site sbom *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or exit("fa_serve needs Python 3.10 or later: make PYTHON=python3.10 ...")'
	$(PYTHON) -m venv $(VENV)

# the versions of constraints.txt, or those with a CUDA build of torch (see there), whichever pip can resolve on this machine
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@if $(PIP) install --dry-run -c $< torch 'triton; sys_platform == "linux"' > $(VENV)/resolve.log 2>&1; then cp $< $@; \
	elif grep -q "depends on triton" $(VENV)/resolve.log; then sed $(OF_CUDA) $< > $@; \
	else cat $(VENV)/resolve.log; exit 1; fi

$(VENV)/.server $(VENV)/.docs $(VENV)/.test $(VENV)/.release: $(VENV)/.%: pyproject.toml $(VENV)/constraints.txt
	@$(if $(filter test,$*),$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or exit("the tests need Python 3.11 or later: make clean, then make PYTHON=python3.11 test")')
	@echo "installing fa-serve[$*] with $$(grep ^torch== $(VENV)/constraints.txt) into $(VENV); the first time takes a minute or more"
	@$(PIP_INSTALL) -c $(VENV)/constraints.txt -e '.[$*]'
	@touch $@ $(if $(filter test,$*),$(VENV)/.server $(VENV)/.docs) # [test] contains both

$(VENV)/.newest: requirements-newest.txt $(VENV)/.test
	@rm -rf $(VENV)/newest
	@$(PIP_INSTALL) --no-deps --target $(VENV)/newest -r $<
	@touch $@

# apart from the environment, because its compiled operators cannot be loaded beside a CPU build of torch (torchvision_beside.py)
$(VENV)/images/.installed: $(VENV)/.test
	@rm -rf $(@D)
	@$(PIP_INSTALL) --no-deps --target $(@D) -c $(VENV)/constraints.txt torchvision num2words docopt
	@touch $@

$(VENV)/triton-%/.installed: $(VENV)/.test
	@rm -rf $(@D)
	@$(PIP_INSTALL) --no-deps --target $(@D) triton==$*
	@touch $@

$(VENV)/tools/.installed: requirements/tools.txt
	@$(PYTHON) -m venv $(VENV)/tools
	@$(VENV)/tools/bin/python -m pip --disable-pip-version-check install -qq --require-hashes --only-binary :all: -r $<
	@touch $@
