"""Expert parallelism of models of the caller against torch alone in one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.parallel.sharding import spec_of
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import (
    COMMON,
    LLAMA,
    MODELS,
    Result,
    _causal,
    _tokens,
    difference,
    model_of,
    train_with_engine,
    train_with_torch,
    weights_of,
)
from tests.defects.plant import planted

SIZES = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
OF_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
FAMILIES: dict[str, partial[nn.Module]] = {
    "mixtral": partial(_causal, "Mixtral", num_local_experts=4, **LLAMA, **AUXILIARY),
    "qwen3 moe": partial(_causal, "Qwen3Moe", num_experts=4, head_dim=4, decoder_sparse_step=2, **SIZES, **AUXILIARY),
    "gpt-oss": partial(_causal, "GptOss", num_local_experts=4, head_dim=4, **SIZES, **AUXILIARY),
    "deepseek v3": partial(_causal, "DeepseekV3", n_shared_experts=1, **OF_MLA, **DEEPSEEK),
    "glm4 moe": partial(_causal, "Glm4Moe", n_shared_experts=1, head_dim=4, **DEEPSEEK),
    "olmoe": partial(_causal, "Olmoe", num_experts=4, **SIZES, **AUXILIARY),
}
MODELS.update({f"{name} with experts": (make, _tokens) for name, make in FAMILIES.items()})
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, EP2),
    (4, {**EP2, "zero_stage": 1}),
    (4, {**EP4, "zero_stage": 2, "overlap_grad_reduce": True}),
    (4, {**EP2, "zero_stage": 3}),
    (2, {**EP2, "zero_stage": 3, "recompute_granularity": "full"}),
]


@cache
def _reference(name: str) -> Result:
    return train_with_torch(f"{name} with experts")


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(f"{name} with experts", **settings)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_torch(name: str, row: int) -> None:
    """Losses with the model's auxiliary loss, norms of all gradients, and weights of three steps of AdamW."""
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, _train, name, settings):
        assert difference(result, _reference(name)) < 1e-9


def _crowded(rank_without_tokens: bool) -> Result:
    name = "gpt-oss with experts"
    make, sample = MODELS[name]

    def crowded() -> nn.Module:
        model = make()
        for layer in model.model.layers:
            # All tokens choose the experts 0 and 1, which are on the first of two ranks.
            layer.mlp.router.bias.data[:2] += 100
        return model

    MODELS[name] = (crowded, sample)
    try:
        if rank_without_tokens:
            return train_with_engine(name, **EP2, zero_stage=1)
        return train_with_torch(name)
    finally:
        MODELS[name] = (make, sample)


def test_a_rank_without_tokens_takes_part() -> None:
    reference = _crowded(False)
    for result in run_ranks(2, _crowded, True):
        assert difference(result, reference) < 1e-9


def _parts() -> list[tuple[str, int, tuple[int, ...]]]:
    engine, *_ = megatron_core.initialize(model_of("gpt-oss with experts"), {**COMMON, **EP2, "global_batch_size": 8})
    parameters = engine.module.named_parameters()
    return [(name, parameter.numel(), spec_of(parameter).global_shape) for name, parameter in parameters]


def test_each_rank_holds_its_part_of_the_experts() -> None:
    for parts in run_ranks(2, _parts):
        of_experts = [(numel, shape) for name, numel, shape in parts if ".experts." in name]
        assert len(of_experts) == 4 * 3
        assert all(2 * numel == np.prod(shape) for numel, shape in of_experts)
        assert all(numel == np.prod(shape) for name, numel, shape in parts if ".experts." not in name)


