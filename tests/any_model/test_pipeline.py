"""``PipelineModule`` against torch in one process, checkpoints of stages, changed shapes, and errors on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import megatron_core
from megatron_core import LayerSpec, PipelineModule, TiedLayerSpec
from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.verify.ranks import run_ranks
from tests.any_model.layered import loss_of_logits, module, samples, train_placed, train_whole
from tests.any_model.models import (
    COMMON,
    MODELS,
    Result,
    Tangled,
    difference,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
)
from tests.sample import WHOLE_MATRIX

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
PP4: dict[str, Any] = {"pipeline_model_parallel_size": 4}
CHUNKS = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
ROWS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"global_batch_size": 3}, {}),
    (4, PP4 | {"global_batch_size": 3}, {"partition_method": "uniform", "recompute_interval": 2}),
    (4, PP2 | {"global_batch_size": 6, "zero_stage": 3}, {"partition_method": "type:block"}),
    (2, CHUNKS | {"global_batch_size": 3}, {"partition_method": "uniform", "recompute_interval": 1}),
    (2, PP2 | {"global_batch_size": 3, "pipeline_schedule": "zb_v"}, {"partition_method": [1, 3, 1, 3]}),
    (2, PP2 | {"global_batch_size": 1}, {}),
    (
        4,
        PP4 | {"global_batch_size": 3, "optimizer": "adam", "pipeline_schedule": "gpipe"},
        {"partition_method": [4, 1, 2, 1]},
    ),
    (4, PP2 | {"global_batch_size": 2, "zero_stage": 1}, {}),
]


@cache
def _whole(batch_size: int) -> Result:
    return train_whole(batch_size, 5)


@pytest.mark.parametrize(("ranks", "settings", "options"), ROWS if WHOLE_MATRIX else ROWS[:5])
def test_layers_equal_torch(ranks: int, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """A table on up to three stages; messages are dicts with floats, integers and None."""
    expected = _whole(settings["global_batch_size"])
    train = partial(train_placed, 5, settings, options)
    found = [train()] if ranks == 1 else run_ranks(ranks, train)
    for result in found:
        assert result["weights"].keys() == expected["weights"].keys()
        assert difference(result, expected) < 1e-9
    assert {name for result in found for name in result["gradients"]} == {*expected["gradients"]}


# Construction.


class Counted(nn.Linear):
    """A layer that counts its constructions with memory."""

    made: ClassVar[list[int]] = []

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        if not self.weight.is_meta:
            self.made.append(width)


def _construct() -> tuple[int, list[tuple[int, ...]]]:
    model = PipelineModule([LayerSpec(Counted, 4)] * 6, loss_fn=nn.functional.mse_loss)
    engine = megatron_core.initialize(model, {**COMMON, **PP2, "global_batch_size": 2})[0]
    return len(Counted.made), [tuple(p.shape) for p in engine.module.parameters()]


def test_each_rank_constructs_its_own_layers() -> None:
    assert run_ranks(2, _construct) == [(3, [(4, 4), (4,)] * 3)] * 2


def _unseeded(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """This rank's weights before the first step, of models that differ between the ranks."""
    found = {}
    for name in names:
        model_of(name)
        torch.manual_seed(dist.get_rank())
        model = MODELS[name][0]()
        engine = megatron_core.initialize(model, {**COMMON, **PP2, "global_batch_size": 2})[0]
        named = [(place.name, p.detach().numpy().copy()) for p, place in engine.staged.places.items()]
        found |= {f"{name} {key}": value for key, value in named}
    return found


def test_copies_begin_equal_on_ranks_with_different_models() -> None:
    """The table of GPT-2 is on all four ranks, and each layer on the two ranks of its stage."""
    model_of("gpt2")
    found = run_ranks(4, _unseeded, ("gpt2", "bert"))
    holders: dict[str, list[np.ndarray]] = {}
    for weights in found:
        for name, value in weights.items():
            holders.setdefault(name, []).append(value)
    assert len(holders["gpt2 transformer.wte.weight"]) == 4
    assert {len(copies) for copies in holders.values()} == {2, 4}
    for name, copies in holders.items():
        for other in copies[1:]:
            np.testing.assert_array_equal(copies[0], other, err_msg=name)


