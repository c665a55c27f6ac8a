# make run    simulated workers and two replicas on this machine, ready for curl
# make test   the tests
# make check  lint, format, types

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	command -v $(name) >/dev/null && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $(name))))
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test check clean

run: $(READY)
	@exec $(BIN)/coatcheck up

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict app backends mocker

clean:
	rm -rf .venv .coatcheck .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "coatcheck needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $@
