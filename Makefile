# The commands of a working day. Everything else has its own --help: see README.md and docs/index.md.
PYTHON := .venv/bin/python
export PYTHONSAFEPATH := 1
T ?=

.PHONY: help check test test-full docs

help:  ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|'

$(PYTHON):
	bash launch/test.sh tests/schema

check: | $(PYTHON)  ## Lint and type-check.
	$(PYTHON) -m ruff check --quiet .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) -m mypy --no-error-summary megatron_rc tests/support/typed_user.py

# pytest answers 5 when it ran no test: tests of the kernels run under TRITON_INTERPRET=1 alone
test: | $(PYTHON)  ## Run the whole test command; make test T=tests/schema runs those tests alone and installs nothing.
ifeq ($(T),)
	bash launch/test.sh
else
	@status=0; $(PYTHON) -m pytest -q $(T) || status=$$?; \
	if [ $$status -eq 5 ]; then TRITON_INTERPRET=1 $(PYTHON) -m pytest -q $(T); else exit $$status; fi
endif

test-full: | $(PYTHON)  ## Run the whole test command with the slow and large tests.
	bash launch/test.sh --full

docs: | $(PYTHON)  ## Write the generated documents again.
	$(PYTHON) -m megatron_rc settings > docs/settings.md
	# tables of runs follow the printed part of this page
	{ $(PYTHON) -m megatron_rc presets; echo; sed -n '/^## /,$$p' docs/presets.md; } > docs/presets.new
	mv docs/presets.new docs/presets.md
	$(PYTHON) -m megatron_rc metrics > docs/metrics.md
	$(PYTHON) -m megatron_rc versions > docs/versions.md
	$(PYTHON) benchmarks/diagnosis/analyze_docs.py
	$(PYTHON) benchmarks/gradients/truth.py --docs
	$(PYTHON) benchmarks/collapse/verdict.py --docs
