"""One executor for every plan: it does what this rank's list of actions says."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_core.errors import LayoutError
from megatron_core.parallel.meter import METER
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.pipeline_parallel.weight_grad import WeightGradQueue
from megatron_core.schedules.actions import Action, Plan

ForwardStep = Callable[[int, int, "Tensor | None"], Tensor]

PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""What the time of an action is charged to; what lies between actions is waiting for other stages: ``pipeline``."""


@dataclass(frozen=True)
class MessageFormat:
    """Shape, dtype and device of what travels between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    lengths: Mapping[int, int] = field(default_factory=dict)
    """First dimension of the micro-batches in which it differs from that of ``shape``."""
    variable: bool = False
    """Shapes are not known beforehand: each message brings its own, and its receive is posted when it is needed."""

    def shape_of(self, micro: int) -> tuple[int, ...]:
        """Shape of a micro-batch's messages."""
        return (self.lengths.get(micro, self.shape[0]), *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True)
class Listener:
    """Functions that an executor calls as it goes."""

    on_last_backward: Callable[[int], None] = lambda stage: None
    """Called with a stage before its last backward, if that is a whole one."""
    on_last_weights: Callable[[int], None] = lambda stage: None
    """Called with a stage after its last weight gradients, if its last backward is a split one."""
    on_begin: Callable[[Action], None] = lambda action: None
    """Called before each action, once its input is there."""
    on_end: Callable[[Action], None] = lambda action: None
    """Called after each action, before its output is sent."""


