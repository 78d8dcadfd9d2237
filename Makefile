# quickstart: text -> tokens -> training on 4 ranks -> another layout -> generated text, in a few minutes
# test:       everything that runs without a GPU
# verify-all: every layout of 2, 4 and 8 ranks, and every schedule, against one process; writes docs/layouts*.md
# check:      style
# bench:      speed, side by side with transformers and torch's DDP
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Those that are no part of --all, which takes 1f1b and, with chunks, interleaved.
SCHEDULES := gpipe zb_h1 zb_h2 zb_v dualpipe_v
# A CPU build where the index has one; the range is pyproject.toml's.
TORCH ?= torch>=2.8,<2.14

.PHONY: quickstart test verify-all check bench install install-test clean

quickstart: install
	$(BIN)/python examples/quickstart.py $(if $(CORPUS),--corpus "$(CORPUS)")

test: install-test
	$(BIN)/python -m pytest

verify-all: install-test
	$(BIN)/python tools/verify_layout.py --num-layers 8 --num-attention-heads 8 --hidden-size 64 \
	  --all --world-size 2 4 8 --markdown docs/layouts.md
	$(BIN)/python tools/verify_layout.py --num-layers 8 --num-attention-heads 8 --hidden-size 64 \
	  --layouts $(foreach s,$(SCHEDULES),"pp2 $s" "pp4 $s" "pp8 $s" "tp2 pp2 dp2 $s sp zero1 overlap") \
	  --markdown docs/layouts_of_schedules.md

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install-test
	$(BIN)/python -m benchmarks.bench_step

install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
