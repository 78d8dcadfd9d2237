"""The unfused paths of attention: input of the softmax, accuracy in low precision, blocks of queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import core_attention
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from tests.defects.plant import planted
from tests.runs import tiny_run

HEADS, SIZE, BATCH = 4, 8, 2
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


def core(backend: str, p: float = 0.0) -> CoreAttention:
    config = ModelConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        attention_backend="unfused",
        kernel_backend=backend,
        attention_dropout=p,
    )
    return CoreAttention(LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1), 0)


def attended(module: CoreAttention, tensors: list[Tensor], **context: object) -> list[Tensor]:
    """Output, and the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = module(*leaves, SequenceContext(**{"sample_index": torch.arange(BATCH)} | context))
    weights = torch.arange(output.numel(), dtype=torch.float64).reshape(output.shape).cos()
    return [output, *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


def drawn(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = (queries, keys, keys)
    return [torch.randn(n, BATCH, HEADS, SIZE, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]


@BACKENDS
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 7)])
def test_without_a_mask_the_last_query_sees_all_keys(backend: str, queries: int, keys: int) -> None:
    tensors = drawn(queries, keys, torch.float64)
    outside = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    expected = attended(core(backend), tensors, attention_mask=outside.expand(BATCH, 1, -1, -1))
    for found, right in zip(attended(core(backend), tensors), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@BACKENDS
def test_a_query_that_sees_nothing_attends_to_nothing(backend: str) -> None:
    masked = torch.zeros(BATCH, 1, 7, 7, dtype=torch.bool)
    masked[1, :, 4] = True
    output, *gradients = attended(core(backend), drawn(7, 7, torch.float32), attention_mask=masked)
    assert (output[4, 1] == 0).all() and (output[4, 0] != 0).any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][4, 1] == 0).all()


@BACKENDS
@pytest.mark.parametrize("with_documents", [False, True])
def test_bfloat16_with_dropout_is_as_good_as_its_inputs(backend: str, with_documents: bool) -> None:
    """The softmax is computed in float32, and the factor 1 / (1 - p) of dropout is not rounded to bfloat16."""
    documents = PackedDocuments.of([[60, 40]] * BATCH, BATCH, 100, torch.device("cpu")) if with_documents else None
    tensors = drawn(100, 100, torch.bfloat16)
    found = attended(core(backend, 0.1), tensors, documents=documents)
    expected = attended(core("reference", 0.1), [x.double() for x in tensors], documents=documents)
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - right).norm() < 8e-3 * right.norm()
    slope = (found[0].double() * expected[0]).sum() / expected[0].square().sum()
    assert abs(slope - 1) < 5e-4


@BACKENDS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_gives_the_same_gradients(backend: str, dtype: str) -> None:  # C27
    """With attention dropout, bitwise."""

    def gradients(**settings: object) -> list[Tensor]:
        run = tiny_run(
            attention_dropout=0.3, hidden_dropout=0.0, kernel_backend=backend, bf16=dtype == "bf16", **settings
        )
        (model,) = run.stages.values()
        tokens = torch.arange(16).reshape(2, 8)
        model(tokens, sequences=SequenceDetails(sample_index=torch.arange(2))).float().square().sum().backward()
        return [p.grad if p.grad is not None else p.main_grad for p in model.parameters()]

    plain, again = gradients(), gradients(recompute_granularity="selective")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def windowed(window: int, p: float = 0.0, **settings: object) -> CoreAttention:
    config = ModelConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS, attention_dropout=p, **settings)
    return CoreAttention(LayerContext(config, ModelParallelConfig(), LocalGroup(), 1), 0, window_size=(window - 1, 0))


WHOLE = [(24, 24, 1), (24, 24, 5), (24, 24, 6), (24, 24, 13), (24, 24, 24), (24, 24, 30)]
WITH_CACHE = [(1, 9, 4), (3, 9, 4), (3, 9, 20)]  # documents are of whole sequences


