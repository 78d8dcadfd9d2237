"""Variable-length attention of packed documents on the simulated GPU, against a call per document on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_core.features.flex_attention import kernels
from megatron_core.transformer import core_attention
from megatron_core.transformer.context import PackedDocuments, SequenceContext
from tests.defects.plant import planted
from tests.runs import tiny_run
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu

LENGTHS = [(5, 1, 10), (16,)]
GROUPS = {"group_query_attention": True, "num_query_groups": 2}


def attended(device: str, dtype: torch.dtype, **settings: Any) -> list[torch.Tensor]:
    """Output of attention for two packed sequences, and the gradients of queries, keys and values."""
    attention = tiny_run(**settings).stages[0].decoder.layers[0].self_attention
    core: core_attention.CoreAttention = attention.core_attention
    random = torch.Generator().manual_seed(1)
    shapes = [(16, 2, heads, 8) for heads in (attention.heads, attention.groups, attention.groups)]
    inputs = [torch.randn(shape, generator=random).bfloat16().to(device, dtype).requires_grad_() for shape in shapes]
    documents = PackedDocuments.of(LENGTHS, 2, 16, torch.device(device))
    out = core(*inputs, SequenceContext(documents=documents, sample_index=torch.arange(2, device=device)))
    grads = torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, dtype))
    return [x.float().cpu() for x in (out, *grads)]


@pytest.mark.parametrize("settings", [{}, GROUPS, {"window_size": (3, 0)}], ids=["heads", "groups", "window"])
def test_one_call_computes_what_documents_compute_alone(settings: dict[str, Any]) -> None:
    expected = attended("cpu", torch.float32, **settings)
    with simulated_gpu():
        found, calls = attended("cuda", torch.bfloat16, **settings), LOG.calls["torch_attn._varlen_attn.default"]
    assert calls == 1
    for number, wanted in zip(found, expected, strict=True):
        assert (number - wanted).abs().max() < 2e-2 * wanted.abs().max()


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.float32, {}), (torch.bfloat16, {"attn_logit_softcapping": 3.0}), (torch.bfloat16, {"kv_channels": 12})],
    ids=["float32", "bounded scores", "head size"],
)
def test_what_flash_attention_refuses_runs_by_documents(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    if "kv_channels" in settings:
        shown = torch.zeros(1, 1, 4, 12, dtype=dtype)
        with simulated_gpu():
            assert not kernels.takes_variable_lengths(*[shown.to("cuda")] * 3)
        return
    with simulated_gpu():
        attended("cuda", dtype, kernel_backend="reference", **settings)
        assert LOG.calls["torch_attn._varlen_attn.default"] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("window - 1", "window"), ("starts,\n        starts", "starts, torch.zeros_like(starts)")],
    ids=["window", "keys"],
)
def test_finds(old: str, new: str) -> None:
    expected = attended("cpu", torch.float32, window_size=(3, 0))
    with planted("features.flex_attention.kernels:variable_length_attention", old, new), simulated_gpu():
        try:
            found = attended("cuda", torch.bfloat16, window_size=(3, 0))
        except RuntimeError:
            return
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) > 0.1
