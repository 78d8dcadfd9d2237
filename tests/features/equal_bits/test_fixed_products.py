"""Properties of matrix products on which equal bits rely: those of csrc/cpu, and this machine's (MKL, oneDNN).

If one of these tests fails on a machine, ``--layout-invariant`` does not hold there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_core.features.equal_bits.fixed_products import (
    InnerRange,
    add_chunk_products_,
    aligned,
    chunk_product,
    describe_products,
    is_native,
    product_,
    sum_of_products_,
)
from megatron_core.features.equal_bits.linear import additions
from megatron_core.ops import native
from megatron_core.parallel.tree_sum import tree_sum

SIZES = [(1, 1), (3, 5), (6, 6), (6, 8), (16, 6), (24, 11), (64, 72), (192, 100), (576, 320)]
DTYPES = [torch.float32, torch.bfloat16]
CAPABILITY = torch.backends.cpu.get_cpu_capability()


KERNELS = {
    "native": ("", 2),
    "AVX-512 without AMX": ("avx512", 1),
    "16 floats": ("avx512", 0),
    "8 floats": ("avx2", 0),
    "4 floats": ("default", 0),
}
"""Libraries, "" for the one of this processor, and the best kernel that they may use (csrc/common/fixed_products.h)."""


@pytest.fixture(params=[*KERNELS, "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs each test with each kind of products: ``native`` or ``torch``."""
    if request.param == "torch":
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not in this test")
        assert not is_native(torch.zeros(1))
        yield "torch"
        return
    if reason := native.unavailable_reason("fixed_products", "cpu", torch.float32):
        pytest.skip(reason)
    level, most = KERNELS[request.param]
    path = native.library_path("cpu", torch.float32)
    if level:
        path = path.with_name(f"libmegatron_cpu_{level}.so")
        if not path.exists() or (level != "default" and level not in native.LEVELS.get(CAPABILITY, ())):
            pytest.skip(f"this machine has no library for {level}")
    library = ctypes.CDLL(str(path))
    monkeypatch.setattr(native, "library", lambda *_: library)
    library.megatron_limit_fixed_kernels(most)
    assert is_native(torch.zeros(1))
    yield "native"
    library.megatron_limit_fixed_kernels(2)


def test_the_kernels_are_those_of_the_processor(request: pytest.FixtureRequest, backend: str) -> None:
    if backend == "torch":
        assert "torch's" in describe_products("cpu")
        return
    chosen = [native.fixed_kernel(dtype) for dtype in DTYPES]
    _, most = KERNELS[request.node.callspec.params["backend"]]
    assert (chosen == ["vectors", "vectors"]) == (most == 0 or CAPABILITY != "AVX512")
    assert most == 2 or "amx" not in chosen
    assert describe_products("cpu").startswith(f"float32 {chosen[0]}, bfloat16 {chosen[1]} (")


def _product(x: Tensor, matrix: Tensor, rows: int) -> Tensor:
    out = x.new_empty(x.shape[0], matrix.shape[1])
    product_(out, x, matrix, rows)
    return out


def _elsewhere(x: Tensor, offset: int) -> Tensor:
    """The same values at another address and with another distance between rows."""
    memory = torch.empty(offset + x.shape[0] * (x.shape[1] + 5), dtype=x.dtype)
    view = memory[offset:].view(x.shape[0], -1)[:, : x.shape[1]]
    return view.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "columns"), SIZES)
