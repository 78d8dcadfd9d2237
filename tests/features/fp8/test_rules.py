"""Rules of FP8 settings."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems

BLOCKS = {
    "mock_data": True,
    "vocab_size": 64,
    "train_iters": 1,
    "fp8_format": "e4m3",
    "fp8_recipe": "blockwise",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "ffn_hidden_size": 1024,
}
TP2, CP2 = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "kv_channels": None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TP2 | {"ffn_hidden_size": 1000}, "ffn_hidden_size=1000 over 2 tensor-parallel ranks"),
        (TP2 | {"hidden_size": 384}, "heads x channels=384 over 2"),
        (TP2 | {"group_query_attention": True, "num_query_groups": 1}, "share 1 key-value groups"),
        (CP2 | {"seq_length": 64}, "in 4 parts"),
        (TP2 | LATENT | {"v_head_dim": 96, "qk_head_dim": 160}, "heads x v_head_dim=384 over 2"),
        ({"fp8_recipe": "tensorwise", "num_layers": 2, "first_last_layers_bf16": True}, "leave none of num_layers=2"),
        ({"fp8_amax_history_len": 0}, "fp8_amax_history_len=0 is out of range"),
        ({"fp8_margin": -1}, "fp8_margin=-1 is out of range"),
        ({"fp8_format": None, "fp8_statistics_interval": 5}, "has no effect without --fp8-format hybrid"),
        ({"fp8_format": None}, "fp8_recipe=blockwise has no effect without --fp8-format hybrid"),
        ({"fp8_format": None, "fp8_wgrad": False}, "fp8_wgrad=False has no effect without --fp8-format hybrid"),
        ({"fp8_margin": 2}, "fp8_margin=2 has no effect without --fp8-recipe delayed; add"),
        (
            {"num_layers_at_end_in_bf16": 2},
            "=2 has no effect without --first-last-layers-bf16; add --first",
        ),
    ],
)
def test_faults(settings: dict, message: str) -> None:
    found = list(problems(RunConfig.from_flat(BLOCKS | settings), 2))
    assert any(message in fault for fault in found), found


@pytest.mark.parametrize("settings", [TP2, CP2 | {"seq_length": 512}, CP2 | {"fp8_wgrad": False}, TP2 | LATENT])
def test_legal(settings: dict) -> None:
    assert list(problems(RunConfig.from_flat(BLOCKS | settings), 2)) == []
