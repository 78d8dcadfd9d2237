"""Automatic tensor parallelism of models of the caller against torch alone in one process."""

from __future__ import annotations

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import megatron_core
from megatron_core.any_model import Engine, tensor
from megatron_core.any_model.tensor_trial import Region
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.parallel.groups import Group
from megatron_core.verify import verify_module
from megatron_core.verify.ranks import run_ranks
from tests.any_model import attentions
from tests.any_model.models import (
    COMMON,
    LLAMA,
    MODELS,
    Result,
    _causal,
    _tokens,
    call,
    difference,
    loss_in,
    model_of,
    samples_of,
    train_with_engine,
    train_with_torch,
    weights_of,
)
from tests.sample import WHOLE_MATRIX

TENSOR = {"tensor_model_parallel_size": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, TENSOR),
    (4, {**TENSOR, "zero_stage": 1}),
    (4, {**TENSOR, "zero_stage": 3}),
]
NAMES = ("gpt2", "llama", "qwen3", "mixtral", "bert", "vit")


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "row"),
    [(n, r) for i, n in enumerate(NAMES) for r in (range(3) if WHOLE_MATRIX else (0, 1 + i % 2))],
)
def test_equals_torch(name: str, row: int) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, _train, name, settings):
        assert difference(result, _reference(name)) < 1e-9


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)


def test_checkpoints_load_at_any_tensor_size(tmp_path: Path) -> None:
    whole = run_ranks(2, _save, "gpt2", str(tmp_path / "split"))[0]
    for name, found in _load("gpt2", str(tmp_path / "split")).items():
        np.testing.assert_array_equal(found, whole[name])
    whole = _save("gpt2", str(tmp_path / "whole"))
    for name, found in run_ranks(2, _load, "gpt2", str(tmp_path / "whole"))[1].items():
        np.testing.assert_array_equal(found, whole[name])


def _engine(name: str) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = {**COMMON, "global_batch_size": 1, "tensor_model_parallel_size": ranks}
    return megatron_core.initialize(model_of(name), config).engine


def _save(name: str, folder: str) -> dict[str, np.ndarray]:
    engine = _engine(name)
    engine.backward(loss_in(call(engine, torch.utils.data.default_collate(samples_of(name, 1)))))
    engine.step()
    engine.save_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def _load(name: str, folder: str) -> dict[str, np.ndarray]:
    engine = _engine(name)
    engine.load_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def test_shared_key_and_value_heads() -> None:
    for result in run_ranks(2, _train_with_one_key_head):
        assert difference(result, _train_with_one_key_head()) < 1e-9


def _train_with_one_key_head() -> Result:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    MODELS["one key"] = (partial(_causal, "Llama", **{**LLAMA, "num_key_value_heads": 1}), _tokens)
    return train_with_engine("one key", tensor_model_parallel_size=ranks)


EXACT: tuple[Any, ...] = (
    *(attentions.Attention, attentions.NumHeads, attentions.NHead, attentions.Nhead, attentions.UnknownName),
    *(attentions.WidthOfHead, attentions.WidthByDivision, attentions.Constant, attentions.Einops, attentions.Grouped),
    *(attentions.OneKey, attentions.ApartCore, attentions.FusedQKV, attentions.FusedAttributes),
    *(attentions.BiasOfHeads, attentions.Convolved, attentions.ReadsAttention),
)
WRONG: tuple[Any, ...] = (
    *(attentions.LiteralHeads, attentions.HeadsInConfig, attentions.InnerHeads, attentions.NormOfAll),
    *(attentions.InterleavedQKV, attentions.Gated, attentions.ReadsWeights, attentions.WrongScale),
    attentions.WidthOfInput,
)
SGD: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 4, "lr": 1e-2, "clip_grad": 0.0}
SGD |= {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}
BATCHES = [torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(number)) for number in range(2)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("layout", "ranks"), [("tp2", 2), ("tp2 dp2 zero3", 4), ("tp4", 4)])
def test_heads_of_every_kind(layout: str, ranks: int) -> None:
    """Losses, gradients and weights of two steps equal those of torch, with every attribute that holds heads."""
    kinds = [*EXACT, *(partial(attentions.Masked, kind) for kind in EXACT[:-1] if ranks == 2)]
    report = verify_module(partial(attentions.Model, *kinds), BATCHES, layout=layout, world_size=ranks)
    assert report.agrees, report.faults
    assert len(report.errors) > 200 and max(report.errors.values()) < 1e-9