def test_a_row_does_not_depend_on_the_others(inner: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner + columns)
    for rows in (32, 128):
        x = torch.randn(300, inner, generator=generator).to(dtype)
        matrix = torch.randn(columns, inner, generator=generator).to(dtype).t()
        matrix = matrix if transposed else matrix.contiguous()
        whole = _product(x, matrix, rows)
        assert torch.allclose(whole.double(), x.double() @ matrix.double(), rtol=0.02, atol=0.3)
        for count in (1, 2, 3, 31, 33, 140):
            chosen = torch.randperm(len(x), generator=generator)[:count]
            assert torch.equal(_product(x[chosen], matrix, rows), whole[chosen])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_a_product_are_products_within_rounding(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x, matrix = (torch.randn(shape, generator=generator).to(dtype) for shape in ((70, 301), (301, 131)))
    whole = _product(x, matrix, 32)
    exact = x.double() @ matrix.double()
    bound = 301 * 2.0**-24 * (x.double().abs() @ matrix.double().abs())  # of any order of a sum in float32
    bound += exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 0)
    assert ((whole.double() - exact).abs() <= bound).all()
    edges = (0, 1, 6, 14, 37, 70), (0, 1, 8, 32, 50, 131) if backend == "native" else (0, 131)
    for rows in map(slice, edges[0], edges[0][1:]):
        for columns in map(slice, edges[1], edges[1][1:]):
            assert torch.equal(_product(x[rows], matrix[:, columns], 32), whole[rows, columns])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_and_strides_do_not_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for inner, columns in SIZES:
        x, matrix = (torch.randn(n, inner, generator=generator).to(dtype) for n in (40, columns))
        expected = _product(x, matrix.t(), 32)
        for offset in (1, 7, 16):
            assert torch.equal(_product(_elsewhere(x, offset), _elsewhere(matrix, offset + 2).t(), 32), expected)


def test_products_over_a_chunk() -> None:
    """Weight gradients: the sum over tokens has one shape, whatever surrounds the chunk."""
    generator = torch.Generator().manual_seed(4)
    for tokens, outputs, inputs in ((2, 8, 6), (4, 32, 24), (16, 96, 64), (100, 72, 48)):
        grad, x = (torch.randn(tokens, size, generator=generator) for size in (outputs, inputs))
        expected = chunk_product(grad, x)
        for offset in (1, 7, 16):
            assert torch.equal(chunk_product(_elsewhere(grad, offset), _elsewhere(x, offset)), expected)


def _addends(parts: int, width: int) -> tuple[InnerRange, ...]:
    return tuple(InnerRange(at * width, at * width, width, after) for at, after in enumerate(additions(parts)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "width"), [(1, 5), (2, 16), (6, 33), (8, 48), (9, 7), (12, 1)])
