"""CUDA graphs of layers: the kernels of a layer are launched by one call, forward and backward.

A layer has a pair of graphs for each micro-batch in flight on its stage, because a graph reads and writes fixed
memory: its inputs, its output, the tensors saved for backward, and their gradients. A micro-batch takes the lowest free
``Slot`` when it enters the stage's first graph, and returns it after the backward of that graph; schedules with few
micro-batches in flight therefore need few graphs. The graphs of a slot share a pool of memory, because they are
replayed in the order of their capture: memory that must outlive a replay is referenced from here, the rest is reused by
the next replay. Slots have separate pools: in a common one, tensors that a micro-batch saves for backward could be in
memory of temporaries of another slot's graph, which is replayed in between.

Gradients of weights are added to ``main_grad`` inside of the graph. Dropout needs no generator, since its masks are
functions of positions, which are inputs. Collectives of tensor and context parallelism are part of the graphs; the
ranks of a group capture and replay in the same order, because they run the same micro-batches. The first calls of a
layer run without graph: they choose kernels, allocate their workspaces and connect the ranks. Evaluation, generation
and micro-batches of other shapes never use graphs.
Source: Megatron Core's ``CudaGraphManager`` for one graph per layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.cuda_graphs.settings import GraphConfig
from megatron_core.parallel.flight_recorder import RECORDER, Note
from megatron_core.parallel.meter import METER
from megatron_core.tensor_parallel.linear import main_grad_of
from megatron_core.transformer.block import TransformerBlock, TransformerLayer
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.transformer.mlp import MLP

EAGER = "layers with experts run without CUDA graphs; --cuda-graph-modules attn captures their attention"


class Slot:
    """One of the micro-batches in flight on a stage: the memory of its ``SequenceContext`` and of its graphs."""

    def __init__(self, number: int, context: SequenceContext) -> None:
        self.number = number
        self.pool: Any = torch.cuda.graph_pool_handle()
        """The memory pool of all graphs of the slot."""
        copies: dict[str, Any] = {name: _copy(value) for name, value in _tensors(context).items()}
        self.context = SequenceContext(**copies)
        """The context that graphs read."""
        self.source = context
        self.first: CallGraph | None = None
        """The graph that the micro-batch entered first; its backward is the last one."""

    def fits(self, context: SequenceContext) -> bool:
        """Whether the tensors of ``context`` have the shapes of this slot."""
        return _shapes(self.context) == _shapes(context)

    def load(self, context: SequenceContext) -> None:
        """Copy the tensors of a micro-batch into the memory that graphs read."""
        self.source = context
        self.first = None
        for name, value in _tensors(context).items():
            for mine, theirs in zip(_each(getattr(self.context, name)), _each(value), strict=True):
                mine.copy_(theirs)


class StageGraphs:
    """The slots of a stage."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._current: Slot | None = None
        self.outputs: set[int] = set()
        """Addresses of the outputs of forward graphs, which the next graph of the same slot reads in place."""

    def slot_of(self, context: SequenceContext) -> Slot | None:
        """The slot of a micro-batch, taken at its first call; None if its tensors have other shapes."""
        if self._current is not None and self._current.source is context:
            return self._current
        if self._slots and not self._slots[0].fits(context):
            return None
        if self._free:
            self._current = self._free.pop(0)
            self._current.load(context)
        else:
            self._current = Slot(len(self._slots), context)
            self._slots.append(self._current)
        return self._current

    def release(self, slot: Slot) -> None:
        """Make a slot available again after the backward of its micro-batch."""
        self._free.append(slot)
        self._free.sort(key=lambda free: free.number)


