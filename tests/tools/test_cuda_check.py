"""The table of resources of the CUDA kernels, and its exit status."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from tools import cuda_check
from tools.cuda_check import Kernel, Settings, main, parse, table

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_80'
ptxas info    : Function properties for _Z1aPf
    8 bytes stack frame, {stores} bytes spill stores, 12 bytes spill loads
ptxas info    : Used 84 registers, used 1 barriers, 256 bytes smem, 456 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_90a'
ptxas info    : Function properties for _Z1bPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
"""


def test_what_the_compiler_says_is_read() -> None:
    kernels = parse(LOG.format(stores=4))
    assert kernels == [Kernel("_Z1aPf", "sm_80", 84, 256, 16), Kernel("_Z1bPf", "sm_90a", 20, 0, 0)]
    assert "84 regs, 256 B +16 B spilled" in table(kernels)


def test_a_log_that_is_not_understood_is_no_success() -> None:
    with pytest.raises(ConfigError, match="cannot be parsed"):
        parse("ptxas info : Compiling entry function 'a' for 'sm_80'\n")


def test_spills_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_check, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(cuda_check, "known_to", lambda nvcc, architectures: ["80", "90a"])
    monkeypatch.setattr(cuda_check, "compile_source", lambda *args: LOG.format(stores=4))
    assert main(Settings()) == 1
    printed = capsys.readouterr().out
    files = len(list((cuda_check.CSRC / "cuda").glob("*.cu")))
    assert f"{2 * files} kernels" in printed and f"{files} of them spill" in printed
    assert "does not support compute capability 100" in printed


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    with pytest.raises(ConfigError, match="nvcc was not found; install the CUDA toolkit"):
        main(Settings())


@pytest.mark.whole_matrix
@pytest.mark.skipif(not (os.environ.get("CUDACXX") or shutil.which("nvcc")), reason="there is no nvcc")
def test_the_kernels_compile_without_spills(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Settings(architectures=("90a",))) == 0
    assert "rms_norm_backward_kernel<__nv_bfloat16, 8, 2>" in capsys.readouterr().out


def test_a_source_that_does_not_compile_is_shown(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    with pytest.raises(ConfigError, match="does not compile:\nerror: no such thing"):
        cuda_check.compile_source(str(nvcc), tmp_path / "a.cu", "80", ["80"])