def test_attentions_of_every_kind_are_split() -> None:
    for result in run_ranks(2, _split_sizes, EXACT):
        assert result == [attentions.WIDTH // 2] * (len(EXACT) - 2)  # all with a q_proj are split


def test_zero_inputs_do_not_hide_a_wrong_number_of_heads() -> None:
    kind = partial(attentions.Silent, attentions.LiteralHeads)
    (fault,) = verify_module(partial(attentions.Model, kind), BATCHES).faults
    assert "does not compute what the whole module computes" in fault


def test_equal_layers_are_compared_once() -> None:
    """The number of a layer does not make it another kind."""
    for counts in run_ranks(2, _count_checks):
        assert counts == {"LlamaAttention": 1, "LlamaMLP": 1}


def _count_checks() -> dict[str, int]:
    counts: dict[str, int] = {}

    def establish(region: Region, group: Group) -> None:
        kind = type(region.twin).__name__
        counts[kind] = counts.get(kind, 0) + 1
        assert len(region.modules) == 3

    with mock.patch.object(tensor, "establish", establish):
        megatron_core.parallelize(model_of("llama"))
    return counts


def _split_sizes(kinds: tuple[Any, ...]) -> list[int]:
    model = megatron_core.parallelize(attentions.Model(*kinds))
    return [len(parameter) for name, parameter in model.named_parameters() if name.endswith("q_proj.weight")]


def test_modules_that_cannot_be_split_are_refused() -> None:
    """At once if ``forward`` takes one tensor, else in the first forward."""
    for messages in run_ranks(2, _refused_kinds):
        assert len(messages) == 2 * len(WRONG)
        for message in messages:
            assert "layers.0.attn" in message and "does not compute what the whole module computes" in message
            assert "heads=" in message and "plan=" in message and "\n" not in message


def _refused_kinds() -> list[str]:
    return [message for kind in WRONG for message in _refused_kind(kind)]


def _refused_kind(kind: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        megatron_core.parallelize(attentions.Model(kind))
    model = megatron_core.parallelize(attentions.Model(partial(attentions.Masked, kind)))
    for _ in range(2):  # an error does not end the check
        with pytest.raises(ConfigError) as later:
            model(BATCHES[0])
    return str(error.value), str(later.value)


@pytest.mark.parametrize(("kind", "name"), [(attentions.NormOfKeys, "norm"), (attentions.Temperature, "temperature")])
def test_a_partial_gradient_is_refused_with_its_style(kind: Any, name: str) -> None:
    """The style is that of a module or of a parameter."""
    (message, *_) = run_ranks(2, _refused_plan, kind, None)
    assert f"the gradient of {name}" in message and "give it, or its module, the style replicated_with_grad" in message
    plan = {f"layers.*.attn.{letter}_proj": "colwise" for letter in "qkv"} | {"layers.*.attn.o_proj": "rowwise"}
    plan[f"layers.*.attn.{name}"] = "replicated_with_grad_allreduce"
    report = verify_module(partial(attentions.Model, kind), BATCHES, plan=plan)
    assert report.agrees, report.faults


def _refused_plan(kind: Any, plan: dict[str, str] | None) -> str:
    with pytest.raises(MegatronError) as error:
        megatron_core.parallelize(attentions.Model(kind), plan=plan)
    return str(error.value)


@pytest.mark.parametrize("heads", [["hq", "hk"], ("hk", "hq")])
def test_named_attributes_hold_the_heads(heads: Any) -> None:
    make_model = partial(attentions.Model, attentions.TwoUnknownNames)
    (fault,) = verify_module(make_model, BATCHES).faults
    assert "the split module fails" in fault and "its integers are hq, hk" in fault
    report = verify_module(make_model, BATCHES, heads=heads)
    assert report.agrees, report.faults


def test_number_of_heads() -> None:
    """Attributes with the number are divided."""
    report = verify_module(partial(attentions.Model, attentions.TwoEqualNames), BATCHES, heads=4)
    assert report.agrees, report.faults


WRONG_HEADS: dict[str, Any] = {
    "heads='nheads': no module of Model has nheads as an attribute with an integer": "nheads",
    "heads=0 must be the number of attention heads, or the names": 0,
    "heads=True must be": True,
    "heads=[] must be": [],
    "heads=2.0 must be": 2.0,
}


@pytest.mark.parametrize("tensor", [1, 2])
def test_wrong_heads_are_wrong_on_any_number_of_ranks(tensor: int) -> None:
    for texts in run_ranks(tensor, _refused_heads, tensor):
        for text, message in zip(texts, WRONG_HEADS, strict=True):
            assert message in text


def _refused_heads(tensor: int) -> list[str]:
    texts = []
    for heads in WRONG_HEADS.values():
        with pytest.raises(ConfigError) as error:
            megatron_core.parallelize(attentions.Model(attentions.Attention), tensor, heads=heads)
        texts.append(str(error.value))
    return texts


@pytest.mark.filterwarnings("ignore:tensor parallelism")
def test_attention_without_known_partners_stays_whole() -> None:
    """``nn.MultiheadAttention`` reads the weights of its output layer; a projection ``qkv`` has no rule."""
    kinds = (attentions.WithTorchAttention, attentions.UnknownProjection)
    report = verify_module(partial(attentions.Model, *kinds), BATCHES)
    assert report.agrees, report.faults


def test_layers_that_stay_whole_are_named() -> None:
    for texts in run_ranks(2, _warnings):
        assert [text for text in texts if "layers.0.attn.o_proj stay whole on every rank" in text]


def _warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron_core.parallelize(attentions.Model(attentions.UnknownProjection))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.attn.q_proj": "colwise"}, "there is no row-parallel layer that sums its output in the same module"),
        ({"layers.*.attn.o_proj": "rowwise"}, "there is no column-parallel layer in the same module"),
    ],
)
def test_layers_without_a_partner_are_refused(plan: dict[str, str], message: str) -> None:
    plan |= {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
    for text in run_ranks(2, _refused_plan, attentions.Attention, plan):
        assert message in text


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 3}, {"bf16": True, "fp64": False}, {"compile": True, "compile_backend": "eager"}]
)
def test_the_first_forward_checks_in_every_mode(settings: dict[str, Any]) -> None:
    """The check neither disturbs training nor is disturbed by shards, dtypes and compiled units."""
    for losses, message in run_ranks(2, _train_masked, settings):
        expected = _losses_alone()
        bound = 0.02 if "bf16" in settings else 1e-9
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < bound
        assert "does not compute what the whole module computes" in message


