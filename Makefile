# Every target sets itself up: python3, make, a C compiler and Java 17 are all a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Images of containers often set this: each process of a test would compile the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE
COMPILED := $(shell find src -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.h')

.PHONY: help demo test test-slow test-sample class-archive check format simulate soak bench delta-environment docs clients lock sanitize clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The locked dependencies: reinstalled only when the lock changes.
$(VENV)/.installed: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

# Ourselves, editable: rebuilt only when a compiled source or the packaging changes.
$(VENV)/.built: $(VENV)/.installed pyproject.toml setup.py $(COMPILED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/.built ## two nodes, a table and an index on Spark, a crash and a move, and whether all agree
	$(BIN)/python -m demo

# WORKERS processes share the tests; all that share a Spark run in one of them.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

test: class-archive ## run the tests
	$(PYTEST)

test-slow: class-archive ## run all tests, with the deep sizes
	UPRIVER_TEST_DEPTH=deep $(PYTEST) -m "slow or not slow" --timeout 3600

test-sample: class-archive ## run a random tenth of the slow tests, with the quick sizes: UPRIVER_SLOW_SEED=7 repeats one
	$(PYTEST) -m slow --slow-sample 0.1 --timeout 1200

# The classes of Spark as a file that Java maps: recorded once for each version of Java and Spark, in a minute.
class-archive: $(VENV)/.built
	@$(BIN)/python -m tests.support.class_archive

check: $(VENV)/.built ## format, lint, types, generated clients and docs up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --output-format concise .
	$(BIN)/mypy
	$(BIN)/python -m tools.sync_classes --check
	$(BIN)/python -m docs.generate --check

# One seed (SEED=7, with VERBOSE=1 its whole history) or many (SEEDS=0-100000); MUTATION=name breaks a rule on purpose.
simulate: $(VENV)/.built ## run simulated clusters: SEEDS=0-100000, or SEED=7 VERBOSE=1
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),0-5000)) $(if $(VERBOSE),--verbose) $(if $(MUTATION),--mutation $(MUTATION))

# SEED=7 chooses the same faults again; DIRECTORY=build/soak keeps the data and the logs of the nodes.
soak: $(VENV)/.built ## write to real nodes that are killed, moved and out of disk, and count lost writes: MINUTES=30
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(if $(DIRECTORY),--directory $(DIRECTORY))

bench: $(VENV)/.built ## measure, as ratios within one run
	for part in columns documents engine_items engine_history engine_disk engine_maintenance data_file node turns idle_connections streams fairness tap replication consumer cli targets table_parts spark; do \
	  echo "== $$part"; $(BIN)/python -m bench.$$part || exit 1; done

# For the tests that are marked delta, and for the comparisons of bench.targets. Needs Maven.
delta-environment: $(VENV)/.built ## make a virtual environment with Spark and Delta in build/delta-environment
	$(BIN)/python -m tools.delta_environment

format: $(VENV)/.built ## write the format that check wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

# AddressSanitizer watches every access of the compiled parts while their tests run. The interpreter itself is not
# instrumented, so the runtime is preloaded and leaks, of which Python has its own, are not reported.
SANITIZED := build/sanitized
sanitize: $(VENV)/.built ## run the compiled parts' tests under AddressSanitizer
	rm -rf $(SANITIZED) $(SANITIZED).src && mkdir -p $(SANITIZED).src
	cp -r src setup.py pyproject.toml README.md LICENSE $(SANITIZED).src && find $(SANITIZED).src -name '*.so' -delete
	UPRIVER_SANITIZE=1 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir --target $(SANITIZED) $(SANITIZED).src
	for library in $$(find $(SANITIZED)/upriver -name '*.so'); do nm -D $$library | grep -q __asan || { echo "$$library is not instrumented"; exit 1; }; done
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=8 PYTHONMALLOC=malloc \
	  PYTHONPATH=$(SANITIZED) $(BIN)/python -m pytest -p no:cacheprovider --timeout 1200 $(SANITIZED_TESTS)
SANITIZED_TESTS := $(addprefix tests/wire/codec/test_,columns.py bulk_requests.py frame_runs.py tap_records.py) tests/node/test_fast_path.py tests/tables/documents tests/tables/keys \
  $(addprefix tests/engine/,table/test_table.py storage/test_block_cache.py test_key_scan.py test_keyvalue.py test_cursor.py test_maintenance.py test_bucket.py test_flusher.py)

docs: $(VENV)/.built ## generate the pages that follow from the source, then build the site
	$(BIN)/python -m docs.generate
	$(BIN)/mkdocs build --quiet --strict --site-dir build/site && echo "the site is in build/site/index.html"

clients: $(VENV)/.built ## generate the synchronous clients from the asynchronous ones
	$(BIN)/python -m tools.sync_classes

lock: $(VENV)/.installed ## choose new versions of the dependencies
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --extra dev --extra pipelines --output-file requirements.lock pyproject.toml

clean: ## remove what was built
	rm -rf $(VENV) build dist src/*.egg-info
	find src -name '_*.c' -delete -o -name '*.so' -delete