class Sharing(nn.Module):
    """A linear layer that two layers, the head and the root share."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), self.core, nn.Tanh()) for _ in range(4))
        self.head = nn.Sequential(self.core, nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the head's outputs."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _sharing(settings: dict[str, Any]) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    engine = megatron_core.initialize(Sharing(), {**COMMON, "global_batch_size": 2, **settings})[0]
    data = iter(torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    reports = [engine.train_batch(data) for _ in range(3)]
    return [(each.loss, each.grad_norm) for each in reports]


def test_a_module_in_layers_of_both_stages() -> None:
    expected = _sharing({})
    for settings in (PP2, PP2 | {"pipeline_schedule": "zb_v"}):
        for reports in run_ranks(2, _sharing, settings):
            np.testing.assert_allclose(reports, expected, rtol=1e-9)


def _frozen_below() -> tuple[list[float], float]:
    """Losses of GPT-2 whose first stage and table are frozen, so that no gradient is sent back."""
    model = model_of("gpt2")
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    for layer in list(model.transformer.h)[:-1]:
        layer.requires_grad_(False)
    settings = {**COMMON, "global_batch_size": 2}
    if dist.is_initialized():
        settings |= PP2 | {"zero_stage": 3}
    options = {"partition_method": [2, 1]} if dist.is_initialized() else {}
    engine, _, loader, _ = megatron_core.initialize(
        model, settings, training_data=samples_of("gpt2"), shuffle=False, **options
    )
    with throughout_float64(engine):
        batches = iter(loader)
        reports = [engine.train_batch(batches, lambda output, batch: loss_in(output)) for _ in range(2)]
    return [each.loss for each in reports], reports[-1].grad_norm


def test_a_frozen_stage() -> None:
    expected = _frozen_below()
    for losses, norm in run_ranks(2, _frozen_below):
        np.testing.assert_allclose([*losses, norm], [*expected[0], expected[1]], rtol=1e-9)


def _on_meta(stages: int) -> dict[str, np.ndarray]:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(model_of("gpt2").config)
    settings = {**COMMON, "global_batch_size": 2, "pipeline_model_parallel_size": stages}
    engine = megatron_core.initialize(model, settings)[0]
    names = {name for name, _ in model_of("gpt2").named_parameters()}
    return {name: tensor.numpy() for name, tensor in engine.full_state_dict().items() if name in names}


def test_meta_models_begin_with_the_same_weights_in_stages() -> None:
    expected = _on_meta(1)
    for weights in run_ranks(2, _on_meta, 2):
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(weights[name], tensor, err_msg=name)


# Checkpoints.


def _engine_of(name: str, settings: dict[str, Any]) -> Any:
    config = {**COMMON, "train_iters": 10, "lr_warmup_iters": 1, **settings}
    if name == "layers":
        options = {"partition_method": "uniform"}
        return megatron_core.initialize(module(**options), config, training_data=samples(), shuffle=False)
    return megatron_core.initialize(model_of(name), config, training_data=samples_of(name), shuffle=False)


def _train(name: str, settings: dict[str, Any], steps: int, load: Path | None, save: Path | None) -> Any:
    engine, _, loader, _ = _engine_of(name, settings)
    if load is not None:
        assert engine.load_checkpoint(load) == {"note": 1}
    batches = iter(loader)
    loss = None if name == "layers" else lambda output, batch: loss_in(output)
    reports = [engine.train_batch(batches, loss) for _ in range(steps)]
    if save is not None:
        engine.save_checkpoint(save, {"note": 1})
    weights = {key: tensor.numpy() for key, tensor in engine.full_state_dict().items()}
    return [(each.loss, each.grad_norm, each.learning_rate, each.iteration) for each in reports], weights


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("layers", [(2, PP2), (4, CHUNKS | {"zero_stage": 3})]),
        ("gpt2 of 4 layers", [(4, PP2 | {"zero_stage": 1}), (1, {}), (2, PP2 | {"pipeline_schedule": "zb_v"})]),
    ],
)
def test_checkpoints_load_in_any_layout(tmp_path: Path, name: str, layouts: list[tuple[int, dict[str, Any]]]) -> None:
    """Steps in one layout after the other are those of one run in the first."""
    sizes = {"global_batch_size": 4}
    if name != "layers":
        model_of(name)  # forked ranks inherit the imports
    ranks, settings = layouts[0]
    expected, weights = run_ranks(ranks, _train, name, settings | sizes, len(layouts), None, None)[0]
    before: Path | None = None
    for number, (ranks, settings) in enumerate(layouts):
        folder = tmp_path / str(number)
        call = (_train, name, settings | sizes, 1, before, folder)
        found = [call[0](*call[1:])] if ranks == 1 else run_ranks(ranks, *call)
        before = folder
        for reports, _ in found:
            np.testing.assert_allclose(reports, expected[number : number + 1], rtol=1e-12)
        if number == len(layouts) - 1:
            for _, own in found:
                assert own.keys() == weights.keys()
                for key, tensor in weights.items():
                    if key.endswith(".calls"):  # 4 calls on one data-parallel rank, then 2 on each of two
                        assert own[key] == 6
                        continue
                    np.testing.assert_allclose(own[key], tensor, rtol=1e-9, atol=1e-12, err_msg=key)


# Shapes and evaluation.


def _two_lengths() -> tuple[list[float], list[float]]:
    """Losses of steps whose sequences have 6, 6, 4 and 6 tokens, each after an evaluation of the same batch."""
    settings = {**COMMON, **PP2, "global_batch_size": 2}
    engine = megatron_core.initialize(module(), settings)[0]
    lengths = [6, 6, 4, 6]
    evaluated, trained = [], []
    for number, length in enumerate(lengths):
        batch = [tuple(each[:length].unsqueeze(0) for each in pair) for pair in samples()[2 * number : 2 * number + 2]]
        evaluated.append(engine.eval_batch(iter(batch)))
        trained.append(engine.train_batch(iter(batch)).loss)
    return evaluated, trained


def test_lengths_may_change() -> None:
    for evaluated, trained in run_ranks(2, _two_lengths):
        np.testing.assert_allclose(evaluated, trained, rtol=1e-12)
        assert len(set(trained)) == 4


# Errors.


class Widening(nn.Module):
    """A layer whose output has one more row in each training step after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rows = nn.Parameter(torch.ones(4)), 1

    def forward(self, x: Tensor) -> Tensor:
        """Repeat the rows."""
        self.rows += self.training
        return (x * self.weight).repeat(self.rows, 1)


