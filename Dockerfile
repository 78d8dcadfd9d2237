# Images with the built wheel: CPU (`docker build --target cpu .`) and CUDA (`docker build .`, the default).
# This file is checked by tests/examples/test_dockerfile.py and hadolint; docs/containers.md says what has been built.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${PYTHON_IMAGE} AS wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The distribution's compiler builds the native kernels; its version is that of the pinned base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY megatron_core megatron_core
RUN pip install --no-cache-dir build==1.3.0 \
    && python -m build --wheel --outdir /wheels

FROM ${PYTHON_IMAGE} AS cpu
RUN useradd --create-home --uid 1000 trainer
COPY --from=wheel /wheels /wheels
# The wheel has no version to pin: it is the one of this source.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu \
    && wheel=$(find /wheels -name "*.whl") \
    && pip install --no-cache-dir "${wheel}[fast,server,storage]" \
    && rm -rf /wheels
COPY --chown=1000 examples /workspace/examples
COPY --chown=1000 tools /workspace/tools
COPY --chown=1000 pretrain_gpt.py /workspace/
RUN chown 1000 /workspace
WORKDIR /workspace
USER 1000
CMD ["megatron-doctor"]

FROM ${CUDA_IMAGE} AS cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 trainer
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY megatron_core megatron_core
# PyPI's torch 2.13 is built for CUDA 13.0; both have every fast path of megatron_core/reports/fast_paths.py. The kernels
# for GPUs are compiled here, by the image's nvcc. make gpu needs pytest and transformers. The package is this source and
# has no version to pin.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir torch==2.13.0 \
    && python -c "import torch; assert torch.version.cuda == '13.0', torch.version.cuda" \
    && pip install --no-cache-dir ".[fast,server,storage]" pytest==9.2.0 pytest-timeout==2.4.0 hypothesis==6.170.17 \
    transformers==5.24.0
COPY --chown=1000 benchmarks /workspace/benchmarks
COPY --chown=1000 examples /workspace/examples
COPY --chown=1000 tests /workspace/tests
COPY --chown=1000 tools /workspace/tools
COPY --chown=1000 Makefile pretrain_gpt.py pyproject.toml /workspace/
RUN chown 1000 /workspace
WORKDIR /workspace
USER 1000
CMD ["megatron-doctor"]