def _save(folder: str, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    name = "olmoe with experts"
    engine, _, loader, _ = megatron_core.initialize(
        model_of(name), {**COMMON, **settings, "global_batch_size": 8}, training_data=_samples(), shuffle=False
    )
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.save_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def _samples() -> list[Any]:
    return [_tokens(torch.Generator().manual_seed(number)) for number in range(16)]


def _load(folder: str, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    engine, *_ = megatron_core.initialize(
        model_of("olmoe with experts"), {**COMMON, **settings, "global_batch_size": 8}
    )
    engine.load_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def test_checkpoints_load_at_any_size(tmp_path: Path) -> None:
    """Names and shapes are those of the model: a checkpoint of two parts loads whole, and the reverse."""
    split = run_ranks(2, _save, str(tmp_path / "split"), EP2)[0]
    for name, loaded in _load(str(tmp_path / "split"), {}).items():
        np.testing.assert_array_equal(loaded, split[name])
    whole = _save(str(tmp_path / "whole"), {})
    for loaded in run_ranks(4, _load, str(tmp_path / "whole"), {**EP4, "zero_stage": 3}):
        for name, tensor in loaded.items():
            np.testing.assert_array_equal(tensor, whole[name])


class Other(nn.Module):
    """A layer with experts as modules, which have another form."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the experts."""
        return torch.stack([expert(x) for expert in self.experts]).mean()


def _refusal(make: str, settings: dict[str, Any]) -> str:
    models = {
        "modules": Other,
        "none": lambda: nn.Linear(4, 4),
        "mixtral": FAMILIES["mixtral"],
        "llama4": lambda: nn.ModuleList([FAMILIES["mixtral"](), Other()]),
    }
    with pytest.raises(MegatronError) as caught:
        megatron_core.initialize(models[make](), {**COMMON, **settings, "global_batch_size": 12})
    return str(caught.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "ranks", "settings", "words"),
    [
        ("none", 2, EP2, "expert_model_parallel_size=2: the model has no module of experts with stacked parameters"),
        ("modules", 2, EP2, "expert_model_parallel_size=2: the model has no module of experts"),
        ("llama4", 2, EP2, "1.experts.0.weight"),
        (
            "mixtral",
            3,
            {"expert_model_parallel_size": 3},
            "4 experts cannot be divided by",
        ),
        ("mixtral", 4, EP2 | {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2"),
        ("mixtral", 4, EP2 | {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
    ],
)
def test_what_cannot_be_split_is_refused(model: str, ranks: int, settings: dict[str, Any], words: str) -> None:
    for message in run_ranks(ranks, _refusal, model, settings):
        assert words in message


def test_arguments_of_another_form_are_refused() -> None:
    def check() -> None:
        engine, *_ = megatron_core.initialize(
            model_of("mixtral with experts"), {**COMMON, **EP2, "global_batch_size": 8}
        )
        experts = engine.module.model.layers[0].mlp.experts
        with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts: expert parallelism needs tokens"):
            experts(torch.zeros(1, 2, 16), torch.zeros(2, 2), torch.zeros(2, 2))

    run_ranks(2, check)


SPLIT, EXCHANGE = "any_model.experts:_split", "any_model.experts:_Exchange.__call__"
DEFECTS = {
    "gradients of experts are summed over all ranks": (SPLIT, 'replica_axes=("edp",)', 'replica_axes=("dp", "cp")'),
    "every rank keeps the experts of the first one": (SPLIT, 'groups.index("ep")', "0"),
    "experts are counted once for each rank": (SPLIT, '(("etp", 0), *spec.indices)', '(("etp", 1), *spec.indices)'),
    "outputs are not multiplied by their weights": (EXCHANGE, "sent.probs[:, None]))", "1 + 0 * sent.probs[:, None]))"),
    "tokens have the neighbour's expert": (EXCHANGE, "local[:, None]", "(local[:, None] + 1) % len(counts)"),
    "a rank without tokens loses its graph": (EXCHANGE, "not len(sent.rows)", "False"),
}


def _with_defect(name: str) -> float:
    place, old, new = DEFECTS[name]
    with planted(place, old, new):
        if name == "a rank without tokens loses its graph":
            return difference(_crowded(True), _crowded(False))
        return difference(_train("gpt-oss", {**EP2, "zero_stage": 1}), _reference("gpt-oss"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DEFECTS)
def test_finds(name: str) -> None:
    _reference("gpt-oss")
    try:
        differences = run_ranks(4 if "graph" not in name else 2, _with_defect, name, timeout=30)
    except RankFailure:
        return
    assert max(differences) > 1e-6
