"""Compare a module split by ``parallelize`` and trained by an engine with torch alone in one process, in float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import megatron_core
from megatron_core.any_model.arguments import check_functions, check_positive
from megatron_core.any_model.engine import Engine, loss_of
from megatron_core.any_model.tensor_heads import Heads
from megatron_core.any_model.tensor_trial import PARTIAL
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.sharding import spec_of
from megatron_core.planner.layout import Layout
from megatron_core.verify.bounds import Bounds, beyond, relative_errors
from megatron_core.verify.ranks import RankFailure, run_ranks
from megatron_core.verify.trace import RankTrace, Trace, assemble

MakeModel = Callable[[], nn.Module]
LossFunction = Callable[[Any, Any], Tensor]
Copies = dict[str, np.ndarray]
RATE = 0.05
"""Learning rate of SGD, whose updates do not amplify rounding errors."""
SAME = 1e-6
"""Relative error up to which a wrong gradient counts as a multiple of the right one."""


@dataclass(frozen=True)
class ModuleReport:
    """The comparison of a layout with one process."""

    layout: str
    errors: dict[str, float]
    """Relative errors of ``loss0``, ``norm0``, ``grad0.NAME``, ..., ``weight.NAME``."""
    faults: list[str]
    """One sentence for each quantity beyond its bound, earliest step first, with the likely reason of a gradient."""

    @property
    def agrees(self) -> bool:
        """Whether the layout computes the same as one process."""
        return not self.faults


def verify_module(
    make_model: MakeModel,
    batches: Sequence[Any],
    *,
    world_size: int = 2,
    layout: str | None = None,
    plan: Mapping[str, str] | None = None,
    heads: Heads | None = None,
    loss: LossFunction | None = None,
    timeout: float = 120.0,
) -> ModuleReport:
    """Train ``make_model()`` on ``world_size`` forked ranks and in one process, and compare every gradient and weight.

    ``batches``: one global batch (a tensor, tuple or dict of tensors with samples in dim 0) for each step; its loss is
    a mean of equally weighted samples. ``layout``: words such as ``"tp2 dp2 zero1"``, by default tensor parallelism
    over all ranks. ``plan`` and ``heads``: see ``megatron_core.parallelize``. ``loss(output, batch)`` returns the
    loss, by default that of the output. Modules are in evaluation mode, without dropout, and compute in float64.

    Errors: ``ConfigError`` for other arguments of wrong types, and without batches; ``LayoutError`` for a layout that
    does not fit the ranks or the batches.
    """
    check_functions(loss=loss)
    check_positive(world_size=world_size)
    if not callable(make_model):
        raise ConfigError(f"make_model={make_model!r} must be a function that returns the model")
    if not isinstance(batches, Sequence) or isinstance(batches, str) or not batches:
        raise ConfigError("batches must be a list with one batch or more, one for each step; nothing would be compared")
    if not isinstance(layout, str | None):
        raise LayoutError(f"layout={layout!r} must be a text such as 'tp2 dp2'")
    parsed = Layout.parse(layout or f"tp{world_size}")
    if parsed.world_size != world_size or parsed.world_size != parsed.tp * parsed.dp:
        raise LayoutError(
            f"layout={str(parsed)!r} must have tensor and data parallelism over world_size={world_size} ranks"
        )
    for batch in batches:
        if _count(batch) % parsed.dp:
            raise LayoutError(f"batches: {_count(batch)} samples cannot be split over dp={parsed.dp}; change the batch")
    baseline = _train_alone(make_model, batches, loss)
    try:
        results = run_ranks(world_size, _train, make_model, batches, parsed, plan, heads, loss, timeout=timeout)
    except RankFailure as error:
        return ModuleReport(str(parsed), {}, [f"the split module fails: {str(error).strip().splitlines()[-1]}"])
    trace = assemble([trace_of_rank for trace_of_rank, _ in results])
    errors = relative_errors(trace, baseline)
    faults = list(trace.faults)
    for sentence in beyond(errors, Bounds("float64")):
        faults.append(sentence + _reason(sentence.split(" ")[0], trace, baseline, [c for _, c in results], parsed.tp))
    return ModuleReport(str(parsed), errors, faults)


def _reason(name: str, trace: Trace, baseline: Trace, copies: Sequence[Copies], size: int) -> str:
    """The likely reason for a wrong gradient, or an empty text."""
    if not name.startswith("grad") or name not in trace.tensors or not baseline.tensors[name].any():
        return ""
    expected = baseline.tensors[name]
    values = trace.tensors[name]
    copies_of_name = [gradients[name] for gradients in copies if name in gradients]
    if len(copies_of_name) == size and _equal(np.sum(copies_of_name, axis=0), expected):
        return f": {PARTIAL}"
    factor = float(np.vdot(expected, values) / np.vdot(expected, expected))
    if values.shape != expected.shape or not _equal(values, factor * expected):
        return ""
    if abs(factor - size) < SAME:
        return f": it is {size} times the right value, so that one sum over the tensor-parallel ranks is too many"
    if abs(factor * size - 1) < SAME:
        return f": it is 1/{size} of the right value, so that a sum over the tensor-parallel ranks is missing"
    return f": it is {factor:.4g} times the right value"


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= SAME * max(np.abs(b).max(), 1e-300))


def _make(make_model: MakeModel) -> nn.Module:
    torch.manual_seed(0)
    return make_model().double().eval()


def _train(
    make_model: MakeModel,
    batches: Sequence[Any],
    layout: Layout,
    plan: Mapping[str, str] | None,
    heads: Heads | None,
    loss: LossFunction | None,
) -> tuple[RankTrace, Copies]:
    """One rank's training: its trace, and its gradients of whole parameters in the first step at ZeRO 0."""
    model = _make(make_model)
    if plan is not None or heads is not None:
        megatron_core.parallelize(model, layout.tp, plan=plan, heads=heads)
    size = _count(batches[0])
    config = {**layout.settings(), "fp64": True, "clip_grad": 0.0, "global_batch_size": size}
    config |= {"micro_batch_size": size // layout.dp}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = megatron_core.initialize(model, config, optimizer).engine
    trace = RankTrace()
    copies = Copies()
    index = engine.groups.index("dp")
    first = engine.groups.index("dp") == 0 and not layout.zero_stage
    for step, batch in enumerate(batches):

        def add(step: int = step) -> None:
            trace.add_gradients(engine.data_parallel, step)
            if step == 0 and first:
                copies.update(_whole_gradients(engine))

        engine.before_update = add
        local_batch = _each(batch, lambda tensor: tensor.chunk(layout.dp)[index])
        engine.backward(_loss(engine, local_batch, loss))
        report = engine.step()
        assert report is not None, "a batch is one micro-batch on each rank"
        trace.losses.append(report.loss)
        trace.norms.append(report.grad_norm)
    trace.add_weights(engine.data_parallel, [engine.module])
    return trace, copies


def _whole_gradients(engine: Engine) -> Copies:
    named: list[tuple[str, Any]] = list(engine.module.named_parameters())
    named = [(name, p) for name, p in named if p.requires_grad and not spec_of(p).splits]
    return {f"grad0.{name}": _array(parameter.main_grad) for name, parameter in named}


def _train_alone(make_model: MakeModel, batches: Sequence[Any], loss: LossFunction | None) -> Trace:
    """The same training with torch alone."""
    model = _make(make_model)
    trained: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    trace = Trace([], [], {}, [])
    for step, batch in enumerate(batches):
        value = _loss(model, batch, loss)
        value.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
        trace.losses.append(value.item())
        trace.norms.append(float(torch.stack([grad.norm() for grad in grads.values()]).norm()))
        trace.tensors.update({f"grad{step}.{name}": _array(grad) for name, grad in grads.items()})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter -= RATE * grads[name]
                parameter.grad = None
    named = model.named_parameters()
    trace.tensors.update({f"weight.{name}": _array(p) for name, p in named})
    return trace


def _loss(model: nn.Module, batch: Any, loss: LossFunction | None) -> Tensor:
    batch = _each(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    with WithoutFloat32():
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        return loss_of(output) if loss is None else loss(output, batch)


def _each(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Mapping):
        return {name: function(tensor) for name, tensor in batch.items()}
    return tuple(map(function, batch)) if isinstance(batch, tuple | list) else function(batch)


def _count(batch: Any) -> int:
    """Number of samples of a batch."""
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
    return len(first[0] if isinstance(first, tuple | list) else first)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64, copy=True).numpy()


class WithoutFloat32(TorchFunctionMode):
    """Replace float32 by float64 in calls of torch: ``x.float()``, ``x.to(torch.float32)``, ``dtype=torch.float32``.

    Norms and routers of transformers models compute in float32; the rounding would hide small errors of a layout.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with float64 in place of float32."""
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args, **named)
        if func is torch.Tensor.backward and named.get("gradient") is None and not named.get("inputs"):
            # torch suspends modes while it handles this call; activations that are recomputed in it need this one.
            with self:
                retain = bool(named.get("retain_graph"))
                create = bool(named.get("create_graph"))
                run_backward = torch.autograd.Variable._execution_engine.run_backward
                return run_backward(
                    args, (torch.ones_like(args[0]),), retain, create, (), allow_unreachable=True, accumulate_grad=True
                )
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
