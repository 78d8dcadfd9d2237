"""CUDA graphs of layers: the kernels of a layer are launched by one call, forward and backward.

A layer has a pair of graphs for each micro-batch in flight on its stage, because a graph reads and writes fixed
memory: its inputs, its output, the tensors saved for backward, and their gradients. A micro-batch takes the lowest free
``Slot`` when it enters the stage's first graph, and returns it after the backward of that graph; schedules with few
micro-batches in flight therefore need few graphs. The graphs of a slot share a pool of memory, because they are
replayed in the order of their capture: memory that must outlive a replay is referenced from here, the rest is reused by
the next replay. Slots have separate pools: in a common one, tensors that a micro-batch saves for backward could be in
memory of temporaries of another slot's graph, which is replayed in between.

Layers run without graphs in the first step: they choose kernels, allocate their workspaces and connect the ranks, and
the calls of one micro-batch are recorded. All graphs are captured after that step, as Megatron Core does, because
a capture waits for the whole device: during a schedule this includes receives that are posted ahead, and two neighbours
that capture would wait for each other. The order of calls within a slot does not depend on the schedule: all forwards,
then all backwards in reverse.

Gradients of weights are added to ``main_grad`` inside of the graph. Dropout needs no generator, since its masks are
functions of positions, which are inputs. Collectives of tensor and context parallelism are part of the graphs; the
ranks of a group capture and replay in the same order, because they run the same micro-batches. Evaluation, generation
and micro-batches of other shapes never use graphs.
Source: Megatron Core's ``CudaGraphManager`` for one graph per layer and micro-batch, ``create_cudagraphs`` for the time
of the captures.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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

    def __init__(self, context: SequenceContext) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        """The memory pool of all graphs of the slot."""
        self.context = _copied(context)
        """The context that graphs read."""
        self.first: CallGraph | None = None
        """The graph that the micro-batch entered first; its backward is the last one."""

    def load(self, context: SequenceContext) -> None:
        """Copy the tensors of a micro-batch into the memory that graphs read."""
        self.first = None
        for name, value in _tensors(context).items():
            for mine, theirs in zip(_each(getattr(self.context, name)), _each(value), strict=True):
                mine.copy_(theirs)


@dataclass(frozen=True)
class CapturedCall:
    """A call of a layer's function by the recorded micro-batch."""

    function: "GraphedFunction"
    inputs: Sequence[int | tuple[torch.Size, torch.dtype]]
    """For each input the number of the call whose output it is, or else its shape and dtype."""


