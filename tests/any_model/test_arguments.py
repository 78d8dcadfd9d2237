"""Wrong arguments of ``initialize``, ``parallelize`` and ``PipelineModule`` are one sentence on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core import LayerSpec, PipelineModule, TiedLayerSpec
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.verify import verify_module
from megatron_core.verify.ranks import run_ranks
from tests.any_model.attentions import Attention
from tests.any_model.attentions import Model as Transformer

CONFIG = {"micro_batch_size": 1, "global_batch_size": 2, "lr": 0.1}
Schedule = torch.optim.lr_scheduler.LambdaLR


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.head(self.layers(x)).square().mean()
        return loss


def _initialize(model: Any = None, config: Any = None, **arguments: Any) -> Any:
    return megatron_core.initialize(Model() if model is None else model, {**CONFIG, **(config or {})}, **arguments)


def _with_groups(**group: Any) -> Any:
    model = Model()
    return _initialize(model, model_parameters=[{"params": model.parameters(), **group}])


def _scheduler_of_another(nest: Callable[[Any, Any], Any]) -> Any:
    model = Model()
    optimizer, other = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    return _initialize(model, optimizer=optimizer, lr_scheduler=nest(optimizer, other))


def _half(optimizer: torch.optim.Optimizer) -> Any:
    return Schedule(optimizer, lambda step: 0.5)


def _sequence(optimizer: Any, other: Any) -> Any:
    schedules = [_half(optimizer), _half(optimizer)]
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [1])
    sequence._schedulers[1] = _half(other)
    return sequence


def _pipeline(layers: Any = (torch.tanh,), **arguments: Any) -> Any:
    return PipelineModule(layers, **arguments)


def _tied(key: Any, **arguments: Any) -> Any:
    return TiedLayerSpec(key, nn.Linear, 4, 4, **arguments)


def _parallelize(plan: Any, **arguments: Any) -> Any:
    return megatron_core.parallelize(Transformer(Attention), 1, plan=plan, **arguments)


def _method_of_pipeline() -> Any:
    return _initialize(_pipeline(), partition_method="uniform")


def _plan_of_pipeline() -> Any:
    layers = [nn.ModuleDict({"q_proj": nn.Linear(4, 4)})]
    return _initialize(_pipeline(layers, tensor_plan={"*.k_proj": "colwise"}))


def _style_of_pipeline() -> Any:
    return _initialize(_pipeline([nn.ModuleDict({"norm": nn.LayerNorm(4)})], tensor_plan={"*.norm": "colwise"}))


def _no_step(*_: Any) -> Any:
    return None


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: megatron_core.initialize(None, CONFIG), "model=None must be a torch.nn.Module"),
    "number": (lambda: _initialize(3), "model=3 must be a torch.nn.Module"),
    "function": (lambda: _initialize(lambda x: x), "model=function <lambda> must be a torch.nn.Module; call it"),
    "class": (lambda: _initialize(Model), "model=type Model must be a torch.nn.Module; call it to construct"),
    "lazy": (lambda: _initialize(nn.LazyLinear(3)), "model=LazyLinear: weight, bias have no shape before the first"),
    "optimizer": (lambda: _initialize(optimizer="adam"), "optimizer='adam' must be a torch optimizer, or a function"),
    "optimizer of none": (lambda: _initialize(optimizer=_no_step), "optimizer=function _no_step returned None, not a"),
    "optimizer of list": (lambda: _initialize(optimizer=list), "optimizer=type list returned [Parameter containing"),
    "no params": (lambda: _initialize(model_parameters=[{"lr": 1.0}]), "group 0 of model_parameters has no 'params'"),
    "texts": (lambda: _initialize(model_parameters=["a"]), "model_parameters has 'a'; legal: parameters, and dicts"),
    "tensor": (lambda: _initialize(model_parameters=torch.ones(2)), "model_parameters=a Tensor must be a list"),
    "read twice": (lambda: _initialize(model_parameters=iter(())), "model_parameters has no entries; an iterator"),
    "set": (lambda: _with_groups(params={1}), "params={1} must be a list of parameters"),
    "lr": (lambda: _with_groups(lr="x"), "group 0 of model_parameters: lr='x' must be a number >= 0"),
    "negative lr": (lambda: _with_groups(lr=-1.0), "lr=-1.0 must be a number >= 0"),
    "decay": (lambda: _with_groups(weight_decay=float("nan")), "weight_decay=nan must be a number >= 0"),
    "one beta": (lambda: _with_groups(betas=(0.9,)), "betas=(0.9,) must be two numbers >= 0 and < 1"),
    "betas": (lambda: _with_groups(betas=(0.9, 1.5)), "betas=(0.9, 1.5) must be two numbers >= 0 and < 1"),
    "iterator": (lambda: _initialize(training_data=iter([1])), "training_data=a list_iterator must be a data set"),
    "path": (lambda: _initialize(training_data="data"), "training_data='data' must be a data set with __len__"),
    "collate": (lambda: _initialize(collate_fn=3), "collate_fn=3 must be a function, or None"),
    "initialise": (lambda: _initialize(initialise="zeros"), "initialise='zeros' must be a function, or None"),
    "scheduler": (lambda: _initialize(lr_scheduler="cosine"), "lr_scheduler='cosine' must be a function, or None"),
    "scheduler of none": (lambda: _initialize(lr_scheduler=_no_step), "_no_step returned None, which has no step()"),
    "scheduler of another": (lambda: _scheduler_of_another(lambda _, o: _half(o)), "LambdaLR changes the learning rat"),
    "sequence of another": (lambda: _scheduler_of_another(_sequence), "of another optimizer (AdamW), so it would have"),
    "units": (lambda: _initialize(unit_classes="Linear"), "unit_classes='Linear' must be a list of names or types"),
    "unit": (lambda: _initialize(unit_classes=["Linear", "Block"]), "the model has no such modules as Block"),
    "method": (lambda: _initialize(partition_method="nope"), "partition_method='nope' is unknown; legal: 'uniform'"),
    "no method": (lambda: _initialize(partition_method=None), "partition_method=None must be one of"),
    "counts": (lambda: _initialize(partition_method=[2, 0]), "partition_method=[2, 0] must be one of"),
    "regular expression": (lambda: _initialize(partition_method="type:["), "partition_method='type:[': unterminated"),
    "no class": (lambda: _initialize(partition_method="type:Block"), "'type:Block' matches no layer"),
    "flops": (lambda: _initialize(partition_method="flops"), "partition_method='flops' needs example="),
    "shuffle": (lambda: _initialize(shuffle="no"), "shuffle='no' must be True or False"),
    "seed": (lambda: _pipeline(seed="x"), "PipelineModule: seed='x' must be an integer"),
    "setting": (lambda: _initialize(config={1: 2}), "1 is not a setting"),
    "head": (lambda: _initialize(head_modules=["lm_head"]), "head_modules=['lm_head']: Model has no such modules; its"),
    "text as heads": (lambda: _initialize(head_modules="head"), "head_modules='head' must be a list of names"),
    "method of a pipeline": (_method_of_pipeline, "of initialize have no effect on a PipelineModule"),
    "style of a pipeline": (
        _style_of_pipeline,
        "'0.norm' (LayerNorm) has the style 'colwise'; it must be an nn.Linear",
    ),
    "no plan of a pipeline": (lambda: _pipeline(tensor_plan={}), "tensor_plan={} must be a dict of styles"),
    "plan of a pipeline": (_plan_of_pipeline, "plan: '*.k_proj' matches no module or parameter"),
    "interval": (lambda: _pipeline(recompute_interval=1.5), "recompute_interval=1.5; legal: one layer or more, an in"),
    "partition": (lambda: _pipeline(partition_method=None), "partition_method=None must be one of"),
    "unknown partition": (lambda: _pipeline(partition_method="nope"), "partition_method='nope' is unknown"),
    "no layers": (lambda: _pipeline(None), "PipelineModule: layers=None must be a list of layers"),
    "class as layer": (lambda: _pipeline([nn.Linear]), "layer Linear is a class; write LayerSpec(Linear, ...)"),
    "loss": (lambda: _pipeline(loss_fn="mse"), "loss_fn='mse' must be a function, or None"),
    "key": (lambda: _pipeline([_tied("")]), "TiedLayerSpec: key='' must be a text without a dot"),
    "dotted key": (lambda: _tied("a.b"), "key='a.b' must be a text without a dot"),
    "number as key": (lambda: _tied(3), "key=3 must be a text"),
    "forward": (lambda: _tied("a", forward_fn="head"), "forward_fn='head' must be a function, or None"),
    "spec": (lambda: LayerSpec(len), "must be a class derived from torch.nn.Module"),  # type: ignore[arg-type]
    "text": (lambda: megatron_core.parallelize("x"), "model='x' must be a torch.nn.Module"),  # type: ignore[arg-type]
    "ranks": (lambda: megatron_core.parallelize(Model(), "x"), "tensor='x' must be an integer >= 1"),  # type: ignore[arg-type]
    "no ranks": (lambda: megatron_core.parallelize(Model(), 0), "tensor=0 must be an integer >= 1"),
    "pattern": (lambda: _parallelize({"layers.*.attn.k": "colwise"}), "'layers.*.attn.k' matches no module or param"),
    "style": (lambda: _parallelize({"layers.*.attn.q_proj": "column"}), "has the style 'column', which is not suppor"),
    "no style": (lambda: _parallelize({}), "plan={} must be a dict of styles by names of modules"),
    "list": (lambda: _parallelize(["layers"]), "plan=['layers'] must be a dict of styles"),
    "norm": (lambda: _parallelize({"norms.*": "colwise"}), "'norms.0' (LayerNorm) has the style 'colwise'; it must be"),
    "alone": (lambda: _parallelize({"layers.*.attn.q_proj": "colwise"}), "no row-parallel layer that sums its output"),
}

METHODS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "detached": (lambda e: e.backward(e(torch.ones(1, 4)).detach()), "loss does not require gradients"),
    "terms": (lambda e: e.backward(e(torch.ones(1, 4)), num_terms="3"), "num_terms='3' must be a number >= 0"),
    "negative terms": (lambda e: e.backward(e(torch.ones(1, 4)), num_terms=-1), "num_terms=-1 must be a number >= 0"),
    "list of batches": (lambda e: e.train_batch([torch.ones(1, 4)]), "must be an iterator of micro-batches"),
    "no batches": (lambda e: e.eval_batch(None), "batches=None must be an iterator of micro-batches"),
    "folder": (lambda e: e.save_checkpoint(3), "folder=3 must be the path of a folder"),
    "folder to load": (lambda e: e.load_checkpoint(None), "folder=None must be the path of a folder"),
    "iteration": (lambda e: e.load_checkpoint("absent", "1"), "iteration='1' must be an integer >= 0"),
    "client state": (lambda e: e.save_checkpoint("absent", [1]), "client_state=[1] must be a dict with JSON values"),
    "gathered": (lambda e: e.gathered("head").__enter__(), "'h' must be a parameter of the model, not a str"),
    "whole": (lambda e: e.whole.weights("head"), "'head' must be a parameter of the model, not a str"),
    "micro-batch": (lambda e: e.set_batch_size(0, 1), "micro_batch_size=0 must be an integer >= 1"),
    "steps": (lambda e: e.set_batch_size(1, 1.5), "gradient_accumulation_steps=1.5 must be an integer >= 1"),
    "loader": (lambda e: e.make_loader(iter(())), "must be a data set with __len__ and __getitem__"),
}


@pytest.mark.parametrize("case", METHODS)
def test_wrong_arguments_of_methods_are_one_sentence(case: str) -> None:
    call, message = METHODS[case]
    with pytest.raises(MegatronError) as error:
        call(_initialize().engine)
    assert message in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bf16": "yes"}, "bf16='yes' does not fit"),
        ({"lr": "x"}, "lr='x' does not fit"),
        ({"micro_batch_size": 1.5}, "micro_batch_size=1.5 does not fit"),
        ({"zero_stage": "1"}, "zero_stage='1' does not fit"),
    ],
)
def test_a_run_config_has_the_types_of_its_settings(values: dict[str, Any], message: str) -> None:
    config = RunConfig.from_flat({**CONFIG, **values})
    with pytest.raises(ConfigError, match=message):
        megatron_core.initialize(Model(), config)
    megatron_core.initialize(Model(), RunConfig.from_flat({**CONFIG, "zero_stage": 1, "lr": 1}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, [1]), "make_model=3 must be a function"),
        ((Model, []), "batches must be a list with one batch or more"),
        ((Model, 3), "batches must be a list with one batch or more"),
        ((Model, [1], 3), "layout=3 must be a text"),
    ],
)
def test_wrong_arguments_of_verify_module(arguments: Any, message: str) -> None:
    make_model, batches, *layout = arguments
    with pytest.raises(MegatronError, match=message):
        verify_module(make_model, batches, layout=layout[0] if layout else None)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_one_sentence(case: str) -> None:
    """On one rank, without a pipeline and without tensor parallelism, so that most would have no effect."""
    call, message = WRONG[case]
    with pytest.raises(MegatronError) as error:
        call()
    assert message in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.drawn(1)
def test_wrong_arguments_on_two_ranks() -> None:
    for texts in run_ranks(2, _messages):
        assert not texts, texts


def _messages() -> list[str]:
    """Cases without the right message."""
    missing = []
    for case, (call, message) in WRONG.items():
        try:
            call()
        except MegatronError as error:
            missing += [] if message in str(error) else [f"{case}: {error}"]
        else:
            missing.append(case)
    return missing


def test_right_arguments() -> None:
    """The neighbours of wrong ones are accepted."""
    model = Model()
    groups = [{"params": model.layers.parameters(), "lr": 0.2}, {"params": list(model.head.named_parameters())}]
    assert [group["lr"] for group in _initialize(model, model_parameters=groups).optimizer.param_groups] == [0.2, 0.1]
    make = partial(torch.optim.SGD, lr=0.3)
    engine, optimizer, _, scheduler = _initialize(optimizer=make, lr_scheduler=_half)
    assert optimizer.param_groups[0]["lr"] == 0.15
    assert scheduler.optimizer is optimizer and engine.lr_scheduler is scheduler
    model = Model()
    own = torch.optim.RMSprop(model.parameters(), lr=0.4)
    chained = torch.optim.lr_scheduler.ChainedScheduler([_half(own), _half(own)])
    assert _initialize(model, optimizer=own, lr_scheduler=chained).scheduler is chained
    for method in ("uniform", "Parameters", "type:linear", [1, 1]):
        _initialize(partition_method=method, head_modules=["head"], unit_classes=[nn.Linear])
    _pipeline([LayerSpec(nn.Linear, 4, 4), torch.tanh, _tied("a", forward_fn=_no_step)], example=torch.ones(1, 4))


def test_a_scheduler_of_another_optimizer_is_named_with_its_fix() -> None:
    with pytest.raises(ConfigError, match="construct it with the optimizer that is given to initialize"):
        _scheduler_of_another(lambda _, other: _half(other))