def _train_masked(settings: dict[str, Any]) -> tuple[list[float], str]:
    config = {"fp64": True, **SGD, **TENSOR, **settings}
    engine = megatron_core.initialize(_masked(attentions.Nhead), config).engine
    losses = []
    for batch in BATCHES:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    other = megatron_core.initialize(_masked(attentions.WrongScale), config).engine
    with pytest.raises(ConfigError) as error:
        other(BATCHES[0])
    return losses, str(error.value)


def _losses_alone() -> list[float]:
    model = _masked(attentions.Nhead).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _masked(kind: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return attentions.Model(partial(attentions.Masked, kind))


def test_wrong_plans_of_experts_are_refused() -> None:
    """Gate and up projection are packed in one parameter, whose halves a rank must split each."""
    for message in run_ranks(2, _train_experts, "colwise"):
        assert "model.layers.0.mlp.experts" in message and "does not compute what the whole module computes" in message
    assert run_ranks(2, _train_experts, "packed_colwise") == [""] * 2


def _train_experts(style: str) -> str:
    model = model_of("mixtral")
    experts = "model.layers.*.mlp.experts"
    plan = {experts: "moe_tp_experts", f"{experts}.gate_up_proj": style, f"{experts}.down_proj": "rowwise"}
    megatron_core.parallelize(model, plan=plan)
    try:
        call(model, torch.utils.data.default_collate(samples_of("mixtral", 2)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("in_layers", [False, True])
def test_stages_of_split_layers(in_layers: bool) -> None:
    """Each rank checks its own layers in their first forward."""
    settings = {**SGD, "fp64": True, **TENSOR, "pipeline_model_parallel_size": 2}
    expected = _in_stages(attentions.Nhead, {**SGD, "fp64": True}, in_layers)
    for losses in run_ranks(4, _in_stages, attentions.Nhead, settings, in_layers):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for message in run_ranks(4, _in_stages, attentions.WrongScale, settings, in_layers):
        assert "does not compute what the whole module computes" in message


def test_a_stage_without_split_layers() -> None:
    settings = {**SGD, "fp64": True, "pipeline_model_parallel_size": 2}
    expected = run_ranks(2, _train_whole_stage, settings)[0]
    for losses in run_ranks(4, _train_whole_stage, {**settings, **TENSOR}):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)


def _train_whole_stage(settings: dict[str, Any]) -> list[float]:
    engine = megatron_core.initialize(attentions.pipeline_with_a_whole_stage(), settings).engine
    batches = iter([(batch, batch) for batch in BATCHES])
    return [engine.train_batch(batches).loss for _ in BATCHES]


def _in_stages(kind: Any, settings: dict[str, Any], in_layers: bool) -> list[float] | str:
    torch.manual_seed(0)
    model = attentions.pipeline_of(kind) if in_layers else attentions.Chain(kind)
    engine = megatron_core.initialize(model, settings).engine
    batches = iter([(batch, batch) if in_layers else batch for batch in BATCHES])
    try:
        return [engine.train_batch(batches).loss for _ in BATCHES]
    except MegatronError as error:
        return str(error)


BAD: list[tuple[str, int, dict[str, str] | None, str]] = [
    ("llama", 2, {"layers.*.attn.q": "colwise"}, "'layers.*.attn.q' matches no module or parameter"),
    ("llama", 2, {"lm_head": "columns"}, "has the style 'columns', which is not supported"),
    ("llama", 3, None, "world size 2 cannot be divided by tensor"),
    ("gpt2", 2, {"lm_head": "colwise_gather_output"}, "transformer.wte.weight is tied to lm_head.weight"),
    ("convolutions", 2, None, "has no plan"),
    ("tangled", 2, {"head": "colwise_gather_output", "shared": "rowwise", "layers.*.2": "packed_colwise:3"}, "3 matri"),
]


@pytest.mark.parametrize(("name", "tensor", "plan", "message"), BAD)
def test_bad_input_is_one_sentence_on_all_ranks(
    name: str, tensor: int, plan: dict[str, str] | None, message: str
) -> None:
    for found in run_ranks(2, _refused, name, tensor, plan):
        assert message in found and "\n" not in found


def _refused(name: str, tensor: int, plan: dict[str, str] | None) -> str:
    with pytest.raises(MegatronError) as error:
        megatron_core.parallelize(model_of(name), tensor, plan=plan)
    return str(error.value)
