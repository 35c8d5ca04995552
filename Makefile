# Cadre from the shell. `make help` lists what there is; the work is done by scripts/ and bench/.
#
# Needs: Debian 12 or newer (or any Linux that has the same tools), make, git, root or sudo for what apt has to
# install, and Rust 1.95 or newer. Everything else is installed by name, and said before it is.

SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin
TARGET := $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := help
.PHONY: help build demo demo-pytorch test lint format kernels image gpu-check cluster rdma bench soak clean

help: ## list the targets
	@echo "Cadre: core attention on a pool of servers. Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build target/release/cadre
	@scripts/machine rust
	cargo build --release --locked -p cadre

demo: build ## train a small model on the King James Bible with attention on two servers
	$(TARGET)/release/cadre run -f examples/bible.yaml

demo-pytorch: ## train a small Llama of transformers with PyTorch, attention on two servers (brings gigabytes, once)
	@scripts/machine rust python
	cargo build --release --locked -p cadre -p cadre-python
	scripts/pytorch $(TARGET)/release/cadre run -f examples/pytorch.yaml

test: ## lint, then every test; prints the seconds of each part, the slowest tests, what was skipped
	@scripts/test

lint: ## formatting, clippy, licences, purity of the pure crates, spelling; changes nothing
	@scripts/lint

format: ## rewrite Rust, TOML, Python and C++ files in the project's format
	@scripts/format

kernels: ## build the GPU kernels (nvcc from PyPI) into target/kernels; the next build embeds them
	@scripts/machine python c++
	@scripts/kernels

image: kernels ## write the image (programs, libraries they load) as an OCI layout into target/image; needs no daemon
	@scripts/machine rust
	cargo build --release --locked -p cadre -p cadre-operator --features cadre/cluster
	@scripts/image

cluster: ## build the programs of a test cluster (API server, kubelet, helm, …) from Go modules, once, into the cache
	@scripts/cluster-tools

rdma: ## rows by RDMA, without a card: boot a small guest that has soft-RoCE, run the suite and jobs there (PARTS="suite job")
	@scripts/rdma $(PARTS)

gpu-check: ## pack checks, bench and training runs for a GPU into target/gpu-check; run them if one is here
	@scripts/gpu-check

bench: ## run every bench beside its peer, write target/bench/NAME.json, print a table
	@scripts/machine rust python
	cargo build --release --locked -p cadre -p cadre-operator
	@bench/run

soak: ## what is too long for every change: planted bugs, simulation, properties, long jobs (PARTS="planted jobs")
	@scripts/soak $(PARTS)

clean: ## remove target/
	cargo clean
