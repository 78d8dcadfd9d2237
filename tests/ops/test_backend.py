"""Which backend is selected, how it is described, and the error if the requested one is unavailable."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_core.config import ModelConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.errors import ConfigError
from megatron_core.ops import backend, native, reference, rms_norm
from tests.ops import libraries
from tests.runs import tiny_run


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without a compiler: the folder of the libraries is empty."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.library.cache_clear()
    native.unavailable_reason.cache_clear()
    yield tmp_path
    native.library.cache_clear()
    native.unavailable_reason.cache_clear()


def test_auto_takes_the_reference_where_nothing_was_built(nothing_built: Path) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    said = backend.describe_backends("auto", "cpu", torch.float32)
    assert said.startswith(f"reference (PyTorch) for {', '.join(backend.OPS)}")
    assert "was not built; install a C++ compiler (GCC or Clang), then run pip install . (or -e .) again" in said


def test_what_is_asked_for_and_absent_is_an_error(nothing_built: Path) -> None:
    with pytest.raises(ConfigError, match=r"kernel_backend='native'.*rms_norm.*was not built.*kernel_backend='auto'"):
        rms_norm(torch.randn(3, 8), torch.randn(8), backend="native")


def test_a_model_fails_when_it_is_built_not_at_its_first_step(nothing_built: Path) -> None:
    with pytest.raises(ConfigError, match="kernel_backend='native'"):
        tiny_run(kernel_backend="native")
    tiny_run(kernel_backend="auto")


def test_a_library_that_does_not_load_is_named(nothing_built: Path) -> None:
    (nothing_built / "libmegatron_cpu_default.so").write_bytes(b"no library")
    with pytest.raises(ConfigError, match=r"libmegatron_cpu_default.so cannot be loaded"):
        native.library("cpu", torch.float32)


def test_a_library_of_another_version_is_named(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(megatron_interface=lambda version=native.INTERFACE: version)
    (nothing_built / "libmegatron_cpu_default.so").touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    assert native.library("cpu", torch.float32) is library
    native.library.cache_clear()
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    with pytest.raises(ConfigError, match=f"has interface version {native.INTERFACE - 1}, but {native.INTERFACE}"):
        native.library("cpu", torch.float32)


def test_both_sides_have_the_same_version_of_the_interface() -> None:
    header = (libraries.CSRC / "common" / "interface.h").read_text()
    assert re.search(r"kInterface = (\d+);", header)[1] == str(native.INTERFACE)
    assert dict(re.findall(r"(Float32|Float64|BFloat16|Float16) = (\d)", header)) == {
        "Float32": "0",
        "Float64": "1",
        "BFloat16": "2",
        "Float16": "3",
    }


def test_a_data_type_without_a_native_kernel() -> None:
    obstacle = native.unavailable_reason("rms_norm", "cpu", torch.int32)
    assert obstacle is not None
    assert "native kernels run on cpu and cuda" in native.unavailable_reason("rms_norm", "mps", torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert native.unavailable_reason("rms_norm", "cuda", torch.float32) == "torch sees no CUDA device"


def test_what_serves_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.use(libraries.cpu, monkeypatch)
    assert re.fullmatch(r"native \(libmegatron_cpu_\w+\.so\)", backend.describe_backends("auto", "cpu", torch.float32))
    assert backend.describe_backends("auto", "cpu", torch.float64) == "native (libmegatron_cpu_default.so)"
    assert backend.describe_backends("reference", "cpu", torch.float32) == "reference (PyTorch), as requested"


def test_the_flag() -> None:
    assert ModelConfig().kernel_backend == "auto"
    assert parse_run_config(["--mock-data", "--kernel-backend", "reference"]).model.kernel_backend == "reference"
    with pytest.raises(ConfigError, match=r"--kernel-backend triton: .*legal: auto, native"):
        parse_run_config(["--mock-data", "--kernel-backend", "triton"])


@pytest.fixture
def some_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """torch sees a GPU of compute capability 9.0, and the library loads."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(native, "library", lambda device_type, dtype: SimpleNamespace(megatron_obstacle=lambda: None))
    native.unavailable_reason.cache_clear()
    yield monkeypatch
    native.unavailable_reason.cache_clear()


def test_a_gpu_that_is_new_enough_serves(some_gpu: pytest.MonkeyPatch) -> None:
    assert native.unavailable_reason("rope", "cuda", torch.bfloat16) is None
    assert native.unavailable_reason("rope", "cuda", torch.float64) == "it is not built for torch.float64 on cuda"


def test_an_old_gpu_is_named(some_gpu: pytest.MonkeyPatch) -> None:
    some_gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "Some GPU is older than compute capability 8.0" in native.unavailable_reason("rope", "cuda", torch.bfloat16)


def test_a_driver_that_is_too_old_is_named(some_gpu: pytest.MonkeyPatch) -> None:
    reason = b"CUDA driver version is insufficient for CUDA runtime version"
    some_gpu.setattr(native, "library", lambda device_type, dtype: SimpleNamespace(megatron_obstacle=lambda: reason))
    said = native.unavailable_reason("rope", "cuda", torch.bfloat16)
    assert f"its kernels do not run on Some GPU: {reason.decode()}; update the driver" in said
    assert backend.select_backend("rope", "auto", "cuda", torch.bfloat16) == "reference"
