# Everything a checkout needs lives in .venv; every target makes it when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHART_STAMP := $(VENV)/.chart-installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo run test test-vllm chart lint proto envoy-config bench

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv with the package and its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "$(PYTHON) is not Python 3.11 or newer with venv; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[simulator,envoy-config]' --group dev
	@touch $@

demo: $(STAMP) ## a multimodal request through a real Envoy, in three forms
	@$(BIN)/python -m deploy.envoy.demo

run: $(STAMP) ## keep the demo running, and print requests to try
	@$(BIN)/python -m deploy.envoy.demo --keep

test: $(STAMP) ## unit tests, then tests through a real Envoy
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/unit tests/e2e

test-vllm: $(STAMP) ## the sidecar against real vLLM on CPU (installs it once, 3.4 GB)
	$(BIN)/python -m tests.vllm.run

chart: $(CHART_STAMP) ## the Helm chart: rendered, and held to the Kubernetes API (installs Helm's engine once)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/chart

$(CHART_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --group chart
	@touch $@

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(STAMP) ## compile proto/ into sidecar/extproc/pb
	$(BIN)/python proto/compile.py

ENVOY_CONFIG := $(BIN)/epd-sidecar envoy-config --config deploy/envoy/sidecar.yaml --topology

envoy-config: $(STAMP) ## write the Envoy configurations in deploy/envoy
	$(ENVOY_CONFIG) internal-listener > deploy/envoy/bootstrap.yaml
	$(ENVOY_CONFIG) reroute > deploy/envoy/reroute.yaml
	SIDECAR__GATEWAY__ADDRESS=http://127.0.0.1:10000 SIDECAR__GATEWAY__PHASE_TOKEN=only-its-presence-counts \
	  $(ENVOY_CONFIG) shared-listener > deploy/envoy/shared-listener.yaml

bench: $(STAMP) ## measure the request body path
	$(BIN)/python benchmarks/body_path.py
