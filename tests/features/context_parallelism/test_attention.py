"""Attention of each rank, with all ranks simulated in one process, against the whole softmax in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import LayoutError
from megatron_core.features.context_parallelism import HeadExchange, Products, SplitSequence, Unfused, split_attention
from megatron_core.features.context_parallelism.core_attention import ContextParallelAttention
from megatron_core.features.context_parallelism.products import FusedOnCPU, merge_
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from tests.defects.plant import planted
from tests.features.context_parallelism.test_tiles import lengths_of, seen


@dataclass
class Simulated:
    """The exchange of one rank: the blocks of all ranks are known; gradients for other ranks are stored."""

    group: LocalGroup
    blocks: list[Tensor]
    gradients: list[list[Tensor]] = field(default_factory=list)

    def forward(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.group.size()):
            owner = (self.group.rank() - step) % self.group.size()
            yield owner, self.blocks[owner]

    def backward(self, own: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        for owner, block in self.forward(own):
            self.gradients[owner].append(gradient_of(owner, block))
        return torch.zeros_like(own)


def whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The definition."""
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1) @ value


CASES = {
    "causal": (None, None),
    "values of fewer channels": (None, None),
    "documents": (7, None),
    "window": (None, 5),
    "window of many tiles": (None, 200),
    "documents and window": (8, 9),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float64), (2, torch.bfloat16), (4, torch.float64)], ids=str)
@pytest.mark.parametrize("products", [Unfused(), FusedOnCPU()], ids=["unfused", "fused"])
def test_output_and_gradients(case: str, size: int, products: Products, dtype: torch.dtype) -> None:  # C23
    seed, window = CASES[case]
    length = 48 if window != 200 else 640
    documents = None if seed is None else (lengths_of(length, seed), lengths_of(length, seed + 1))
    generator = torch.Generator().manual_seed(1)
    d = 5 if case.startswith("values") else 8
    shapes = [(2, 4, length, 8), (2, 2, length, 8), (2, 2, length, d), (2, 4, length, d)]
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    exact = [x.double().clone().requires_grad_() for x in inputs]
    expected = whole(*exact, seen(length, documents, window).expand(2, -1, -1))
    expected.backward(grad.double())
    where = [SequenceSplit(cp_rank=rank, cp_size=size).positions(length) for rank in range(size)]
    parts = [[x[:, :, at].clone().requires_grad_() for x in inputs] for at in where]
    blocks, gradients = [torch.cat(part[1:], dim=-1).detach() for part in parts], [[] for _ in where]
    bound = 1e-12 if dtype == torch.float64 else 3e-2
    for rank, at in enumerate(where):
        exchange = Simulated(LocalGroup(size, rank), blocks, gradients)
        out = split_attention(*parts[rank], SplitSequence(length, exchange, products, documents, window))
        assert out.dtype == dtype
        out.backward(grad[:, :, at])
        torch.testing.assert_close(out.double(), expected[:, :, at], rtol=bound, atol=bound)
        grad_query = parts[rank][0].grad.double()
        torch.testing.assert_close(grad_query, exact[0].grad[:, :, at], rtol=bound, atol=bound)
    for at, summands in zip(where, gradients, strict=True):
        for x, found in zip(exact[1:], sum(summands).split([8, d], dim=-1), strict=True):
            torch.testing.assert_close(found.double(), x.grad[:, :, at], rtol=bound, atol=bound)


@pytest.mark.parametrize("case", CASES)
def test_groups_before_torch_2_9(case: str) -> None:  # C23
    """Keys and values are repeated: the operator of torch 2.8 has no groups, and reads beyond their memory."""
    with mock.patch.object(torch, "__version__", "2.8.0"):
        test_output_and_gradients(case, 2, FusedOnCPU(), torch.float64)