class Other(nn.Module):
    """A layer that returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> object:
        """An object of no known class."""
        return object()


class Misplaced(nn.Module):
    """A head that is registered before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the head's outputs."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Summing(nn.Module):
    """A model that adds up the outputs of its layers outside of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the head's outputs."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).sum()


class Skipping(Misplaced):
    """A model that leaves its last layer out."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the first layer's outputs."""
        return self.layers[0](x).sum()


class Routed(nn.Linear):
    """A layer that keeps the loss of its router, of which its output is not a function."""

    router: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the linear layer."""
        self.router = x.square().mean() + self.weight.square().mean()
        return super().forward(x)


class Keeping(Misplaced):
    """A model that adds up losses that its layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(4, 4) for _ in range(2))
        self.head = self._modules.pop("head")

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the head's outputs and of the losses of all layers."""
        total = super().forward(x)
        for layer in self.modules():
            if isinstance(layer, Routed) and layer.router is not None:
                total = total + layer.router
        return total


class NoLayers(nn.Module):
    """A model without a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the outputs."""
        return self.two(self.one(x)).sum()


def _t5() -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def _rows(shape: tuple[int, ...] = (1, 4)) -> list[Any]:
    return [torch.ones(shape, dtype=torch.float64)] * 2


def _tokens_of_one() -> dict[str, Tensor]:
    return {name: tokens[None] for name, tokens in samples_of("mixtral", 1)[0].items()}


def _pairs() -> list[Any]:
    return [(each, each) for each in _rows()]


