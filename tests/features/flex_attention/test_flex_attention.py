"""FlexAttention against the formula in float64, its blocks against the mask, and when it is used.

torch's public function refuses a backward on a CPU, but its unfused form computes one: here with torch's check removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from megatron_core.config import ModelConfig
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.features.cuda_graphs.graphs import graph_layers
from megatron_core.features.flex_attention import kernels
from megatron_core.features.flex_attention.kernels import BLOCK, block_mask, first_keys, unsupported_reason
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from tests.defects.plant import planted
from tests.runs import tiny_config, tiny_run
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu

CPU = torch.device("cpu")
DOCUMENTS = ((3, 200, 1, 96), (300,))
CASES: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "bounded scores": {"softcap": 1.5, "documents": ((2, 5), (1, 6))},
    "all, one group": {"window": 130, "softcap": 1.5, "documents": DOCUMENTS, "groups": 1},
    "documents, values of other heads": {"documents": DOCUMENTS, "width": 24},
}


@pytest.fixture
def unfused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """FlexAttention's unfused form with a backward on the CPU; counts its calls."""
    calls: Counter[str] = Counter()

    def counted(*args: Any, **options: Any) -> Any:
        calls["flex"] += 1
        return torchs.flex_attention(*args, **options)

    torch._dynamo.reset()  # else heads of several sizes become a dynamic shape, which torch refuses
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(kernels, "_compiled", lambda: counted)
    monkeypatch.setattr(kernels, "unsupported_reason", lambda *_: None)
    yield calls
    kernels._mask_of_length.cache_clear()


def core(backend: str, *, window: int | None = None, softcap: float | None = None, groups: int = 2) -> CoreAttention:
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, attention_backend=backend, attention_dropout=0.0,
        attn_logit_softcapping=softcap, group_query_attention=True, num_query_groups=groups,
    )  # fmt: skip
    size = None if window is None else (window - 1, 0)
    return CoreAttention(LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1), 0, window_size=size)


def attended(
    backend: str, *, documents: tuple[tuple[int, ...], ...] | None = None, groups: int = 2, width: int = 16,
    device: str = "cpu", dtype: torch.dtype = torch.float64, **settings: Any,
) -> list[Tensor]:  # fmt: skip
    """Output of attention, and the gradients of queries, keys and values."""
    length = 300 if documents is None else sum(documents[0])
    generator = torch.Generator().manual_seed(5)
    shapes = [(length, 2, count, channels) for count, channels in ((4, 16), (groups, 16), (groups, width))]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [each.to(device, dtype).requires_grad_() for each in drawn]
    packed = None if documents is None else PackedDocuments.of(documents, 2, length, torch.device(device))
    out = core(backend, groups=groups, **settings)(*inputs, SequenceContext(documents=packed))
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, dtype)
    return [each.cpu().double() for each in (out, *torch.autograd.grad(out, inputs, weights))]


