"""Files of weights hold the values of every view, and each tied weight once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.runtime.weights_file import write_weights

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "other dtype": lambda base: base.view(torch.int32),
    "other strides": lambda base: base.flatten().as_strided((5, 5), (0, 1)),
    "rows": lambda base: base[:2],
    "second half": lambda base: base[2:],
    "one column": lambda base: base[:, :1],
    "no elements": lambda base: base[:0],
    "expanded": lambda base: base[:1].expand(5, 5),
}


def _base() -> Tensor:
    return torch.randn(5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("view", VIEWS)
def test_view_with_the_memory_of_another_tensor(view: str, suffix: str, tmp_path: Path) -> None:
    base = _base()
    state = {"base": base, "view": VIEWS[view](base), "after": base}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    path = tmp_path / f"weights{suffix}"
    write_weights(state, path)
    stored = torch.load(path, weights_only=True) if suffix == ".bin" else load_file(path)
    assert stored.keys() == state.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor), name


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    base = torch.complex(_base(), _base().t())
    views = {"conjugate": base.conj(), "imaginary": base.imag, "negative": base.conj().imag}
    for suffix in (".bin", ".safetensors"):
        path = tmp_path / f"weights{suffix}"
        write_weights({"base": base, **views}, path)
        stored = torch.load(path, weights_only=True) if suffix == ".bin" else load_file(path)
        assert torch.equal(stored["conjugate"], torch.complex(_base(), -_base().t()))
        assert torch.equal(stored["imaginary"], _base().t())
        assert torch.equal(stored["negative"], -_base().t())


def test_sparse_buffer(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    write_weights({"sparse": sparse, "same": sparse}, tmp_path / "weights.bin")
    stored = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert torch.equal(stored["same"].to_dense(), torch.eye(3))


def test_tied_weight_is_stored_once(tmp_path: Path) -> None:
    base = _base()
    write_weights({"embedding": base, "head": base.detach(), "row": base[:1]}, tmp_path / "weights.bin")
    stored = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert stored["embedding"].data_ptr() == stored["head"].data_ptr()
    assert stored["row"].untyped_storage().nbytes() == base[:1].nbytes
