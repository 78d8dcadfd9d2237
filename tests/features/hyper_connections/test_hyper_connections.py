"""Rules, plans and generation of models with several residual streams; tests/plain compares their training."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.flops import layer_flops
from megatron_core.config.validate import problems
from megatron_core.features.hyper_connections.settings import HyperConnectionsConfig

STREAMS: dict[str, Any] = {
    "enable_mhc_connections": True,
    "num_layers": 4,
    "vocab_size": 64,
    "train_iters": 2,
    "mock_data": True,
}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 cannot be used with enable_mhc_connections=True"),
        ({"layout_invariant": True}, "layout_invariant=True cannot be used with enable_mhc_connections=True"),
        (PP2 | {"pipeline_model_parallel_layout": "E|ttttL"}, "has no layer in the first or in the last stage"),
        (PP2 | {"pipeline_model_parallel_layout": "Et*4|L"}, "has no layer in the first or in the last stage"),
        (PP2 | {"account_for_loss_in_pipeline_split": True}, "can leave a stage without the layer"),
        (
            {"enable_mhc_connections": False, "mhc_num_residual_streams": 2},
            "has no effect without --enable-mhc-connections",
        ),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    config = RunConfig.from_flat(STREAMS | values)
    assert message in "\n".join(problems(config, config.parallel.pipeline_model_parallel_size))


def test_a_layout_with_layers_at_both_ends_is_legal() -> None:
    config = RunConfig.from_flat(STREAMS | PP2 | {"pipeline_model_parallel_layout": "Ett|ttL"})
    assert list(problems(config, 2)) == []


def test_sizes() -> None:
    """n^2 + 2 n weights of n h channels, twice in a layer."""
    model = RunConfig.from_flat(STREAMS | {"mhc_num_residual_streams": 3}).model
    assert model.section(HyperConnectionsConfig).connection_weights == 15
    assert model.stream_size == 3 * model.hidden_size
    assert layer_flops(model, 0, 32)["connections"] == 2 * 2 * 15 * 3 * model.hidden_size
