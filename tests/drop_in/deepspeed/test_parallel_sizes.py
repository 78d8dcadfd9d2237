"""Tensor, sequence and expert parallelism of DeepSpeed's JSON against one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import nn

import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.translation import translate
from deepspeed.utils import groups, safe_get_full_fp32_param
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.drop_in.deepspeed import SHARDS

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
EXPERTS = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **SHARDS}
STEPS, BATCH, LENGTH = 3, 4, 8


def _model(kind: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def _trained(
    kind: str, changes: dict[str, Any], folder: str, mesh: tuple[int, int] | None = None
) -> tuple[list[float], Any]:
    """Losses, and a weight that is whole on every rank; whole weights in ``folder``, and from accelerate on rank 0."""
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        **changes,
    }
    engine = deepspeed.initialize(model=_model(kind), config=config, mesh_param=mesh)[0]
    size, rank = engine.dp_world_size, groups._get_data_parallel_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(size)[rank]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.core.last_report.loss)
    weight = safe_get_full_fp32_param(engine.module.model.norm.weight)
    assert engine.sequence_parallel_size == groups._get_sequence_parallel_world_size()
    assert engine.autotp_size() in (0, groups.get_tensor_model_parallel_world_size())
    assert engine.save_16bit_model(folder, "engine.safetensors")
    client = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_config=config, unwrap_model=lambda _: engine.module
    )
    state = Accelerator.get_state_dict(client, engine)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(state, Path(folder, "accelerate.safetensors"))
    return losses, weight.numpy().copy()


ROWS: list[tuple[str, int, dict[str, Any], tuple[int, int] | None]] = [
    ("Llama", 2, {"sequence_parallel_size": 2, "zero_optimization": STAGE_3}, None),
    ("Llama", 2, {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}, None),
    ("Llama", 4, {"zero_optimization": {**STAGE_3, "overlap_comm": True}}, (2, 2)),
    ("Llama", 4, {"zero_optimization": {**STAGE_3, "zero_hpz_partition_size": 2}}, None),
    ("Mixtral", 2, {"expert_parallel": EXPERTS, "zero_optimization": {"stage": 2}}, None),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "ranks", "changes", "mesh"), ROWS)
def test_ranks_compute_what_one_computes(
    kind: str, ranks: int, changes: dict[str, Any], mesh: tuple[int, int] | None, tmp_path: Path
) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder in (alone, several):
        folder.mkdir()
    ((wanted, weight),) = run_ranks(1, _trained, kind, {"zero_optimization": {"stage": 0}}, str(alone), backend="gloo")
    for losses, found in run_ranks(ranks, _trained, kind, changes, str(several), mesh, backend="gloo"):
        assert losses == pytest.approx(wanted, rel=2e-5)
        np.testing.assert_allclose(found, weight, rtol=2e-5)
    whole = load_file(alone / "engine.safetensors")
    for path in several.iterdir():
        torch.testing.assert_close(load_file(path), whole, rtol=1e-4, atol=2e-6)
    assert sorted(path.name for path in several.iterdir()) == ["accelerate.safetensors", "engine.safetensors"]


def _split_before(changes: dict[str, Any]) -> list[float]:
    model = deepspeed.tp_model_init(_model("Llama"), tp_size=2, dtype=torch.float32)
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 2, **changes})[0]
    return [engine.autotp_size(), engine.dp_world_size]


def test_a_model_of_tp_model_init() -> None:
    assert run_ranks(2, _split_before, {}, backend="gloo") == [[2, 1], [2, 1]]
    with pytest.raises(RankFailure, match=r"tensor_parallel.autotp_size=1 contradicts a model split over 2 ranks"):
        run_ranks(2, _split_before, {"tensor_parallel": {"autotp_size": 1}}, backend="gloo")


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "must be a divisor of the 4 ranks"),
        ({"sequence_parallel_size": 3}, "x sequence_parallel_size=3 must be a divisor of the 4 ranks"),
        ({"tensor_parallel": {"autotp_size": 8}}, "autotp_size=8 x sequence_parallel_size=1 must be a divisor"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, "autoep_size=3 must be a divisor of 4"),
        ({"expert_parallel": {"enabled": True, "top_k": 1}}, "top_k=1 is not supported: remove it; the router"),
        ({"tensor_parallel": {"autotp_size": 2, "partition_config": {"a": 1}}}, "parallelize\\(model, plan"),
    ),
)
def test_wrong_sizes_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate({"train_batch_size": 8, **keys}, 4)


@pytest.mark.parametrize(
    ("zero", "gathers", "sums"),
    (
        ({"stage": 3}, True, False),
        ({"stage": 3, "overlap_comm": True}, True, True),
        ({"stage": 3, "overlap_comm": False}, False, False),
        ({"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": 0}, False, True),
        ({"stage": 2, "overlap_comm": True}, None, True),
    ),
)
def test_overlap_of_stage_3(zero: dict[str, Any], gathers: bool | None, sums: bool) -> None:
    settings = translate({"train_batch_size": 8, "zero_optimization": zero}, 2).settings
    assert settings.get("overlap_param_gather") is gathers
    assert settings["overlap_grad_reduce"] is sums


def test_whole_sequences_of_the_ranks_of_a_sequence() -> None:
    for rank, (numbers, shifted, length) in enumerate(run_ranks(4, _sequences_of_loaders, backend="gloo")):
        first = rank // 2 * 2
        assert numbers == [[first, 7], [first + 1, 7]] and length == 2
        assert shifted == [[[1, 2, -100]], [[1, 2, -100]]]


def _sequences_of_loaders() -> tuple[list[list[int]], list[Any], int]:
    with pytest.raises(ConfigError, match="sp_size=3 must be a divisor of the 4 ranks"):
        UlyssesSPAttentionHF.register_with_transformers(None, "sdpa", 3)
    mpu = UlyssesSPAttentionHF.register_with_transformers(None, "sdpa", 2, micro_batch_size=1)
    local = {"input_ids": torch.tensor([[dist.get_rank(), 5, 6]]), "labels": torch.arange(3)[None], "note": 7}
    rank, group, size = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), 2
    assert mpu.get_sequence_parallel_world_size() == size
    loader = UlyssesSPDataLoaderAdapter([local], rank, group, size, torch.device("cpu"))
    batches = list(loader)
    assert all("labels" not in batch for batch in batches)
    numbers = [[int(batch["input_ids"][0, 0]), batch["note"]] for batch in batches]
    return numbers, [batch["shift_labels"].tolist() for batch in batches], len(loader)


QUANTIZED = {"zero_quantized_gradients": True, "zero_quantized_weights": True}


def test_short_messages_of_zeropp() -> None:
    results = {}
    for name, section in (("plain", {}), ("short", QUANTIZED), ("within", {**QUANTIZED, "zero_hpz_partition_size": 2})):
        results[name] = run_ranks(4, _train_with_short_messages, section)[0]
    assert results["plain"][-1] < 0.8 * results["plain"][0]
    for name in ("short", "within"):
        assert results[name] != results["plain"]
        assert results[name] == pytest.approx(results["plain"], rel=0.05)


def _train_with_short_messages(section: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, **SHARDS, **section},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses = []
    for number in range(20):
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(4 * number + engine.global_rank))
        loss = (engine(x) - x.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_short_messages_that_cannot_be() -> None:
    zero = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, "zero_quantized_weights": True}}
    with pytest.raises(ConfigError, match=r"zero_quantized_weights=true needs zero_optimization.stage 3"):
        translate(zero, 2)
    onebit = {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 2}}
    both = {**zero, "zero_optimization": {"stage": 1, "zero_quantized_gradients": True}, "optimizer": onebit}
    with pytest.raises(ConfigError, match=r"optimizer.type=OneBitAdam with zero_quantized_gradients"):
        translate(both, 2)
    assert (
        "grad_compression" not in translate({**both, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, 1).settings
    )


class _Ranks:
    """An ``mpu`` as in DeepSpeed's example of AutoTP."""

    def __init__(self, groups_of_ranks: list[list[int]]) -> None:
        made = [dist.new_group(ranks) for ranks in groups_of_ranks]
        self.group = next(group for ranks, group in zip(groups_of_ranks, made, strict=True) if dist.get_rank() in ranks)

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.group


def test_ranks_of_a_program_that_splits_layers() -> None:
    run_ranks(4, _train_with_ranks)


def _train_with_ranks() -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=4, **sizes)
    values = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "data_parallel_size": 2}
    values |= {"tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    losses = []
    for mpu in (_Ranks([[0, 1], [2, 3]]), None):
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=transformers.LlamaForCausalLM(config), config=values, mpu=mpu)[0]
        tokens = torch.randint(16, (1, 8), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
        for _ in range(2):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:] and losses[1] < losses[0]
    for ranks, changes in (([[0, 2], [1, 3]], {}), ([[0, 1], [2, 3]], {"tensor_parallel": {}})):
        with pytest.raises(ConfigError, match=r"set tensor_parallel.autotp_size=2"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={**values, **changes}, mpu=_Ranks(ranks))
    with pytest.raises(ConfigError, match=r"data_parallel_size=3, but 2 ranks"):
        translate({**values, "data_parallel_size": 3}, 4)