class _Graph:
    """A CUDA graph, and the messages to other ranks that each of its replays sends."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._sent: list[tuple[str, float]] = []
        self._calls: list[Note] = []

    @contextmanager
    def captured(self, pool: Any) -> Iterator[None]:
        """Capture the enclosed code."""
        # Other threads may call CUDA: NCCL's watchdog, and copies of offloading.
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with METER.capturing() as self._sent, RECORDER.capturing() as self._calls, graph:
            yield

    def replay(self) -> None:
        """Run the captured code."""
        RECORDER.repeat(self._calls)
        for name, size in self._sent:
            METER.sent(name, size)
        self._graph.replay()


class CallGraph:
    """The forward graph and the backward graph of one function in one slot."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter],
        slot: Slot, stage: StageGraphs,
    ) -> None:  # fmt: skip
        """Capture the forward for inputs of these shapes; nothing is computed yet."""
        self._parameters = parameters
        self.slot = slot
        self._stage = stage
        self.reads_in_place = [x.data_ptr() in stage.outputs for x in inputs]
        self._inputs = [
            (x.detach() if in_place else x.detach().clone()).requires_grad_()
            for x, in_place in zip(inputs, self.reads_in_place, strict=True)
        ]
        self._forward = _Graph()
        self._backward = _Graph()
        with torch.enable_grad(), self._forward.captured(slot.pool):
            self._output = function(*self._inputs, slot.context)
        stage.outputs.add(self._output.data_ptr())
        self._grad_output: Tensor | None = None
        self._grad_inputs: tuple[Tensor | None, ...] = ()

    def run_forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the output for ``inputs``; it is valid until the slot's next micro-batch."""
        for mine, theirs in zip(self._inputs, inputs, strict=True):
            _load(mine, theirs)
        self._forward.replay()
        return self._output.detach()

    def run_backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradients of the parameters to ``main_grad``, and return those of the inputs."""
        if self._grad_output is None:
            self._grad_output = grad.clone()
            self._capture_backward()
        _load(self._grad_output, grad)
        self._backward.replay()
        # The gradient of a stage's input is sent while the slot's next backward may run already.
        return tuple(
            grad if grad is None or in_place else grad.clone()
            for grad, in_place in zip(self._grad_inputs, self.reads_in_place, strict=True)
        )

    def _capture_backward(self) -> None:
        with self._backward.captured(self.slot.pool):
            # The saved tensors stay in memory: the next replays of the forward write them.
            gradients = torch.autograd.grad(
                self._output,
                [*self._inputs, *self._parameters],
                self._grad_output,
                retain_graph=True,
                allow_unused=True,
            )
            for parameter, grad in zip(self._parameters, gradients[len(self._inputs) :], strict=True):
                if grad is not None:  # linear layers have added theirs
                    total = main_grad_of(parameter)
                    assert total is not None, "graphs are captured under DataParallel"
                    total.add_(grad)
            self._grad_inputs = gradients[: len(self._inputs)]

    def end_backward(self) -> None:
        """Return the slot if no earlier graph of the micro-batch is left."""
        if self.slot.first is self:
            self._stage.release(self.slot)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: CallGraph, count: int, *tensors: Tensor) -> Tensor:
        ctx.graph = graph
        ctx.others = len(tensors) - count
        return graph.run_forward(tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.graph.run_backward(*grads)
        ctx.graph.end_backward()
        # None for the parameters: the hooks of DataParallel run all the same, and find nothing to add.
        return None, None, *gradients, *[None] * ctx.others


class GraphedFunction:
    """A function of a layer with a pair of graphs per slot, after ``warmups`` calls without graph."""

    def __init__(
        self, function: Callable[..., Tensor], modules: Iterable[nn.Module | None], stage: StageGraphs, warmups: int
    ) -> None:
        self._eager = function
        self._stage = stage
        self._warmups = warmups
        self._modules = [module for module in modules if module is not None]
        self._graphs: dict[int, CallGraph] = {}
        self._calls = 0

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the function; the last of ``arguments`` is the ``SequenceContext``, the others are tensors."""
        *inputs, context = arguments
        if not torch.is_grad_enabled() or context.cache is not None or not self._modules[0].training:
            return self._eager(*arguments)
        self._calls += 1
        slot = self._stage.slot_of(context) if self._calls > self._warmups else None
        if slot is None:
            return self._eager(*arguments)
        parameters = [p for module in self._modules for p in module.parameters() if p.requires_grad]
        graph = self._graphs.get(slot.number)
        if graph is None:
            graph = self._graphs[slot.number] = CallGraph(self._eager, inputs, parameters, slot, self._stage)
        slot.first = slot.first or graph
        output: Tensor = _Replay.apply(graph, len(inputs), *inputs, *parameters)
        return output


def convert_layers(config: RunConfig, block: TransformerBlock, device: torch.device) -> str:
    """Capture the layers of a stage; see ``Feature.convert_layers``.

    Errors: ``ConfigError`` if the run is not on a GPU.
    """
    settings = config.section(GraphConfig)
    if device.type != "cuda":
        raise ConfigError(
            f"cuda_graph_impl={settings.cuda_graph_impl} needs a GPU, and this run is on {device.type}; remove "
            "--cuda-graph-impl"
        )
    eager = graph_layers(block.layers, settings.cuda_graph_modules, settings.cuda_graph_warmup_steps)
    return f"cuda_graphs: {eager}" if eager else ""


def graph_layers(layers: Iterable[TransformerLayer], modules: Sequence[str], warmups: int) -> str:
    """Run the layers of a stage, or their ``modules`` (attn, mlp), by CUDA graphs; return what stays eager, or "".

    Call it before ``DataParallel``, which does not attach hooks inside of layers with graphs then.
    """
    stage = StageGraphs()
    eager = ""
    for layer in layers:
        graphed = cast(Any, layer)
        dense = isinstance(layer.mlp, MLP)
        attention = layer.input_layernorm, layer.self_attention, layer.post_self_attn_layernorm
        feed_forward = layer.pre_mlp_layernorm, layer.mlp, layer.post_mlp_layernorm
        if not dense and "attn" not in modules:
            eager = EAGER
            continue
        graphed.has_graphs = True
        for core in (module for module in layer.modules() if isinstance(module, CoreAttention)):
            core.flex = "never"  # it copies a mask to the device
        if not modules:
            graphed.forward = GraphedFunction(layer.forward, [layer], stage, warmups)
        if "attn" in modules:
            graphed.attend = GraphedFunction(layer.attend, attention, stage, warmups)
        if "mlp" in modules and dense:
            graphed.feed_forward = GraphedFunction(layer.feed_forward, feed_forward, stage, warmups)
    return eager


def _load(mine: Tensor, theirs: Tensor) -> None:
    if mine.data_ptr() != theirs.data_ptr():
        mine.data.copy_(theirs)  # not a change for autograd: the graph of the backward reads the new values


def _each(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _copy(value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in value) if isinstance(value, tuple) else value.clone()


def _tensors(context: SequenceContext) -> dict[str, Any]:
    """The fields of a context that are tensors, or tuples of them."""
    values = {entry.name: getattr(context, entry.name) for entry in fields(context)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor | tuple)}


def _shapes(context: SequenceContext) -> dict[str, list[torch.Size]]:
    return {name: [tensor.shape for tensor in _each(value)] for name, value in _tensors(context).items()}
