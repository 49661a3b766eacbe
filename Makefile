# Two commands matter: `make demo` and `make test`.  Both set up .venv on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2
# One thread per worker: the suite's tensors are small and the workers are many.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint format bench test-compat soak soak-cpu soak-gpu sanitize mutate clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         conversations served from device, host and disk (ARGS='--arch v4')"
	@echo "make test         the suite (ARGS='-k NAME' for a part of it)"
	@echo "make lint         ruff, mypy --strict, who may import whom"
	@echo "make format       ruff format and the safe fixes"
	@echo "make bench        benchmarks (ARGS='core store --quick')"
	@echo "make test-compat  adapter tests on the oldest and the newest transformers"
	@echo "make soak         the stateful tests for long, then the slow tests (ARGS selects)"
	@echo "make soak-cpu     30 minutes of random traffic, every byte checked (ARGS='--minutes 5')"
	@echo "make soak-gpu     8 minutes of it on a GPU"
	@echo "make sanitize     compute-sanitizer over the kernels"
	@echo "make mutate       inject bugs into the core and see that the tests notice"

# Rebuilt only when what is to be installed changes.  torch comes first, by itself and pinned, so
# that nothing installed later can swap its build, and not quietly: it is what takes long.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip
	$(BIN)/python -m pip install -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables ruff mypy \
	    pytest pytest-timeout pytest-xdist hypothesis
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[deepseek,triton]'
	touch $@

demo: $(STAMP)
	$(BIN)/kvtier demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/meta/test_layers.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ARGS_bench = $(if $(ARGS),$(ARGS),core --quick)
bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS_bench)

test-compat:
	scripts/test_compat.sh $(PYTHON) 5.17.0 newest

soak: $(STAMP)
	$(BIN)/python -m pytest --long --timeout=0 -o faulthandler_timeout=0 \
	    $(if $(ARGS),$(ARGS),tests/property tests/shell)
	$(BIN)/python -m pytest -m slow --timeout=0 -o faulthandler_timeout=0

soak-cpu: $(STAMP)
	$(BIN)/python scripts/soak.py --device cpu --minutes 30 $(ARGS)

soak-gpu: $(STAMP)
	$(BIN)/python scripts/soak.py --device cuda --minutes 8 $(ARGS)

sanitize: $(STAMP)
	scripts/sanitize.sh $(ARGS)

mutate: $(STAMP)
	$(BIN)/python scripts/mutate.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
