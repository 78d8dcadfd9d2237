"""The split embedding against ``F.embedding`` in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron_core.errors import DataError, LayoutError
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig, VocabParallelEmbedding
from megatron_core.tensor_parallel.layers import vocabulary_per_rank
from megatron_core.tensor_parallel.lookup import vocab_parallel_lookup
from megatron_core.verify.ranks import run_ranks

VOCAB, HIDDEN, BATCH, LENGTH = 9, 6, 3, 8
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _check(group: Group, padded_size: int, *, sequence_parallel: bool) -> None:
    size, index = group.size(), group.rank()
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCAB, HIDDEN, generator=generator).double().requires_grad_()
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    expected = F.embedding(ids, table)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(grad)

    layer = VocabParallelEmbedding(
        VOCAB,
        HIDDEN,
        init_method=lambda full: full.copy_(table.detach()),
        reduce_scatter_embeddings=sequence_parallel,
        config=ModelParallelConfig(params_dtype=torch.float64),
        tp_group=group,
        padded_size=padded_size,
    )
    rows = padded_size // size
    assert (layer.vocab_start_index, layer.vocab_end_index) == (index * rows, (index + 1) * rows)
    found = layer(ids)
    if sequence_parallel:  # [s/tp, b, h]
        expected, grad = (x.transpose(0, 1).chunk(size)[index] for x in (expected, grad))
    torch.testing.assert_close(found, expected, **EXACT)
    found.backward(grad)
    whole = F.pad(table.grad, (0, 0, 0, padded_size - VOCAB))
    torch.testing.assert_close(layer.weight.grad, whole[index * rows : (index + 1) * rows], **EXACT)
    held = min(max(VOCAB - index * rows, 0), rows)
    assert not layer.weight[held:].any() and not layer.weight.grad[held:].any()  # C21


def _check_all() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = pairs[dist.get_rank() % 2]
    for sequence_parallel in (False, True):
        _check(dist.group.WORLD, 12, sequence_parallel=sequence_parallel)
        _check(dist.group.WORLD, 16, sequence_parallel=sequence_parallel)  # the last rank has only padding
        _check(pair, 10, sequence_parallel=sequence_parallel)  # C50


def test_split_embedding_is_the_embedding() -> None:
    run_ranks(4, _check_all)


def test_on_one_rank() -> None:
    _check(LocalGroup(), 9, sequence_parallel=False)
    _check(LocalGroup(), 16, sequence_parallel=True)


def test_rows_that_do_not_divide_are_refused() -> None:
    class ThreeRanks(LocalGroup):
        def size(self) -> int:
            return 3

    with pytest.raises(LayoutError, match="num_embeddings=10 cannot be split"):
        VocabParallelEmbedding(10, 4, tp_group=ThreeRanks())


@pytest.mark.parametrize(
    ("vocab", "unit", "tp", "rows"), [(50257, 128, 1, 50304), (50257, 128, 8, 6400), (128, 128, 1, 128), (1, 1, 4, 1)]
)
def test_padded_vocabulary(vocab: int, unit: int, tp: int, rows: int) -> None:
    """Megatron-LM's rule: rounded up to a multiple of make_vocab_size_divisible_by x tp."""
    assert vocabulary_per_rank(vocab, unit, tp) == rows


def _look_up_wrong_ids() -> None:
    config, group = ModelParallelConfig(params_dtype=torch.float64), dist.group.WORLD
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, config=config, tp_group=group, padded_size=12)
    layer(torch.tensor([[0, VOCAB - 1]]))
    layer(torch.empty(0, 2, dtype=torch.long))
    for wrong in (-1, VOCAB, 11, 12, 10**6):
        with pytest.raises(DataError, match=rf"token id {wrong} is outside the vocabulary of {VOCAB} tokens"):
            layer(torch.tensor([[0, wrong], [1, 2]]))


@pytest.mark.parametrize("size", [1, 2])
def test_an_id_outside_the_vocabulary_is_an_error(size: int) -> None:
    """Also the id of a padding row, and an id that no rank has, for which the sum over ranks would be zero."""
    run_ranks(size, _look_up_wrong_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_gradient_of_a_table_is_added_row_by_row(size: int, dtype: torch.dtype) -> None:
    """Repeated tokens and rows of other ranks, compared with the gradient of torch in float64; another one is kept."""
    torch.manual_seed(0)
    tokens, given = torch.randint(0, 20, (3, 40)), torch.randn(3, 40, 6).to(dtype)
    weight = torch.nn.Parameter(torch.randn(20 // size, 6).to(dtype))
    exact = weight.detach().double().requires_grad_()
    weight.main_grad = torch.ones(20 // size, 6)
    first = 10 * (size - 1)
    found = vocab_parallel_lookup(tokens, weight, first, size, in_place=True)
    expected = vocab_parallel_lookup(tokens, exact, first, size)
    assert torch.equal(found.double(), expected)
    found.backward(given)
    expected.backward(given.double())
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), exact.grad + 1, rtol=1e-6, atol=1e-5)