def test_sums_over_parts_take_the_tree(parts: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(parts)
    x, matrix = (torch.randn(n, parts * width, generator=generator).to(dtype) for n in (37, 41))
    found = x.new_empty(37, 41)
    sum_of_products_(found, x, matrix.t(), _addends(parts, width), 32)
    partial = []
    for at in range(0, parts * width, width):
        partial.append(_product(x[:, at : at + width], matrix[:, at : at + width].t(), 32))
    assert torch.equal(found, tree_sum(partial))
    assert torch.allclose(found.double(), x.double() @ matrix.double().t(), rtol=0.05, atol=0.4)
    assert parts < 6 or not torch.equal(found, sum(partial[1:], partial[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "length"), [(6, 8, 2), (40, 70, 16), (33, 31, 50)])
def test_exact_sums_of_products(outputs: int, inputs: int, length: int, dtype: torch.dtype) -> None:
    """Any grouping of the chunks, columns and rows gives the same bits, and those of the definition."""
    generator = torch.Generator().manual_seed(outputs)
    grad, x = (torch.randn(4 * length, 2, size, generator=generator).to(dtype) for size in (outputs, inputs))
    chunks = [(slice(at, at + length), b) for at in range(0, 4 * length, length) for b in range(2)]
    whole, apart = (torch.zeros(outputs, inputs, dtype=torch.float64) for _ in range(2))
    add_chunk_products_(whole, grad, x, chunks, [slice(None)], 4)
    for at, b in reversed(chunks):
        for rows in (slice(0, 5), slice(5, outputs)):
            own = [(slice(0, length), 0)]
            parts = x[at, b : b + 1].contiguous(), grad[at, b : b + 1, rows].contiguous()
            for columns in (slice(0, 3), slice(3, inputs)) if is_native(x) else (slice(None),):
                add_chunk_products_(apart[rows, columns], parts[1], parts[0][..., columns], own, [slice(None)], 4)
    exact = torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    assert torch.allclose(whole, exact, rtol=0, atol=1e-4) and torch.equal(whole * 2.0**44, (whole * 2.0**44).round())
    assert torch.equal(apart, whole) or not is_native(x)
    large = torch.full((2, 1, 1), 6.0, dtype=dtype)
    for terms, is_beyond in ((4, False), (8, True)):  # the limit is 512 / terms, and 128 at most
        found = torch.zeros(1, 1, dtype=torch.float64)
        add_chunk_products_(found, large, large, [(slice(0, 2), 0)], [slice(None)], terms)
        assert found.isnan().item() if is_beyond else found.item() == 72.0


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_native_sums_do_not_depend_on_threads_or_strides(backend: str) -> None:
    threads = torch.get_num_threads()
    x, matrix = torch.randn(300, 96), torch.randn(200, 96)
    expected = _product(x, matrix.t(), 128)
    try:
        torch.set_num_threads(2)
        for offset in (0, 1, 7):
            assert torch.equal(_product(_elsewhere(x, offset), _elsewhere(matrix, offset).t(), 128), expected)
    finally:
        torch.set_num_threads(threads)


def test_operands_that_do_not_fit_are_named() -> None:
    x, matrix, out = torch.ones(4, 64), torch.ones(32, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"x \[4, 64\] torch.float32 on cpu, matrix \[32, 8\]"):
        product_(out, x, matrix)
    for of, shown in ((InnerRange(33, 0, 32, 0), "column=33"), (InnerRange(0, 1, 32, 0), "row=1")):
        with pytest.raises(ValueError, match=shown):
            sum_of_products_(out, x, matrix, (of,))
    for wrong in (torch.ones(4, 9), torch.ones(3, 8), out.bfloat16(), out.to("meta")):
        with pytest.raises(ValueError, match="out "):
            product_(wrong, x[:, :32], matrix)
    with pytest.raises(ValueError, match=r"matrix \[32, 8\] torch.bfloat16"):
        product_(out, x[:, :32], matrix.bfloat16())


def test_chunks_that_do_not_fit_are_named() -> None:
    total, grad, x = torch.zeros(8, 6, dtype=torch.float64), torch.ones(10, 2, 8), torch.ones(10, 2, 6)

    def add(total: Tensor, grad: Tensor, x: Tensor, chunk: tuple[slice, int] = (slice(0, 5), 0)) -> None:
        add_chunk_products_(total, grad, x, [chunk], [slice(None)], 4)

    for chunk in ((slice(6, 11), 0), (slice(0, 5), 2)):
        with pytest.raises(ValueError, match=r"contain the chunks"):
            add(total, grad, x, chunk)
    for wrong in (total[:7], total[:, :5], total.float()):
        with pytest.raises(ValueError, match="total "):
            add(wrong, grad, x)
    for other in (grad[:9], grad[:, :1], grad.bfloat16()):
        with pytest.raises(ValueError, match=r"grad \["):
            add(total, other, x)
    assert not total.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_may_be_empty(dtype: torch.dtype) -> None:
    for rows, inner, columns in ((3, 5, 0), (0, 5, 3), (0, 0, 0)):
        assert _product(torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype), 16).numel() == 0
    total = torch.zeros(4, 0, dtype=torch.float64)
    chunk = torch.ones(2, 1, 4, dtype=dtype), torch.ones(2, 1, 0, dtype=dtype), [(slice(0, 2), 0)]
    add_chunk_products_(total, *chunk, [slice(None)], 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_products_are_those_of_their_columns(backend: str, dtype: torch.dtype) -> None:
    """The native kernel packs at most 32 MB of the right operand at a time."""
    x, matrix = torch.randn(3, 20_000).to(dtype), torch.randn(20_000, 850).to(dtype)
    whole = _product(x, matrix, 16)
    assert torch.allclose(whole.double(), x.double() @ matrix.double(), rtol=0.01, atol=0.01)
    if backend == "native":
        for columns in (slice(0, 7), slice(390, 500), slice(810, 850)):
            assert torch.equal(_product(x, matrix[:, columns], 16), whole[:, columns])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident memory is read from Linux")
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_large_products_do_not_keep_their_memory(backend: str) -> None:
    before = _resident()
    x, matrix = torch.ones(1).expand(3, 100_000), torch.ones(1).expand(100_000, 640)
    assert _product(x, matrix, 16).eq(100_000).all()
    assert _resident() - before < 100e6, "all of the right operand is 256 MB"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_copy_keeps_the_order_in_memory() -> None:
    x = torch.zeros(100)[1:65].view(4, 16)
    assert aligned(x).data_ptr() % 64 == 0 and aligned(x).is_contiguous()
    assert aligned(x.t()).data_ptr() % 64 == 0 and aligned(x.t()).t().is_contiguous()
