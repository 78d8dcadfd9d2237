"""State that leaves memory and comes back with every bit, and a return to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.memory import give_back, needs_proc, resident, start_anew
from tests.runs import TINY
from tests.simulated_gpu.runtime import simulated_gpu

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, bf16": (1, {"bf16": True}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2 zero1": (2, {"zero_stage": 1, "overlap_param_gather": True, "overlap_grad_reduce": True}),
    "dp2 zero2, bf16": (2, {"zero_stage": 2, "bf16": True}),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "adapters": (1, {"lora_rank": 2}),
    "experts, ep2, critic": (
        2,
        {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2, "value_head": True},
    ),
    "soap": (1, {"optimizer": "soap"}),
}
SMALL: dict[str, Any] = {"mock_data": False, "seq_length": 32, "position_embedding_type": "rope", "num_layers": 2}


def _config(**settings: Any) -> RunConfig:
    return RunConfig.from_flat(TINY | SMALL | settings)


def _texts() -> list[Trajectory]:
    return [Trajectory.of_answer([1, 2], [3 + number, 4, 5], returns=0.5) for number in range(4)]


def _losses(config: RunConfig, folder: Path | None) -> list[float]:
    """Losses and norms of four steps; with a folder the state is offloaded before and after the third."""
    trainer = Trainer(config, this_world())
    objective = objectives.value(None) if trainer.reads == "values" else objectives.cross_entropy()
    numbers = []
    for step in range(4):
        if folder is not None and step >= 2:
            assert trainer.offload(folder) > 0
            assert list(folder.glob("offloaded-*.bin"))
            trainer.onload()
        result = trainer.train_on(_texts(), objective)
        numbers += [result.loss, result.grad_norm]
    assert folder is None or not list(folder.glob(f"offloaded-{trainer.run.world.rank}.bin"))
    return numbers


@pytest.mark.drawn(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_have_the_same_bits_after_a_while_outside(layout: str, tmp_path: Path) -> None:
    ranks, settings = LAYOUTS[layout]
    config = _config(**settings)
    expected = run_ranks(ranks, _losses, config, None)
    assert run_ranks(ranks, _losses, config, tmp_path) == expected


def _losses_on_gpu(config: RunConfig, folder: Path | None) -> list[list[float]]:
    """Losses of three steps without and with a while in host memory, or in a file, before the third."""
    with simulated_gpu():
        world = World(0, 1, local_rank=0, device=torch.device("cuda", 0))
        runs = []
        for is_offloaded in (False, True):
            trainer = Trainer(config, world)
            losses = [trainer.train_on(_texts(), objectives.cross_entropy()).loss for _ in range(2)]
            if is_offloaded:
                assert trainer.offload(folder) > 0
                assert trainer.run.data_parallel.buckets[0].weights.untyped_storage().nbytes() == 0
                trainer.onload()
            runs.append([*losses, trainer.train_on(_texts(), objectives.cross_entropy()).loss])
    return runs


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("settings", [{"bf16": True}, {"lora_rank": 2}, {"optimizer_cpu_offload": True}])
def test_a_simulated_gpu_is_freed(settings: dict[str, Any], in_file: bool, tmp_path: Path) -> None:
    ((expected, losses),) = run_ranks(1, _losses_on_gpu, _config(**settings), tmp_path if in_file else None)
    assert losses == expected


def test_the_sampler_works_while_the_trainer_is_outside(tmp_path: Path) -> None:
    trainer = Trainer(_config())
    sampler = RolloutSampler(trainer)
    reference = trainer.frozen_copy()
    answers = sampler.sample([[1, 2]], max_new_tokens=3)
    scores = reference.log_probs(_texts()).log_probs
    trainer.offload(tmp_path)
    assert sampler.sample([[1, 2]], max_new_tokens=3) == answers
    assert torch.equal(torch.cat(reference.log_probs(_texts()).log_probs), torch.cat(scores))
    for call in (
        lambda: trainer.log_probs(_texts()),
        lambda: trainer.train_on(_texts(), objectives.cross_entropy()),
        trainer.save,
        trainer.load,
        lambda: trainer.offload(tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"the model is offloaded; call onload\(\)"):
            call()
    for call in (sampler.update_weights, trainer.frozen_copy, lambda: list(trainer.weights())):
        with pytest.raises(ConfigError, match=r"offloaded; call Trainer\.onload\(\)"):
            call()
    trainer.onload()
    with pytest.raises(ConfigError, match=r"onload\(\) without offload"):
        trainer.onload()
    sampler.update_weights()
    with pytest.raises(ConfigError, match=r"name a folder for it with offload\(folder\)"):
        trainer.offload()
    assert trainer.train_on(_texts(), objectives.cross_entropy()).loss > 0


def _resident(config: RunConfig, folder: Path) -> tuple[int, int, int, int]:
    """Resident memory before, outside and after, and the bytes that were freed."""
    start_anew()
    trainer = Trainer(config, this_world())
    trainer.train_on(_texts(), objectives.cross_entropy())
    give_back()
    before = resident("VmRSS")
    freed = trainer.offload(folder)
    give_back()
    outside = resident("VmRSS")
    trainer.onload()
    return before, outside, resident("VmRSS"), freed


@needs_proc
def test_the_memory_is_free(tmp_path: Path) -> None:
    """Measured by the system: 4 million parameters in float32 with gradients and two moments."""
    config = _config(hidden_size=256, num_attention_heads=4, num_layers=5, ffn_hidden_size=1024)
    ((before, outside, after, freed),) = run_ranks(1, _resident, config, tmp_path)
    assert freed > 60e6
    assert before - outside > 0.95 * freed
    assert abs(after - before) < 0.1 * freed


def _returned(config: RunConfig) -> tuple[list[float], list[float], int]:
    trainer = Trainer(config, this_world())
    trainer.train_on(_texts(), objectives.cross_entropy())
    trainer.save()
    steps = [[trainer.train_on(_texts(), objectives.cross_entropy()).loss for _ in range(2)] for _ in _until(trainer)]
    trainer.close()
    return *steps, trainer.iteration


def _until(trainer: Trainer) -> Any:
    """Yield before the steps after a checkpoint, and after the return to it."""
    yield
    trainer.load()
    yield


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "critic" not in name])
def test_steps_after_a_return_to_a_checkpoint_have_the_same_bits(layout: str, tmp_path: Path) -> None:
    ranks, settings = LAYOUTS[layout]
    for first, again, iteration in run_ranks(ranks, _returned, _config(save=str(tmp_path), **settings)):
        assert first == again
        assert iteration == 3


def test_a_return_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint to return to"):
        Trainer(_config(save=str(tmp_path))).load()
