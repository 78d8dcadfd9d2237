"""``deepspeed.pipe``: training against torch in one process, the rest against DeepSpeed's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import topology
from deepspeed.runtime.pipe.module import PipelineError
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import traces
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

STEPS, MICROS = 4, 3
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROS,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}},
}


def logits_of(table: nn.Embedding, hidden: Tensor) -> Tensor:
    """The logits of the hidden states."""
    return hidden @ table.weight.t()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def specs() -> list[Any]:
    """A table at both ends, and linear layers."""
    middle = [LayerSpec(nn.Linear, 8, 16), torch.tanh, LayerSpec(nn.Linear, 16, 8)]
    table = {"tied_weight_attr": "weight"}
    last = TiedLayerSpec("table", nn.Embedding, 12, 8, forward_fn=logits_of, **table)
    return [TiedLayerSpec("table", nn.Embedding, 12, 8, **table), *middle, last]


def batches(rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of one data-parallel rank."""
    tokens = torch.randint(12, (STEPS * MICROS * ranks, 2, 5), generator=torch.Generator().manual_seed(0))
    return [(each, each.roll(1, 1)) for each in tokens[rank::ranks]]


def _train(stage: int, folder: str) -> tuple[list[float], dict[str, np.ndarray], float]:
    net = PipelineModule(layers=specs(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        config={**CONFIG, "zero_optimization": {"stage": stage}},
        model_parameters=[p for p in net.parameters() if p.requires_grad],
    )
    assert net.parts == [0, 3, 5] and net.stage_owner(3) == 1
    grid = net.mpu()
    data = iter(batches(grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()))
    losses = [float(engine.train_batch(data_iter=data if engine.reads_data() else None)) for _ in range(STEPS)]
    again = iter(batches(grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()))
    evaluated = float(engine.eval_batch(again))
    engine.save_checkpoint(folder)
    assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == STEPS
    with pytest.raises(PipelineError):
        engine.step()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith("3."))
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    engine.save_16bit_model(folder, "all.bin")
    weights = {name: tensor.numpy() for name, tensor in engine.core.full_state_dict().items()}
    return losses, weights, evaluated


def _alone(ranks: int) -> tuple[list[float], dict[str, np.ndarray]]:
    model = deepspeed.PipelineModule.__mro__[1](specs(), loss_fn=loss_of)
    model.place([range(5)], [0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    data, losses, count = batches(0, 1) if ranks == 1 else [], [], MICROS * ranks
    if ranks > 1:
        tokens = torch.randint(12, (STEPS * count, 2, 5), generator=torch.Generator().manual_seed(0))
        data = [(each, each.roll(1, 1)) for each in tokens]
    for step in range(STEPS):
        micros = data[step * count : (step + 1) * count]
        found = [loss_of(model(inputs), labels) / count for inputs, labels in micros]
        sum(found, torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each.item() for each in found))
    return losses, {name: each.detach().numpy() for name, each in model.named_parameters()}


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (4, 1)])
def test_training_equals_torch(ranks: int, stage: int, tmp_path: Path) -> None:
    expected, weights = _alone(ranks // 2)
    found = run_ranks(ranks, _train, stage, str(tmp_path))
    assert len({evaluated for _, _, evaluated in found}) == 1
    saved = torch.load(tmp_path / "all.bin")
    frozen = saved.keys() - torch.load(tmp_path / "trained.bin").keys()
    assert saved.keys() == weights.keys() and frozen == {"3.weight", "3.bias"}
    for losses, own, _ in found:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert own.keys() == weights.keys()
        for name, tensor in weights.items():
            np.testing.assert_allclose(own[name], tensor, rtol=1e-3, atol=2e-6, err_msg=name)


def _refusals() -> None:
    with pytest.raises(RuntimeError, match="must provide num_stages or topology"):
        PipelineModule(specs())
    with pytest.raises(RuntimeError, match="must divide distributed world size"):
        PipelineModule(specs(), num_stages=3)
    with pytest.raises(ConfigError, match="only \\['pipe', 'data'\\] is supported"):
        PipelineModule(specs(), topology=topology.PipeModelDataParallelTopology(1, 2, 1))
    with pytest.raises(ConfigError, match="seed_fn"):
        PipelineModule(specs(), num_stages=1, seed_fn=torch.manual_seed)
    net = PipelineModule(layers=specs(), num_stages=2, loss_fn=loss_of)
    with pytest.raises(ConfigError, match="gradient_allreduce_op='sum' with a PipelineModule"):
        deepspeed.initialize(model=net, config={**CONFIG, "gradient_allreduce_op": "sum"})


def test_refusals() -> None:
    run_ranks(2, _refusals)


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_partitions_topologies_and_schedules_are_those_of_deepspeed() -> None:
    expected = ask(Task("tests.drop_in.deepspeed.traces:pipelines", (False,)))
    assert json.loads(json.dumps(traces.pipelines(True))) == expected


class Counting(nn.Linear):
    """A linear layer that counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """The output of the linear layer."""
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("interval", (0, 1))
def test_the_json_chooses_recomputed_layers(interval: int) -> None:
    net = PipelineModule(layers=[Counting(4, 4), Counting(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {**CONFIG, "pipeline": {"activation_checkpoint_interval": interval}}
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * MICROS))
    layers = [layer for layer in engine.module.modules() if isinstance(layer, Counting)]
    assert [layer.calls for layer in layers] == [MICROS * (1 + interval)] * 2
