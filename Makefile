# make run    simulated workers and two replicas on this machine, ready for curl
# make demo   caches by three ways to a fleet, while a worker and a replica are killed; two minutes
# make test   the tests
# make fuzz   the generated tests, with many more examples
# make check  lint, format, types

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run demo test fuzz test-browser test-clients day check check-rules smoke smoke-lowest bench bench-peers bench-claims bench-placement bench-phases soak soak-proxy clean

run: $(READY)
	@exec $(BIN)/coatcheck up

demo: $(READY)
	@exec $(BIN)/coatcheck demo

# The alert rules and their tests by Prometheus's own tool, which Debian's `prometheus` brings
PROMTOOL ?= promtool

check-rules:
	@$(PROMTOOL) check config deploy/prometheus/prometheus.yaml
	@cd deploy/prometheus && $(PROMTOOL) test rules alerts_test.yaml

# Much of a test's time is waiting, hence more processes than a small machine has cores; `make test JOBS=1` for one
JOBS ?= 5

# Each process would compile the tests anew where Python is told to keep nothing of that
test fuzz: export PYTHONDONTWRITEBYTECODE =

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Tests whose input is generated draw a few new examples in each `make test`; here so many times as many
TIMES ?= 20

fuzz: $(READY)
	@EXAMPLES_TIMES=$(TIMES) $(BIN)/python -m pytest -n $(JOBS) --timeout 3600 -o faulthandler_timeout=0 \
		tests/proxy/test_wire_fuzz.py tests/proxy/test_wire_openapi.py tests/stores/test_model.py \
		tests/unit/test_fields.py tests/unit/test_identity.py tests/unit/test_overview.py tests/unit/test_sse.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The built wheel, installed elsewhere, routes a turn; and so with the lowest versions that pyproject.toml allows
smoke smoke-lowest: $(READY)
	@$(BIN)/python -m tests.smoke $(if $(findstring lowest,$@),--lowest)

# The operators' page in a real browser: wants chromium (Debian: apt-get install chromium), see CONTRIBUTING.md
test-browser: $(READY)
	$(BIN)/python -m pytest --timeout 400 -o faulthandler_timeout=500 tests/browser/test_page.py

# Each library in an environment of its own below .bench/clients/, see CONTRIBUTING.md; `SMALL=1` without vLLM. At most
# this many seconds for installing, and again for running:
CLIENTS_SECONDS ?= 3600

test-clients: $(READY)
	@timeout -s INT -k 60 $(CLIENTS_SECONDS) $(BIN)/python -m tests.clients.install $(if $(SMALL),,--all)
	@timeout -s INT -k 60 $(CLIENTS_SECONDS) $(BIN)/python -m pytest --timeout 500 -o faulthandler_timeout=0 tests/clients/test_python.py \
		tests/clients/test_node.py tests/clients/test_vllm.py tests/clients/test_vllm_kv.py tests/clients/test_vllm_phases.py

# An operator's day by the documentation's own commands, with nginx and Prometheus (Debian: apt-get install nginx prometheus)
day: $(READY)
	@$(BIN)/python -m tests.e2e.day

# What the router costs beside other proxies, see benchmarks/README.md
bench: $(READY)
	@GRPC_ENABLE_FORK_SUPPORT=false $(BIN)/python -m benchmarks.proxy $(if $(QUICK),--quick)

# The proxies to compare with, each in an environment of its own below .bench/; nginx and haproxy are the system's
bench-peers: $(READY)
	@grep -v '^#' benchmarks/peers.txt | while read -r line; do \
		name=$$(echo "$$line" | sed 's/[=[].*//'); first=$${line%% -- *}; needs=; \
		case "$$line" in *' -- '*) needs=$${line#* -- };; esac; \
		$(BIN)/python -m venv .bench/peers/$$name && \
		pip=".bench/peers/$$name/bin/python -m pip install -qq --disable-pip-version-check" && \
		if [ -n "$$needs" ]; then $$pip --no-deps $$first && $$pip $$needs; else $$pip "$$line"; fi </dev/null && \
		echo "$$first is installed" || echo "$$first cannot be installed here, and is left out" >&2; \
	done

# What a session's claim costs, see benchmarks/README.md; gRPC would remark on each process that is started
bench-claims: $(READY)
	@GRPC_ENABLE_FORK_SUPPORT=false $(BIN)/python -m benchmarks.claims $(if $(QUICK),--quick)

# Where new sessions go: what a choice costs, how it spreads, and policies beside peers, see benchmarks/README.md
bench-placement: $(READY)
	@$(BIN)/python -m benchmarks.placement $(if $(QUICK),--quick)

# Turns in two phases, beside the routers of vLLM and SGLang (`make bench-peers` first), see benchmarks/README.md
bench-phases: $(READY)
	@$(BIN)/python -m benchmarks.phases $(if $(QUICK),--quick)

# Of each soak: `make soak SOAK_SECONDS=60`
SOAK_SECONDS ?=
SOAK_STORE ?= file etcd
SOAK_SEED ?=

# Faults under load, and whether what happened was legal: ten minutes on each store, see tests/e2e/history/. Before that
# everything is restarted, one by one, behind nginx and HAProxy
soak: $(READY)
	@$(BIN)/python -m tests.e2e.rolling
	@for store in $(SOAK_STORE); do \
		$(BIN)/python -m tests.e2e.history --store $$store --seconds $(or $(SOAK_SECONDS),600) \
			$(if $(SOAK_SEED),--seed $(SOAK_SEED)) || exit 1; \
	done

# Half an hour of mixed load: whether the router leaks, stalls or fails, see benchmarks/README.md
soak-proxy: $(READY)
	@$(BIN)/python -m benchmarks.soak --seconds $(or $(SOAK_SECONDS),1800)

clean:
	rm -rf .venv .coatcheck .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# The first of these that is new enough.
$(READY): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3.13 python3.12 python3.11; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	test -n "$$python" || { echo "coatcheck needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	echo "Setting up .venv with $$python; this is done once."; \
	$$python -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $@
