"""The kernels of attention on the simulated GPU: names, notes, widths, and no plans for single queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from megatron_core.features.flex_attention import kernels as flex_kernels
from megatron_core.reports.gpu_notes import chosen_kernel, dropout_notes
from megatron_core.transformer import core_attention
from megatron_core.transformer.core_attention import fused_attention
from tests.runs import tiny_config
from tests.simulated_gpu.runtime import simulated_gpu

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_the_chosen_kernel_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(attention_dropout=0.0)
    assert chosen_kernel(config, CPU) is None
    with simulated_gpu():
        names = []
        for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, choice=choice, **__: choice.value)
            names.append(chosen_kernel(config, GPU))
        assert names == ["flash attention", "cudnn attention", "math attention"]
        monkeypatch.setattr(flex_kernels, "flex_obstacle", lambda device: None)
        kernels = {
            "the formula for all queries and keys, as requested": {"attention_backend": "unfused"},
            "the formula in blocks of queries, because of attention_dropout": {"attention_dropout": 0.1},
            "math attention; windows: FlexAttention": {"window_size": (3, 0)},
            "FlexAttention": {"attn_logit_softcapping": 30.0},
        }
        for text, settings in kernels.items():
            assert chosen_kernel(tiny_config(**({"attention_dropout": 0.0} | settings)), GPU) == text
        packed = tiny_config(attention_dropout=0.0, bf16=True, reset_attention_mask=True, reset_position_ids=True)
        assert str(chosen_kernel(packed, GPU)).endswith("; documents: variable lengths")


def test_dropout_of_attention_weights_names_its_memory() -> None:
    large: dict[str, Any] = {"seq_length": 4096, "num_attention_heads": 32, "hidden_size": 4096, "bf16": True}
    large |= {"max_position_embeddings": 4096, "tensor_model_parallel_size": 1}
    config = tiny_config(**large, attention_dropout=0.1, micro_batch_size=1)
    [note] = dropout_notes(config, GPU)
    assert "attention_dropout=0.1" in note and "0.5 GiB for each copy, layer" in note
    assert not list(dropout_notes(config, CPU))
    assert not list(dropout_notes(tiny_config(**large, attention_dropout=0.0), GPU))


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], bool]]:
    """Widths of queries, keys and values, and whether cuDNN is excluded, by call."""
    seen: list[tuple[list[int], bool]] = []
    real = functional.scaled_dot_product_attention

    def called(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append(([x.shape[-1] for x in (query, key, value)], not torch.backends.cuda.cudnn_sdp_enabled()))
        return real(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", called)
    return seen


@pytest.mark.parametrize(("dtype", "widths"), [(torch.bfloat16, [24, 24, 24]), (torch.float32, [24, 24, 16])])
def test_values_of_latent_attention_are_padded_for_flash_kernels(
    dtype: torch.dtype, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = calls(monkeypatch)
    random = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 2, 8, 24, generator=random).to(dtype) for _ in range(2))
    value = torch.randn(1, 2, 8, 16, generator=random).to(dtype)
    expected = fused_attention(query.double(), key.double(), value.double(), causal=True)
    seen.clear()
    with simulated_gpu():
        out = fused_attention(query.cuda(), key.cuda(), value.cuda(), causal=True).cpu()
    assert seen == [(widths, False)]
    assert out.shape == value.shape and (out.double() - expected).abs().max() < 2e-2


def test_a_single_query_excludes_the_kernel_with_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """In generation keys get longer with each token, and cuDNN would make a plan for each length."""
    seen = calls(monkeypatch)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with simulated_gpu():
        for length in (5, 6):
            keys = torch.randn(1, 2, length, 16, device="cuda")
            fused_attention(keys[:, :, -1:], keys, keys)
        fused_attention(keys, keys, keys, causal=True)
    assert [excluded for _, excluded in seen] == [True, True, not before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert SDPBackend.CUDNN_ATTENTION not in core_attention.WITHOUT_PLANS
