# The habits of this project. `make run` and `make test` are all a newcomer needs.

export CARGO_TARGET_DIR ?= $(HOME)/.cache/splitmodel/target
export CMAKE_C_COMPILER_LAUNCHER ?= ccache
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
BIN := $(CARGO_TARGET_DIR)/release
CARGO_FLAGS := --release --locked --workspace
FILE ?= examples/smollm2.yaml

.PHONY: help run test lint fmt build model deps bench bench-cache bench-delay soak fuzz crds images e2e vulkan-smoke clean

help: ## Lists these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

run: build model ## Serves the sample model as a chain of three processes (FILE=… for another manifest, ARGS=… for flags)
	$(BIN)/splitmodel up $(FILE) $(ARGS)

test: lint model ## Runs every test
	scripts/test.sh

lint: deps ## Formatting, clippy, licences and banned crates
	@scripts/deps.sh lint
	cargo fmt --all --check
	cargo clippy $(CARGO_FLAGS) --all-targets -- -D warnings
	scripts/deny.sh

fmt: ## Formats the code
	cargo fmt --all

build: deps ## Builds the programs: splitmodel, kubectl-splitmodel, splitmodel-stage, splitmodel-operator
	cargo build $(CARGO_FLAGS)

model: deps ## Brings the sample model
	scripts/model.sh

deps: ## Installs what is missing on Debian
	@scripts/deps.sh

bench: build model ## Measures this against the peers on this machine
	bench/run.sh

bench-cache: build model ## Measures what kept prefixes save, beside llama-server (wants a calm machine)
	$$(scripts/venv.sh tests/api/requirements.txt)/bin/python bench/cache.py --llama-server "$$(bench/peers.sh)/llama-server" $(ARGS)

bench-delay: build model ## Measures a chain against the delay of its links (wants a calm machine)
	$$(scripts/venv.sh tests/api/requirements.txt)/bin/python bench/delay.py $(ARGS)

soak: build model ## The random tests at length, then chains under load and faults (CASES=…, MINUTES=…, REQUESTS=…; 0 leaves out)
	scripts/soak.sh $(or $(CASES),200000) $(or $(MINUTES),30) $(or $(REQUESTS),10000)

fuzz: deps ## Runs every fuzz target for a while (needs a nightly toolchain and cargo-fuzz)
	fuzz/run.sh

crds: deps ## Writes the CRD, the chart's copy and docs/crd.md again after a change of the types
	cargo build $(CARGO_FLAGS) --all-targets
	$(BIN)/examples/crdgen .

images: ## Builds the images with docker, compiling inside (IMAGES=stage, IMAGE_FLAGS=… for build arguments, TAG=…)
	for image in $(or $(IMAGES),operator stage); do \
	  docker build -f Dockerfile.$$image $(IMAGE_FLAGS) -t splitmodel-$$image:$(or $(TAG),latest) . || exit 1; done

e2e: deps model ## Runs the tests on a real cluster that this brings up (ARGS='-k sample' for some; E2E_KEEP=1 keeps the cluster)
	cargo build $(CARGO_FLAGS) --all-targets
	e2e/run.sh $(ARGS)

vulkan-smoke: ## Builds with Vulkan and runs a slice on Mesa's software driver
	scripts/vulkan-smoke.sh

clean: ## Removes what was built (not the models)
	cargo clean