class Executor:
    """Runs one step of a plan on one pipeline rank; make one for each step.

    ``forward(stage, micro, input)`` computes a stage; ``input`` is None on the first one, and the last one returns a
    scalar whose gradient is wanted. Receives from a rank are posted in the order in which its plan sends, whatever
    order they are needed in, so that messages cannot be taken for one another. A stage's output is freed as soon as it
    is sent; backward starts from its edge in autograd's graph. ``parameters`` are those of this rank's stages: the
    gradients of those in parallel linear layers are what a split backward defers from I to W. Without ``overlap`` each
    send is waited for before the next action, with it at the end of the step.
    """

    def __init__(
        self,
        plan: Plan,
        links: Links,
        message: MessageFormat,
        forward: ForwardStep,
        *,
        parameters: Iterable[nn.Parameter] = (),
        overlap: bool = True,
        listener: Listener = Listener(),
    ) -> None:
        self.plan, self.links, self.message, self.forward = plan, links, message, forward
        self.overlap, self.listener = overlap, listener
        # With overlap any number is safe; 1 hides a message behind an action.
        self._receive_lookahead = 1 if overlap else plan.receive_lookahead
        if message.variable and not overlap:
            raise LayoutError(
                "overlap_p2p_communication=False waits for every send, and messages of variable length are received "
                "only when they are needed: the ranks could lock. Turn it on, or give the lengths of all micro-batches"
            )
        self.actions = plan.ranks[links.index]
        self._last_gradients = {a.stage: a for a in self.actions if a.kind in "BW"}
        self._keep_graph = bool(self._last_gradients)
        self._parameters = list(parameters) if any(a.kind == "W" for a in self.actions) else []
        self._queue = WeightGradQueue()
        senders = set(plan.stage_to_rank) - {links.index}
        self._unposted = {sender: deque(plan.messages(sender, links.index)) for sender in senders}
        self._arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Action, Tensor] = {}
        self._inputs: dict[Action, Tensor | None] = {}
        self._outputs: dict[Action, GradientEdge | None] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def run(self) -> dict[int, Tensor]:
        """Run all actions; the last stage's outputs by micro-batch (empty on ranks without it)."""
        results: dict[int, Tensor] = {}
        with METER.phase("pipeline"), self._queue.attached(self._parameters):
            for at, action in enumerate(self.actions):
                if not self.message.variable:
                    for coming in self.actions[at : at + 1 + self._receive_lookahead]:
                        self._post_receives(coming)
                output = self._run_action(action)
                if output is not None and self.plan.consumer(action) is None:
                    results[action.micro] = output
                elif output is not None:
                    self._send_output(action, output)
                self._release_sends(wait=not self.overlap)
            self._release_sends(wait=True)
        return results

    def _run_action(self, action: Action) -> Tensor | None:
        """Do what ``action`` says; what another stage needs of it, or on the last stage the loss."""
        received = self._take_input(action)
        output = None
        METER.switch(PHASES[action.kind], action)
        self.listener.on_begin(action)
        if action.kind == "F":
            output = self._run_forward(action, received)
        elif action.kind == "W":
            self._run_weights(action)
        else:
            output = self._run_backward(action, received)
        self.listener.on_end(action)
        METER.switch("pipeline")
        return output

    def _run_forward(self, action: Action, received: Tensor | None) -> Tensor:
        if received is not None and self._keep_graph:
            received.requires_grad_()
        with torch.set_grad_enabled(self._keep_graph):
            output = self.forward(action.stage, action.micro, received)
        if self._keep_graph:
            self._inputs[action] = received
            self._outputs[action] = get_gradient_edge(output) if output.requires_grad else None
        return output.detach()

    def _run_backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """A whole backward, or for an I only as much as the stage before waits for."""
        if action.kind == "I":
            with self._queue.collecting(action.stage, action.micro):
                return self._backward(action, gradient)
        if self._last_gradients[action.stage] == action:
            self.listener.on_last_backward(action.stage)
        return self._backward(action, gradient)

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        forward = Action(action.stage, "F", action.micro)
        edge, received = self._outputs.pop(forward), self._inputs.pop(forward)
        if edge is not None:  # None: nothing that leads to this output is trained
            torch.autograd.backward(edge, gradient)  # the last stage's loss needs no gradient: it is a scalar
        if received is None:
            return None
        return received.grad if received.grad is not None else torch.zeros_like(received)

    def _run_weights(self, action: Action) -> None:
        self._queue.run(action.stage, action.micro)
        if self._last_gradients[action.stage] == action:
            self.listener.on_last_weights(action.stage)

    def _post_receives(self, action: Action) -> None:
        """Post the receives of what ``action`` needs and of all that its sender sends before, in the sender's order."""
        source, sender = self.plan.source(action), self.plan.sender(action)
        if source is None or sender is None:
            return
        while source not in self._arriving and self._unposted[sender]:
            coming = self._unposted[sender].popleft()
            self._arriving[coming] = self._receive(coming, sender)

    def _receive(self, coming: Action, sender: int) -> tuple[Tensor, dist.Work]:
        message = self.message
        if message.variable:
            return self.links.receive_with_shape(len(message.shape), message.dtype, message.device, sender)
        return self.links.receive(message.shape_of(coming.micro), message.dtype, message.device, sender)

    def _take_input(self, action: Action) -> Tensor | None:
        """What another stage, here or on another rank, has produced for ``action``; None if it needs no such thing."""
        source = self.plan.source(action)
        if source is None or source.stage == action.stage:
            return None
        if source in self._here:
            return self._here.pop(source)
        self._post_receives(action)  # variable messages have not been posted yet
        tensor, handle = self._arriving.pop(source)
        handle.wait()
        return tensor

    def _send_output(self, action: Action, tensor: Tensor) -> None:
        """Give the output of ``action`` to the stage that consumes it."""
        receiver = self.plan.receiver(action)
        if receiver is None:
            self._here[action] = tensor
            return
        self._check_format(action, tensor)
        tensor = tensor.contiguous()
        if self.message.variable:
            self._sent += [(tensor, handle) for handle in self.links.send_with_shape(tensor, receiver)]
        else:
            self._sent.append((tensor, self.links.send(tensor, receiver)))

    def _release_sends(self, *, wait: bool) -> None:
        """Free the messages that have been sent; with ``wait`` wait for all of them first."""
        for _, handle in self._sent if wait else ():
            handle.wait()
        self._sent = [] if wait else [(tensor, handle) for tensor, handle in self._sent if not handle.is_completed()]

    def _check_format(self, action: Action, tensor: Tensor) -> None:
        """The receiver's buffer is made before the message comes; a shorter one would fill a part of it, silently."""
        shape = tuple(tensor.shape) if self.message.variable else self.message.shape_of(action.micro)
        if tuple(tensor.shape) != shape or tensor.dtype != self.message.dtype:
            raise LayoutError(
                f"{action} gives {list(tensor.shape)} in {tensor.dtype}, but its message to the next pipeline stage is "
                f"{list(shape)} in {self.message.dtype}; give every micro-batch the same seq_length and "
                "micro_batch_size, or give the lengths of those that differ"
            )