def _fail(
    make: Callable[[], nn.Module],
    batches: Callable[[int], Any],
    settings: dict[str, Any],
    steps: int,
    options: dict[str, Any],
) -> str:
    try:
        engine = megatron_core.initialize(make(), {**COMMON, **PP2, "global_batch_size": 2, **settings}, **options)[0]
        for _ in range(steps):
            own = batches(engine.groups.index("pp"))
            engine.train_batch(None if own is None else iter(own))
    except (MegatronError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _layers(*classes: type[nn.Module]) -> Callable[[], PipelineModule]:
    return lambda: PipelineModule([LayerSpec(kind) for kind in classes], loss_fn=lambda x, labels: x.sum())


FAULTS: dict[str, tuple[Any, ...]] = {
    "code between layers": (
        *(Tangled, lambda index: [torch.ones(1, 5, dtype=torch.int64)] * 2, {}),
        "frozen runs after the layers of Tangled",
    ),
    "head before layers": (Misplaced, lambda index: _rows(), {}, "head runs after the layers of Misplaced"),
    "a layer is left out": (
        Skipping,
        lambda index: _rows(),
        {},
        "layers.0 does not run in each forward|another pipeline",
    ),
    "a sum over layers of which one is on another stage": (
        *(partial(Summing, 2), lambda index: _rows(), {}),
        "head of Summing reads values that only the first stage computes (features of images, states of an encoder, a ",
    ),
    "a sum over several layers": (partial(Summing, 4), lambda index: _rows(), {}, "layers.3 of Summing reads values"),
    "a sum that a stage passes on": (
        *(partial(Summing, 3), lambda index: _rows(), {"pipeline_model_parallel_size": 3}),
        "layers.2 of Summing reads values",
    ),
    "losses that layers keep": (Keeping, lambda index: _rows(), {}, "layers.0.router has a gradient"),
    "router logits of a batch": (
        *(partial(model_of, "mixtral"), lambda index: [{**_tokens_of_one(), "output_router_logits": True}] * 2, {}),
        "MixtralForCausalLM adds up the router logits of all layers",
    ),
    "no layers": (NoLayers, lambda index: _rows(), {}, "NoLayers has no list of layers"),
    "two lists": (_t5, lambda index: _rows(), {}, "several lists of layers (encoder.block, decoder.block)"),
    "few layers": (
        *(Misplaced, lambda index: _rows(), {"num_virtual_stages_per_pipeline_rank": 2}),
        "the model has 2 layers, fewer than its 4 pipeline stages",
    ),
    "a message of no known class": (
        *(_layers(Other, Other), lambda index: _pairs(), {}),
        "the last layer of a pipeline stage returns object",
    ),
    "no batches on a stage": (
        *(Misplaced, lambda index: None if index else _rows(), {}),
        "rank 1 has no batches, but its stage reads them",
    ),
    "different shapes": (
        *(Misplaced, lambda index: _rows((1 + index, 4)), {}),
        "ranks 0 and 1 are stages of one pipeline, but their batches have different shapes",
    ),
    "data end on one rank": (
        *(Misplaced, lambda index: _rows()[: 2 - index], {}),
        "DataError: the data of rank 1 end after 1 of the 2 micro-batches",
    ),
    "data end on all ranks": (Misplaced, lambda index: _rows()[:1], {}, "StopIteration"),
    "a setting of the GPT": (Misplaced, lambda index: _rows(), {"num_layers": 4}, "num_layers has no effect"),
    "a schedule for several chunks": (
        *(Misplaced, lambda index: _rows(), {"pipeline_schedule": "interleaved"}),
        "pipeline_schedule=interleaved",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", FAULTS)
def test_errors_on_all_ranks(fault: str) -> None:
    make, batches, settings, sentence = FAULTS[fault]
    if make is _t5:
        make()  # forked ranks inherit the imports
    ranks = settings.get("pipeline_model_parallel_size", 2)
    found = run_ranks(ranks, _fail, make, batches, settings, 1, {}, timeout=30.0)
    for text in found:
        assert any(each in text for each in sentence.split("|")), text


def test_own_optimizer_is_refused() -> None:
    found = run_ranks(2, _fail, Misplaced, None, {}, 0, {"optimizer": torch.optim.RMSprop})
    assert all("each rank updates its own stages" in text for text in found)


def _misplaced_head() -> float:
    engine = megatron_core.initialize(Misplaced(), {**COMMON, **PP2, "global_batch_size": 2}, head_modules=["head"])[0]
    with pytest.raises(ConfigError, match=r"call engine\.train_batch"):
        engine(_rows()[0])
    with pytest.raises(ConfigError, match="no such modules"):
        megatron_core.initialize(Misplaced(), {**COMMON, **PP2, "global_batch_size": 2}, head_modules=["tail"])
    with pytest.raises(DataError, match="rank 0 has no batches"):
        engine.train_batch(None)
    return engine.train_batch(iter(_rows())).grad_norm


def test_head_modules_correct_the_order() -> None:
    norms = run_ranks(2, _misplaced_head)
    assert norms[0] == norms[1] > 0.0


def _widen() -> str:
    """The second micro-batch has the shapes of the first, but another message."""
    return _fail(_layers(Widening, Widening), lambda index: _pairs(), {}, 1, {})


def test_shape_of_a_message_depends_on_the_batch_alone() -> None:
    for text in run_ranks(2, _widen):
        assert "but before it returned" in text and "must depend on the shapes of the batch only" in text


def test_tied_specs_construct_one_module() -> None:
    with pytest.raises(ConfigError, match="must construct the same module"):
        PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Linear, 2, 3)])
    with pytest.raises(ConfigError, match="must be a class derived from"):
        LayerSpec(loss_of_logits)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a module, a LayerSpec or a function"):
        PipelineModule([3])