class StageGraphs:
    """The slots of a stage, and the calls of which each slot has graphs."""

    def __init__(self, warmups: int) -> None:
        self._warmups = warmups
        self._micro_batches = 0
        self._calls: list[CapturedCall] = []
        self._outputs: list[Tensor] = []
        """Outputs of the calls of the micro-batch that is being recorded."""
        self._example: SequenceContext | None = None
        self._recorded: SequenceContext | None = None
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._current: SequenceContext | None = None
        self._slot: Slot | None = None
        """The slot of the current micro-batch."""
        self._in_flight = 0
        self._most_in_flight = 0

    def slot_of(self, context: SequenceContext) -> Slot | None:
        """The slot of a micro-batch, taken at its first call; None if it runs without graphs."""
        if self._current is context:
            return self._slot
        self._current = context
        self._slot = None
        self._outputs.clear()
        if self._example is None:
            self._example = _copied(context)
            self._recorded = context
        if _shapes(self._example) == _shapes(context):
            self._micro_batches += 1
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
            # The first slots first: schedules with fewer micro-batches in flight touch less memory.
            self._slot = self._free.pop(0) if self._free else None
        if self._slot is not None:
            self._slot.load(context)
        return self._slot

    def record(self, function: "GraphedFunction", inputs: Sequence[Tensor], output: Tensor) -> None:
        """Note a call without graph of the current micro-batch."""
        is_first = not self._outputs
        if is_first and output.requires_grad and _shapes(cast(Any, self._example)) == _shapes(cast(Any, self._current)):
            output.register_hook(lambda grad: self._leave())
        if self._current is self._recorded:
            addresses = [earlier.data_ptr() for earlier in self._outputs]
            sources = [
                addresses.index(x.data_ptr()) if x.data_ptr() in addresses else (x.shape, x.dtype) for x in inputs
            ]
            self._calls.append(CapturedCall(function, sources))
            self._outputs.append(output.detach())
        elif is_first:
            self._outputs.append(output.detach())

    def release(self, slot: Slot) -> None:
        """Make a slot available again after the backward of its micro-batch."""
        self._in_flight -= 1
        self._free.append(slot)
        self._free.sort(key=self._slots.index)

    def end_step(self) -> bool:
        """End the step's recording; return whether a micro-batch of the next step would need a new slot."""
        self._current = self._recorded = self._slot = None
        self._outputs.clear()
        self._in_flight = 0
        self._free = list(self._slots)
        return self._micro_batches >= self._warmups and len(self._slots) < self._most_in_flight

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture the graphs of the slots that were missing in the last step."""
        assert self._example is not None, "a micro-batch was in flight"
        while len(self._slots) < self._most_in_flight:
            slot = Slot(self._example)
            graphs: list[CallGraph] = []
            for call in self._calls:
                inputs = [graphs[source].output if isinstance(source, int) else source for source in call.inputs]
                graphs.append(CallGraph(call.function, inputs, slot, self, stream))
                call.function.graphs[slot] = graphs[-1]
            for graph in reversed(graphs):
                graph.capture_backward(stream)
            self._slots.append(slot)
        self._free = list(self._slots)

    def _leave(self) -> None:
        self._in_flight -= 1


class _Graph:
    """A CUDA graph, and the messages to other ranks that each of its replays sends."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._sent: list[tuple[str, float]] = []
        self._calls: list[Note] = []

    @contextmanager
    def captured(self, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture the enclosed code."""
        # Not torch.cuda.graph, which waits for the device and empties the cache for each graph: ``capture_stages`` does
        # so once for all of them.
        with METER.capturing() as self._sent, RECORDER.capturing() as self._calls, torch.cuda.stream(stream):
            # Other threads may call CUDA: NCCL's watchdog, and copies of offloading.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        """Run the captured code."""
        RECORDER.repeat(self._calls)
        for name, size in self._sent:
            METER.sent(name, size)
        self._graph.replay()


class CallGraph:
    """The forward graph and the backward graph of one function in one slot."""

    def __init__(
        self,
        function: "GraphedFunction",
        inputs: Sequence[Tensor | tuple[torch.Size, torch.dtype]],
        slot: Slot,
        stage: StageGraphs,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture the forward for ``inputs``: outputs of other graphs of the slot, or shapes and dtypes."""
        self._parameters = function.parameters()
        self.slot = slot
        self._stage = stage
        self.reads_in_place = [isinstance(x, Tensor) for x in inputs]
        device = self._parameters[0].device
        memory = [x.detach() if isinstance(x, Tensor) else torch.zeros(x[0], dtype=x[1], device=device) for x in inputs]
        self._inputs = [x.requires_grad_() for x in memory]
        self._forward = _Graph()
        self._backward = _Graph()
        with torch.enable_grad(), self._forward.captured(slot.pool, stream):
            self.output = function.eager(*self._inputs, slot.context)
        self._grad_output = torch.zeros_like(self.output)
        self._grad_inputs: tuple[Tensor | None, ...] = ()

    def run_forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the output for ``inputs``; it is valid until the slot's next micro-batch."""
        for mine, theirs in zip(self._inputs, inputs, strict=True):
            _load(mine, theirs)
        self._forward.replay()
        return self.output.detach()

    def run_backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradients of the parameters to ``main_grad``, and return those of the inputs."""
        _load(self._grad_output, grad)
        self._backward.replay()
        # The gradient of a stage's input is sent while the slot's next backward may run already.
        return tuple(
            grad if grad is None or in_place else grad.clone()
            for grad, in_place in zip(self._grad_inputs, self.reads_in_place, strict=True)
        )

    def capture_backward(self, stream: torch.cuda.Stream) -> None:
        """Capture the backward; call it after the backwards of all later graphs of the slot."""
        with self._backward.captured(self.slot.pool, stream):
            # The saved tensors stay in memory: the next replays of the forward write them.
            gradients = torch.autograd.grad(
                self.output,
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
    """A function of a layer, with a pair of graphs per slot after the first step."""

    def __init__(
        self, function: Callable[..., Tensor], modules: Iterable[nn.Module | None], stage: StageGraphs
    ) -> None:
        self.eager = function
        self.stage = stage
        self._modules = [module for module in modules if module is not None]
        self.graphs: dict[Slot, CallGraph] = {}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the function that are trained."""
        return [p for module in self._modules for p in module.parameters() if p.requires_grad]

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the function; the last of ``arguments`` is the ``SequenceContext``, the others are tensors."""
        *inputs, context = arguments
        if not torch.is_grad_enabled() or context.cache is not None or not self._modules[0].training:
            return self.eager(*arguments)
        slot = self.stage.slot_of(context)
        if slot is None:
            output = self.eager(*arguments)
            self.stage.record(self, inputs, output)
            return output
        graph = self.graphs[slot]
        slot.first = slot.first or graph
        return _Replay.apply(graph, len(inputs), *inputs, *self.parameters())


def capture_stages(stages: Iterable[StageGraphs]) -> None:
    """Capture the graphs that the micro-batches of the last step lacked; waits for the device once if there are any.

    Call it between steps, when no message is in flight.
    """
    incomplete = [stage for stage in stages if stage.end_step()]
    if not incomplete:
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # graphs have pools of their own, which cannot use cached memory of others
    stream = torch.cuda.Stream()
    for stage in incomplete:
        stage.capture(stream)


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
    stage = StageGraphs(warmups)
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
            graphed.forward = GraphedFunction(layer.forward, [layer], stage)
        if "attn" in modules:
            graphed.attend = GraphedFunction(layer.attend, attention, stage)
        if "mlp" in modules and dense:
            graphed.feed_forward = GraphedFunction(layer.feed_forward, feed_forward, stage)
    return eager


def _load(mine: Tensor, theirs: Tensor) -> None:
    if mine.data_ptr() != theirs.data_ptr():
        mine.data.copy_(theirs)  # not a change for autograd: the graph of the backward reads the new values


def _each(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _copied(context: SequenceContext) -> SequenceContext:
    copies: dict[str, Any] = {
        name: tuple(tensor.clone() for tensor in value) if isinstance(value, tuple) else value.clone()
        for name, value in _tensors(context).items()
    }
    return SequenceContext(**copies)


def _tensors(context: SequenceContext) -> dict[str, Any]:
    """The fields of a context that are tensors, or tuples of them."""
    values = {entry.name: getattr(context, entry.name) for entry in fields(context)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor | tuple)}


def _shapes(context: SequenceContext) -> dict[str, list[torch.Size]]:
    return {name: [tensor.shape for tensor in _each(value)] for name, value in _tensors(context).items()}