@pytest.mark.parametrize(
    ("context", "queries", "keys", "window"),
    [(context, *case) for context in ("plain", "documents", "mask") for case in WHOLE]
    + [(context, *case) for context in ("plain", "mask") for case in WITH_CACHE],
)
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_a_window_is_what_its_mask_says(backend: str, context: str, queries: int, keys: int, window: int) -> None:
    """Blocks of queries, masks and the unfused path, also within documents and together with a mask, against softmax
    with every pair written out."""
    lengths = [[11, 1, 12], [24]]
    own = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = ((own < 0) | (own >= window)).repeat(BATCH, 1, 1, 1)
    given: dict[str, object] = {}
    if context == "documents":
        given["documents"] = PackedDocuments.of(lengths, BATCH, keys, torch.device("cpu"))
        document = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
        hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])
    elif context == "mask":
        given["attention_mask"] = (own < 0) | (torch.arange(keys) % 5 == 3) & (own > 0)
        hidden = hidden | given["attention_mask"]

    def expected(query: Tensor, key: Tensor, value: Tensor, _: SequenceContext) -> Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / SIZE**0.5
        return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(2)

    tensors = drawn(queries, keys, torch.float64)
    found = attended(windowed(window, attention_backend=backend), tensors, **given)
    for mine, right in zip(found, attended(expected, tensors), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


def test_memory_of_a_window_grows_with_the_sequence_not_with_its_square() -> None:
    """Elements of the tensors passed to torch's attention, for sequences of 64 and of 256 tokens."""
    sizes = []
    original = nn.functional.scaled_dot_product_attention

    def counted(*args: Tensor, attn_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        sizes[-1] += sum(x.numel() for x in args) + (0 if attn_mask is None else attn_mask.numel())
        return original(*args, attn_mask=attn_mask, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", counted)
        for length in (64, 256):
            sizes.append(0)
            windowed(8)(*drawn(length, length, torch.float32), SequenceContext())
    assert sizes[1] < 4.5 * sizes[0]


def test_scaling_by_the_layers_number_is_the_same_function_and_overflows_later() -> None:
    """Products of 3 x 80,000 are too large for float16, a third of them is not."""
    config = ModelConfig(num_layers=8, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, attention_backend="unfused")
    config = replace(config, attention_dropout=0.0)
    context = LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1)
    scaling = replace(config, apply_query_key_layer_scaling=True)
    scaled = LayerContext(scaling, ModelParallelConfig(), LocalGroup(), seed=1)
    tensors = drawn(5, 5, torch.float64)
    for ours, theirs in zip(
        attended(CoreAttention(scaled, 6), tensors), attended(CoreAttention(context, 6), tensors), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    large = [torch.full_like(x, 100.0, dtype=torch.float16) for x in tensors]  # 8 x 100 x 100 = 80,000
    assert not attended(CoreAttention(context, 6), large)[0].isfinite().all()
    assert attended(CoreAttention(scaled, 6), large)[0].isfinite().all()


def with_formula(window: int | None, **settings: object) -> CoreAttention:
    config = ModelConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS, **settings)
    context = LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1)
    return CoreAttention(context, 2, window_size=None if window is None else (window - 1, 0))


FORMULAS = {
    "dropout": {"attention_dropout": 0.4},
    "bounded scores": {"attention_dropout": 0.0, "attn_logit_softcapping": 1.5},
    "both": {"attention_dropout": 0.4, "attn_logit_softcapping": 1.5, "apply_query_key_layer_scaling": True},
}
PLACES = {
    "plain": {},
    "documents": {"documents": PackedDocuments.of([[11, 1, 12], [24]], BATCH, 24, torch.device("cpu"))},
    "other positions": {"positions": torch.arange(24).roll(7)},
}


def differences_from_reference(place: str, window: int | None, formula: str) -> list[float]:
    """Of output and gradients, for queries with the heads of all groups; sequences have other numbers than rows."""
    tensors = [x if i == 0 else x[:, :, :2] for i, x in enumerate(drawn(24, 24, torch.float64))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_attention, "QUERY_BLOCK", 5)
        given = {"sample_index": torch.tensor([9, 4]), **PLACES[place]}
        found, expected = (
            attended(with_formula(window, attention_backend=backend, **FORMULAS[formula]), tensors, **given)
            for backend in ("auto", "unfused")
        )
    return [(mine - right).abs().max().item() for mine, right in zip(found, expected, strict=True)]


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_blocks_of_queries_are_the_reference(formula: str, place: str, window: int | None) -> None:
    assert max(differences_from_reference(place, window, formula)) < 1e-12


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("queries", [1, 9])
def test_blocks_of_fewer_queries_than_keys_are_the_reference(
    queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_attention, "QUERY_BLOCK", 5)
    tensors = drawn(queries, 24, torch.float64)
    found, expected = (
        attended(with_formula(window, attention_backend=backend, **FORMULAS["bounded scores"]), tensors)
        for backend in ("auto", "unfused")
    )
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("target", "old", "new", "place"),
    [
        ("CoreAttention._by_blocks", "start + 1 - self.window", "start + 2 - self.window", "plain"),
        (
            "CoreAttention._by_blocks",
            "span.start + first, span.start + stop",
            "first, stop",
            "documents",
        ),
        ("CoreAttention._by_blocks", "samples[span.sample : span.sample + 1]", "samples[:1]", "documents"),
        ("CoreAttention._by_blocks", "value[:, :, first:stop]", "value[:, :, : stop - first]", "plain"),
        (
            "attention_by_documents",
            "value.split(1), lengths, strict",
            "value.split(1), [[10, 2, 12], [24]], strict",
            "documents",
        ),
        ("_positions", "context.positions[start:stop]", "context.positions[: stop - start]", "other positions"),
    ],
    ids=["window", "keys of a document", "sample", "values of a window", "boundary", "positions"],
)
def test_a_defect_changes_the_result(target: str, old: str, new: str, place: str) -> None:
    with planted(f"transformer.core_attention:{target}", old, new):
        assert max(differences_from_reference(place, 7, "both")) > 1e-3