def check(case: str) -> None:
    for found, expected in zip(attended("flex", **CASES[case]), attended("unfused", **CASES[case]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula_in_float64(case: str, unfused_on_cpu: Counter[str]) -> None:
    check(case)
    assert unfused_on_cpu["flex"] == 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("place", "old", "new", "case"),
    [
        ("kernels:_bounded", "score / softcap", "score", "bounded scores"),
        ("kernels:first_keys", "+ 1 - window", "- window", "window"),
        ("kernels:first_keys", "size.cumsum(0) - size", "size.cumsum(0) - size - 1", "all, one group"),
        ("kernels:flex_attention", "documents.masks.get(window)", "documents.masks.get(window, next(iter("
         "documents.masks.values()), None))", "two windows"),
    ],
    ids=["scores", "window", "documents", "mask of another window"],
)  # fmt: skip
def test_finds_defects(place: str, old: str, new: str, case: str, unfused_on_cpu: Counter[str]) -> None:
    with planted(f"features.flex_attention.{place}", old, new), pytest.raises(AssertionError):
        if case == "two windows":
            _two_windows_of_one_batch()
        else:
            check(case)


def _two_windows_of_one_batch() -> None:
    """Layers with and without a window share a micro-batch."""
    packed = PackedDocuments.of(DOCUMENTS, 2, 300, CPU)
    x = torch.randn(300, 2, 4, 16, dtype=torch.float64)
    for window in (None, 7):
        found, expected = (
            core(backend, window=window, groups=4)(x, x, x, SequenceContext(documents=packed))
            for backend in ("flex", "unfused")
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert set(packed.masks) == {None, 7}


def test_layers_with_several_windows_share_a_micro_batch(unfused_on_cpu: Counter[str]) -> None:
    _two_windows_of_one_batch()


@pytest.mark.parametrize("window", [None, 1, 60, 129, 500])
def test_blocks_are_those_of_the_mask(window: int | None) -> None:
    """Listed blocks have a visible key, whole ones no hidden key, and no visible key is in another block."""
    lengths = ((5, 400, 128, 1, 106), (640,), (128, 256, 256))
    first = first_keys(lengths, window)
    mask = block_mask(first, CPU)
    q, k = torch.arange(640)[:, None], torch.arange(640)
    visible = (k <= q) & (k >= first[:, :, None])
    for row, own in enumerate(lengths):
        start = torch.cat([torch.full((n,), at) for n, at in zip(own, (0, *torch.tensor(own).cumsum(0)), strict=False)])
        wanted = (k <= q) & (k >= start[:, None]) & ((q - k < window) if window else (k <= q))
        assert torch.equal(visible[row], wanted)
    listed = torch.zeros(3, 5, 5, dtype=torch.bool)
    for b, i in product(range(3), range(5)):
        for blocks, counts, is_whole in (
            (mask.kv_indices, mask.kv_num_blocks, False),
            (mask.full_kv_indices, mask.full_kv_num_blocks, True),
        ):
            for j in blocks[b, 0, i, : counts[b, 0, i]].tolist():
                inside = visible[b, BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)]
                assert inside.any() and bool(inside.all()) == is_whole and not listed[b, i, j]
                listed[b, i, j] = True
    outside = ~listed.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    assert not (visible & outside).any()


def dense(query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: Any, enable_gqa: bool) -> Tensor:
    """The definition of torch's function: for a GPU, where Triton computes it."""
    LOG.calls["flex"] += 1
    many = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(many, dim=1) for each in (key, value))
    scores = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    place = [torch.arange(n, device=query.device) for n in scores.shape]
    b, h, q, k = (each.view([-1 if at == axis else 1 for axis in range(4)]) for at, each in enumerate(place))
    scores = scores if score_mod is None else score_mod(scores, b, h, q, k)
    scores = torch.where(block_mask.mask_mod(b, h, q, k), scores, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def on_gpu(run: Callable[[], Any]) -> Any:
    """``run`` on a simulated GPU with Triton; the numbers of calls are in ``LOG.calls``."""
    with pytest.MonkeyPatch.context() as patch, simulated_gpu():
        patch.setattr(kernels, "find_spec", lambda name: name)
        patch.setattr(kernels, "_compiled", lambda: dense)
        kernels._mask_of_length.cache_clear()
        result = run()
        kernels._mask_of_length.cache_clear()
        return result


@pytest.mark.parametrize(
    ("settings", "backend", "calls"),
    [
        ({"window": 40}, "auto", 1),
        ({"window": 300}, "auto", 0),
        ({}, "auto", 0),
        ({}, "flex", 1),
        ({"softcap": 1.5}, "auto", 1),
        ({"softcap": 1.5}, "unfused", 0),
        ({"documents": DOCUMENTS}, "auto", 0),
        ({"documents": DOCUMENTS, "dtype": torch.float32}, "auto", 1),
        ({"documents": DOCUMENTS, "softcap": 1.5}, "auto", 1),
        ({"documents": DOCUMENTS, "width": 32}, "auto", 1),
    ],
    ids=str,
)
def test_a_gpu_uses_it_where_it_serves(settings: dict[str, Any], backend: str, calls: int) -> None:
    given = {"dtype": torch.bfloat16} | settings
    found, count = on_gpu(lambda: (attended(backend, device="cuda", **given), LOG.calls["flex"]))
    assert count == calls
    expected = attended("unfused", **{name: value for name, value in settings.items() if name != "dtype"})
    for own, wanted in zip(found, expected, strict=True):
        assert (own - wanted).abs().max() < 2e-2 * wanted.abs().max()


def test_the_host_does_not_wait_for_the_device() -> None:
    def waits() -> list[str]:
        attended("auto", device="cuda", dtype=torch.bfloat16, documents=DOCUMENTS, softcap=1.5)
        return [line for line in LOG.stalls if line.startswith("megatron_core")]

    assert on_gpu(waits) == []


def test_layers_with_graphs_do_not_use_it() -> None:
    layers = tiny_run(window_size=(3, 0)).stages[0].decoder.layers
    cores = [layer.self_attention.core_attention for layer in layers]
    assert {each.flex for each in cores} == {"auto"}
    graph_layers(layers, ("attn",), 1)
    assert {each.flex for each in cores} == {"never"}


def test_a_request_that_cannot_be_met_is_an_error() -> None:
    with pytest.raises(ConfigError, match="flex is not available: torch has its backward only for GPUs"):
        tiny_run(attention_backend="flex")
    with pytest.raises(ConfigError, match="attention_backend=flex: torch has its backward only for GPUs"):
        attended("flex")
    with pytest.raises(ConfigError, match=r"flex: it does not support torch.float64; use"):
        on_gpu(lambda: attended("flex", device="cuda"))
    x = torch.zeros(1, 4, 8, 16)
    assert "heads have 8 channels, and it needs 16" in on_gpu(lambda: unsupported_reason(*[x[..., :8].to("cuda")] * 3))
    assert "3 queries and 8 keys" in on_gpu(lambda: unsupported_reason(x[:, :, :3].cuda(), x.cuda(), x.cuda()))
    with simulated_gpu():
        assert "Triton, which is not installed" in str(unsupported_reason(*[x.to("cuda")] * 3))


@pytest.mark.parametrize(
    ("settings", "ranks", "told"),
    [
        ({"attention_dropout": 0.1}, 1, "attention_dropout=0.1 cannot be used with attention_backend=flex"),
        ({"compile": True}, 1, "compile=True cannot"),
        ({"context_parallel_size": 2}, 2, "needs whole sequences; add --cp-comm-type a2a"),
        ({"context_parallel_size": 2, "cp_comm_type": ("a2a",)}, 2, None),
    ],
    ids=str,
)
def test_settings_that_it_excludes(settings: dict[str, Any], ranks: int, told: str | None) -> None:
    found = [each for each in problems(tiny_config(attention_backend="flex", **settings), ranks) if "flex" in each]
    assert (found == []) if told is None else (told in found[0])


def test_sinks_are_not_ignored(unfused_on_cpu: Counter[str]) -> None:
    """The kernel has no further key; windows with sinks are computed by the formula."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(60, 2, count, 16, generator=generator).double() for count in (4, 2, 2))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()
    found, expected = (
        core(backend, window=20)(query, key, value, SequenceContext(), sinks) for backend in ("auto", "unfused")
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not unfused_on_cpu["flex"]
