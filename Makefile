# Verbs; the work is done by CMake (CMakePresets.json) and by scripts/. `make help` lists them.
JOBS ?= $(shell nproc)
ifneq ($(shell command -v ninja),)
export CMAKE_GENERATOR ?= Ninja
endif
PYTHON = /usr/bin/python3

.DEFAULT_GOAL = help
.PHONY: help install-deps build build-all demo docs package check-package check-distros check-k8s check check-long check-short check-rdma-long check-sim-long dev tsan fuzz tidy format bench figures soak clean

help: ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install-deps: ## install missing packages (Debian 12 and 13, Ubuntu 24.04)
	@scripts/install-deps

build: ## build/release/bin: the command line and the daemons
	@cmake --preset release
	@cmake --build build/release -j $(JOBS) --target programs

build-all: build ## the same, and the programs of the tests
	@cmake --build build/release -j $(JOBS)

package: build-all ## build/release/package: a .deb of programs, man pages, completion, systemd units
	@scripts/check-package --only-make

check-package: build-all ## the .deb, installed into a bare root and tried there (needs root, and the distribution's packages)
	@scripts/check-package

DISTROS ?=
STAGES ?= demo,release
check-distros: ## make demo and the release stage in a bare root of each distribution that can be reached (make demo alone of the machine's own), or of DISTROS="debian13 ..."; needs root; aarch64 emulated
	@scripts/distro-roots --stages $(STAGES) $(DISTROS)

check-k8s: build-all ## deploy/kubernetes on a real control plane, in namespaces of its own (minutes; root; says what is missing)
	@scripts/install-deps --long
	@scripts/check-k8s

demo: ## from nothing to a completion: router, prefill and decode on loopback
	@scripts/install-deps --without-figures
	@$(MAKE) --no-print-directory build
	@scripts/demo

check: install-deps ## every test that needs neither GPU nor NIC, under all compilers and sanitizers
	@scripts/check

check-long: ## make check without short forms, and with what it leaves out: long tests, the package, other distributions (hours)
	@scripts/install-deps --long
	@scripts/check --long
	@$(MAKE) --no-print-directory check-package
	@$(MAKE) --no-print-directory check-distros

check-short: install-deps ## after every edit: unit and golden tests of the release build, in short form (make check has all)
	@scripts/check --stages release --labels unit,golden --short

check-rdma-long: build-all ## all tests of RDMA over Soft-RoCE, in a VM (minutes)
	@$(PYTHON) tests/rdma/run.py build/release --long

check-sim-long: build-all ## 10,000 seeded schedules of faults through the router's core, in the simulator (minutes)
	@TANDEM_SIM_SEEDS=10000 build/release/bin/sim_test

dev: ## build/dev (ASan + UBSan), then its unit tests
	@scripts/check --stages dev --labels unit

tsan: ## build/tsan (ThreadSanitizer), then its unit tests
	@scripts/check --stages tsan --labels unit

FUZZ_SECONDS ?= 60
fuzz: ## every fuzzer for FUZZ_SECONDS=60; what they find is kept in build/fuzz/corpus
	@scripts/check --stages fuzz --fuzz-seconds $(FUZZ_SECONDS)

tidy: ## folder arrows, banned calls, headers that compile alone
	@cmake --preset release >/dev/null && cmake --build build/release --target td_proto >/dev/null
	@$(PYTHON) tests/unit/folder_arrows.py
	@$(PYTHON) tests/unit/banned_calls.py
	@$(PYTHON) tests/unit/headers_alone.py build/release

format: ## clang-format over C and CUDA, yapf over Python (packages clang-format and yapf3)
	@command -v clang-format >/dev/null || { echo "clang-format is not installed: apt-get install clang-format" >&2; exit 1; }
	@command -v yapf3 >/dev/null || { echo "yapf3 is not installed: apt-get install yapf3" >&2; exit 1; }
	@git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i
	@git ls-files '*.py' | xargs yapf3 -i

docs: ## the documents as pages that need nothing from elsewhere: build/docs/index.html
	@scripts/install-deps --only-docs
	@scripts/build-docs build/docs

bench: ## build the benches in build/release/bin and list them
	@$(MAKE) --no-print-directory build-all
	@ls build/release/bin | grep -E 'bench' || echo "no bench program in this version"

figures: ## the figures of bench/results, drawn from the CSV files beside them (gnuplot)
	@gnuplot -d bench/results/figures.gp

SOAK_TRANSFERS ?= 1000000
SOAK_SEED ?= $(shell date +%s)
SOAK_CSV ?= build/xfer_soak.csv
soak: ## SOAK_TRANSFERS=1000000 KV transfers over every path while everything goes wrong; counts go to SOAK_CSV
	@cmake --preset release >/dev/null && cmake --build build/release -j $(JOBS) --target xfer_soak
	@build/release/bin/xfer_soak --transfers $(SOAK_TRANSFERS) --seed $(SOAK_SEED) --csv $(SOAK_CSV) --commit $$(git rev-parse --short HEAD) --machine $$(uname -m)-$$(nproc)cpu

clean: ## remove build/
	@rm -rf build
