"""Runs with low-rank adapters: checkpoints with only adapters, frozen routers, sections of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.checkpoint import open_newest
from megatron_core.config.file import read_config
from megatron_core.features.lora.adapters import adapters_of, is_adapter
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.parallel import World
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from tests.plain.engine import started
from tests.plain.random_masks import dropped
from tests.plain.rows import LLAMA
from tests.runs import tiny_run

LORA: dict[str, Any] = {"lora_rank": 2, "use_dora": True, "fp64": True}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for stage in run.stages.values() for name, p in stage.named_global_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_run_resumes_from_adapters_of_drawn_weights(zero_stage: int, tmp_path: Path) -> None:
    settings = LORA | {"zero_stage": zero_stage, "save": str(tmp_path)}
    run = tiny_run(**settings)
    for _ in range(2):
        train_step(run)
    run.saver.save(run.state)
    run.saver.close()
    expected = [float(train_step(run).loss) for _ in range(2)]
    stored = open_newest(str(tmp_path), None, device=torch.device("cpu"))
    assert stored is not None
    with stored:
        names = [name for name in stored.manifest.tensors if name.startswith("model.")]
    assert names and all(map(is_adapter, names))
    resumed = tiny_run(**settings, load=str(tmp_path))
    assert resumed.state.iteration == 2
    assert [float(train_step(resumed).loss) for _ in range(2)] == expected


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_only_trained_routers_change_their_biases(lora_rank: int | None) -> None:
    run = tiny_run(**EXPERTS, lora_rank=lora_rank)
    train_step(run)
    biases = [value for name, value in weights(run).items() if name.endswith("expert_bias")]
    assert biases
    assert all(bool(bias.any()) == (lora_rank is None) for bias in biases)


def test_frozen_weights_stay(tmp_path: Path) -> None:
    run = tiny_run(**LORA)
    before = weights(run)
    train_step(run)
    changed = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    assert changed and all(map(is_adapter, changed))


@pytest.mark.parametrize("text", ["lora: {lora_rank: 8}", "tuning: {lora_rank: 8}", "outer: {outer_steps: 8}"])
def test_sections_of_files(text: str, tmp_path: Path) -> None:
    """``tuning`` and ``outer`` are sections in files of earlier versions."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = read_config(path)
    assert 8 in (config.section(TuningConfig).lora_rank, config.section(OuterConfig).outer_steps)


def test_a_path_begins_at_the_name_of_a_module() -> None:
    def has_adapter(target: str, path: str) -> bool:
        return bool(TuningConfig(lora_rank=1, lora_target_modules=(target,)).parts_of(path, fused=1))

    for target, path, other in (
        (
            "experts.linear_fc2",
            "decoder.layers.1.mlp.experts.linear_fc2",
            "decoder.layers.1.mlp.shared_experts.linear_fc2",
        ),
        ("1.mlp.linear_fc2", "decoder.layers.1.mlp.linear_fc2", "decoder.layers.11.mlp.linear_fc2"),
        ("*.layers.1.*.linear_fc2", "decoder.layers.1.mlp.linear_fc2", "decoder.layers.11.mlp.linear_fc2"),
    ):
        assert has_adapter(target, path) and not has_adapter(target, other)


def test_dropout_is_that_of_the_definition() -> None:
    """W x + alpha / r B A d(x), where the mask d is the plain one of sample, position and input feature."""
    values = LLAMA | {"lora_rank": 2, "lora_alpha": 3.0, "lora_target_modules": ("linear_proj",), "lora_dropout": 0.4}
    run = started(values | {"seed": 7, "micro_batch_size": 4}, World(0, 1, 0, torch.device("cpu")))
    (model,) = run.stages.values()
    calls = []
    for name, linear, adapter in adapters_of(model):
        (a,), (b,) = adapter.lora_A.values(), adapter.lora_B.values()
        torch.nn.init.normal_(b)
        copies = [parameter.detach().clone() for parameter in (linear.weight, a, b)]
        note = lambda _, args, y, key=(name, copies): calls.append((*key, args[0].detach(), y))  # noqa: E731
        linear.register_forward_hook(note)
    train_step(run)
    assert len(calls) == 2
    for name, (weight, a, b), x, y in calls:
        masked = dropped(x.transpose(0, 1), 0.4, 7, f"{name}.adapter", [0, 1, 2, 3]).transpose(0, 1)
        output = y[0] if isinstance(y, tuple) else y
        torch.testing.assert_close(
            output.detach(), x @ weight.t() + 1.5 * masked @ a.t() @ b.t(), rtol=1e-9, atol=1e-12
        )
        assert not masked.equal(x)