@pytest.mark.parametrize("case", ["mask", "documents", "window"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_a_mask_of_ones_own(case: str, backend: str, dtype: torch.dtype) -> None:  # C23
    """Of whole sequences, combined with documents and windows but without causality; some queries see no key, or no key
    on one of the ranks."""
    length, size = 48, 2
    config = ModelConfig(hidden_size=32, num_attention_heads=4, attention_dropout=0.0, attention_backend=backend)
    layers = LayerContext(config, ModelParallelConfig(params_dtype=dtype), LocalGroup(), 1)
    generator = torch.Generator().manual_seed(1)
    masked = torch.rand(2, 1, length, length, generator=generator) < 0.5
    masked[0, :, 5] = masked[1, :, 20:30, SequenceSplit(cp_rank=0, cp_size=size).positions(length)] = True
    documents = [lengths_of(length, 7), lengths_of(length, 8)] if case == "documents" else None
    window = (9, 0) if case == "window" else None
    packed = None if documents is None else PackedDocuments.of(documents, 2, length, torch.device("cpu"))
    context = SequenceContext(attention_mask=masked, documents=packed)
    *inputs, grad = (torch.randn(length, 2, *shape, generator=generator).to(dtype) for shape in [(4, 8)] * 3 + [(32,)])
    exact = [x.double().clone().requires_grad_() for x in inputs]
    expected = CoreAttention(layers, 0, window_size=window)(*exact, context)
    expected.backward(grad.double())
    where = [SequenceSplit(cp_rank=rank, cp_size=size).positions(length) for rank in range(size)]
    parts = [[x[at].clone().requires_grad_() for x in inputs] for at in where]
    blocks = [torch.cat([x.detach().permute(1, 2, 0, 3) for x in part[1:]], dim=-1) for part in parts]
    gradients: list[list[Tensor]] = [[] for _ in where]
    bound = 1e-12 if dtype == torch.float64 else 3e-2
    for rank, at in enumerate(where):
        exchange = Simulated(LocalGroup(size, rank), blocks, gradients)
        core = ContextParallelAttention(layers, 0, exchange=exchange, window_size=window)
        out = core(*parts[rank], context)
        out.backward(grad[at])
        torch.testing.assert_close(out.double(), expected[at], rtol=bound, atol=bound)
        torch.testing.assert_close(parts[rank][0].grad.double(), exact[0].grad[at], rtol=bound, atol=bound)
    for at, summands in zip(where, gradients, strict=True):
        for x, found in zip(exact[1:], sum(summands).chunk(2, dim=-1), strict=True):
            torch.testing.assert_close(found.double().permute(2, 0, 1, 3), x.grad[at], rtol=bound, atol=bound)
    with pytest.raises(LayoutError, match=r"attention_mask is \[2, 1, 24, 48\].*\[b, 1, 48, 48\]"):
        core(*parts[-1], SequenceContext(attention_mask=masked[:, :, :24]))


MASK, SHARED = (
    "features.context_parallelism.core_attention:ContextParallelAttention._mask",
    "features.context_parallelism.products:FusedOnCPU",
)
DEFECTS = {
    "keys of another rank are hidden as its own are": (
        *("mask", MASK),
        *("self._positions(owner, length, mask.device)", "self._positions(self.exchange.group.rank(), length, None)"),
    ),
    "queries are hidden as if parts were contiguous": (
        *("mask", MASK),
        "self._positions(self.exchange.group.rank(), length, mask.device)",
        "slice(0, length // self.exchange.group.size())",
    ),
    "all sequences have the mask of the first": (
        *("documents", MASK),
        *("tile.rows if len(local) > 1 else slice(None)", "slice(0, 1)"),
    ),
    "a mask comes on top of causality": (
        *("mask", "features.context_parallelism.attention:SplitSequence.tiles_with"),
        *("if not self.causal:", "if False:"),
    ),
    "a mask takes the place of documents": (
        *("documents", "features.context_parallelism.core_attention:ContextParallelAttention.forward"),
        *(" or documents is not None", ""),
    ),
    "a mask takes the place of a window": (
        *("window", "features.context_parallelism.core_attention:ContextParallelAttention.forward"),
        *(" or self.window is not None", ""),
    ),
    "a query that sees nothing on a rank is averaged there": (
        *("mask", f"{SHARED}.forward"),
        *("if self.mask is not None and mask is not None:", "if False:"),
    ),
    "backward hides nothing": ("mask", f"{SHARED}.backward", "self._added(query, tile, owner)", "None"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_mask_that_is_not_cut_as_it_should_be_is_found(defect: str) -> None:
    case, *fragment = DEFECTS[defect]
    with planted(*fragment), pytest.raises(AssertionError, match="not close"):
        test_a_mask_of_ones_own(case, "auto", torch.float64)


def test_parts_are_merged_in_float32() -> None:
    """4096 parts with small contributions: in bfloat16, or without subtraction of the maximum, they would be lost."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4096, dtype=torch.float64, generator=generator) * 3 + 80
    values = torch.randn(4096, dtype=torch.float64, generator=generator)
    out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -torch.inf)
    for score, value in zip(scores, values.bfloat16(), strict=True):
        merge_(out, lse, value.view(1, 1, 1, 1), score.float().view(1, 1, 1))
    torch.testing.assert_close(lse.double().squeeze(), scores.logsumexp(0), rtol=1e-5, atol=0)
    expected = scores.softmax(0) @ values.bfloat16().double()
    torch.testing.assert_close(out.double().squeeze(), expected, rtol=1e-3, atol=1e-4)


def test_keys_that_none_sees_change_nothing() -> None:
    """Merging -inf with -inf would give NaN: tiles have no such rows, and only the first merge has one."""
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    part = torch.randn(1, 1, 2, 3)
    merge_(out, lse, part, torch.tensor([[[0.5, -200.0]]]))
    assert torch.equal(out, part) and torch.equal(lse, torch.tensor([[[0.5, -200.0]]]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_of_neighbours_are_put_in_order(size: int) -> None:
    exchange = HeadExchange(LocalGroup(size))
    for ring_rank in range(2):
        ranks = range(ring_rank * size, (ring_rank + 1) * size)
        parts = torch.stack([SequenceSplit(cp_rank=r, cp_size=2 * size).positions(24 * size) for r in ranks])
        ordered = exchange._ascending(parts)
        assert torch.equal(ordered, SequenceSplit(cp_rank=ring_rank, cp_size=2).positions(24 * size))
        assert torch.equal(exchange._by_rank(ordered), parts)
