"""One executor for every plan: it runs this rank's list of actions."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_core.errors import LayoutError
from megatron_core.feature import features, load_hook
from megatron_core.parallel.meter import METER
from megatron_core.pipeline_parallel.messages import Message, Messages, tensors_of
from megatron_core.pipeline_parallel.p2p import MessageHandle, PipelineP2P
from megatron_core.schedules.actions import Action, Plan

ForwardStep = Callable[[int, int, Any], Message]
RunTurn = Callable[[tuple[Action, ...], tuple[Message | None, ...]], Sequence[Message | None]]
"""Runs a turn with the inputs of its actions; returns each one's output for another stage, or on the last the loss."""

PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""Phase of the meter for the time of each kind of action; time between actions (waiting) counts as ``pipeline``."""


@dataclass(frozen=True)
class Listener:
    """Callbacks of an executor."""

    on_last_backward: Callable[[int], None] = lambda stage: None
    """Called with a stage before its last backward, if that backward is not split."""
    on_last_weights: Callable[[int], None] = lambda stage: None
    """Called with a stage after its last weight gradients, if its last backward is split."""
    on_begin: Callable[[Action], None] = lambda action: None
    """Called before each action, after its input has arrived."""
    on_end: Callable[[Action], None] = lambda action: None
    """Called after each action, before its output is sent."""


# The plan is data, checked before it runs: the same code serves every schedule, and a schedule has no code of its own.
class Executor:
    """Runs one step of a plan on one pipeline rank; make one for each step.

    ``forward(stage, micro, input)`` computes a stage; ``input`` is None on the first stage, else a tensor, or several
    in a tuple. The last stage returns a scalar, from which backward starts. ``parameters`` are the parameters of this
    rank's stages, whose gradients a split backward defers. Without ``overlap`` the executor waits for each send before
    the next action, with ``overlap`` at the end of the step.
    """

    # Receives from a rank are posted in the order in which its plan sends, independently of the order of use, so that
    # messages cannot be confused: a message carries no number of its micro-batch.
    # A stage's output is freed as soon as it is sent: backward starts from its gradient edge in autograd's graph.
    # Turns of other kinds than F and B run in classes of features; outputs of a pair are sent after both actions.

    def __init__(
        self,
        plan: Plan,
        p2p: PipelineP2P,
        message: Messages,
        forward: ForwardStep,
        *,
        parameters: Iterable[nn.Parameter] = (),
        overlap: bool = True,
        listener: Listener = Listener(),
    ) -> None:
        self.plan = plan
        self.p2p = p2p
        self.message = message
        self.forward = forward
        self.listener = listener
        # In the first step on a GPU no receive is posted ahead: loading a kernel or allocating memory may wait for the
        # whole device. If two neighbours do so, each waits for a message that the other sends after its own wait.
        is_first_on_gpu = message.device.type == "cuda" and not p2p.has_run
        self.overlap = overlap or is_first_on_gpu
        # If sends are not waited for, any lookahead is safe; 1 overlaps a message with an action.
        lookahead = 1 if overlap else plan.receive_lookahead
        self._receive_lookahead = 0 if is_first_on_gpu else lookahead
        if message.posts_late and not overlap:
            raise LayoutError(
                "overlap_p2p_communication=False waits for every send, and messages of variable length are received "
                "only when they are needed: the ranks could deadlock. Turn it on, or give the lengths of "
                "all micro-batches"
            )
        self.turns = plan.turns[p2p.index]
        self.actions = plan.ranks[p2p.index]
        self.parameters = parameters
        # The last wins: gradients of a stage are complete after its last B or W.
        self._last_gradients = {a.stage: a for a in self.actions if a.kind in "BW"}
        self._keep_graph = bool(self._last_gradients)
        self._added_turns: dict[str, RunTurn] = {}
        senders = set(plan.stage_to_rank) - {p2p.index}
        self._unposted = {sender: deque(plan.messages(sender, p2p.index)) for sender in senders}
        self._arriving: dict[Action, tuple[Message, list[MessageHandle]]] = {}
        self._here: dict[Action, Message] = {}
        self._inputs: dict[Action, list[Tensor]] = {}
        self._outputs: dict[Action, list[GradientEdge]] = {}
        self._sent: list[tuple[Tensor, MessageHandle]] = []

    def run(self) -> dict[int, Tensor]:
        """Run all actions; return the last stage's outputs by micro-batch (empty on ranks without the last stage)."""
        results: dict[int, Tensor] = {}
        with METER.phase("pipeline"), ExitStack() as contexts, self._telling_failures() as remaining:
            self._add_turns(contexts)
            for position, turn in enumerate(self.turns):
                # In place: the context manager holds this list.
                remaining[:] = [action for later in self.turns[position:] for action in later]
                # Early: a message that arrives while this rank computes needs a buffer.
                if not self.message.posts_late:
                    for coming in self.turns[position : position + 1 + self._receive_lookahead]:
                        self._post_receives(*coming)
                for action, output in zip(turn, self._run_turn(turn), strict=True):
                    if output is not None and self.plan.consumer(action) is None:
                        (results[action.micro],) = tensors_of(output)
                    elif output is not None:
                        self._send_output(action, output)
                self._release_sends(wait=not self.overlap)
            self._release_sends(wait=True)
        self.p2p.has_run |= self._keep_graph
        return results

    def _add_turns(self, contexts: ExitStack) -> None:
        """Begin the contexts of the features that run turns of this plan."""
        in_plan = set(map(_kinds, self.turns)) - {"F", "B"}
        hooks = {kinds: hook for feature in features() for kinds, hook in feature.turns.items() if kinds in in_plan}
        runners = {hook: contexts.enter_context(load_hook(hook)(self)) for hook in set(hooks.values())}
        self._added_turns = {kinds: runners[hook] for kinds, hook in hooks.items()}

    @contextmanager
    def _telling_failures(self) -> Iterator[list[Action]]:
        """Tell a failure to the ranks that wait for outputs of the remaining actions, a list that the caller fills."""
        remaining: list[Action] = []
        try:
            yield remaining
        except Exception as error:
            receivers = [self.plan.receiver(action) for action in remaining]
            for receiver in {rank for rank in receivers if rank is not None}:
                # The others would wait for the time limit and report it instead of the reason.
                self._sent += self.message.send_failure(self.p2p, error, receiver)
            raise

    def _run_turn(self, turn: tuple[Action, ...]) -> Sequence[Message | None]:
        """Run the actions of a turn; return each one's output for another stage, or on the last the loss."""
        # All inputs: no action of a turn starts before the others can.
        received = tuple(self._take_input(action) for action in turn)
        # After the inputs have arrived: waiting for them is time of the pipeline and not of the action.
        METER.switch(PHASES[turn[0].kind], turn[0])
        for action in turn:
            self.listener.on_begin(action)
        run_added = self._added_turns.get(_kinds(turn))
        outputs = (self.run_action(turn[0], received[0]),) if run_added is None else run_added(turn, received)
        for action in turn:
            self.listener.on_end(action)
        METER.switch("pipeline")
        return outputs

    def run_action(self, action: Action, received: Message | None) -> Message | None:
        """Run an F or a B with the output of another stage; return the message to another stage, or the loss."""
        METER.switch(PHASES[action.kind], action)
        if action.kind == "F":
            return self._run_forward(action, received)
        if self.is_last(action):
            self.listener.on_last_backward(action.stage)
        return self.backward(action, received)

    def is_last(self, action: Action) -> bool:
        """Whether the gradients of a stage are complete after this B or W."""
        return self._last_gradients[action.stage] == action

    def _run_forward(self, action: Action, received: Message | None) -> Message:
        source = self.plan.source(action)
        inputs = [] if received is None or source is None else self.message.trained(source, received)
        # A plan of forwards alone, as in evaluation, keeps no graph.
        if self._keep_graph:
            for tensor in inputs:
                # A received tensor is a leaf here; its gradient is the message to the stage before.
                tensor.requires_grad_()
        with torch.set_grad_enabled(self._keep_graph):
            output = self.forward(action.stage, action.micro, received)
        is_sent = self.plan.consumer(action) is not None
        if is_sent:
            self.message.check(action, output)
        if self._keep_graph:
            trained = self.message.trained(action, output) if is_sent else tensors_of(output)
            self._inputs[action] = inputs
            with torch.enable_grad():
                views = [tensor.view_as(tensor) for tensor in trained if tensor.requires_grad]
            # Of a view, because torch 2.8 cannot start at a node of an ``autograd.Function``.
            self._outputs[action] = [get_gradient_edge(view) for view in views]
        # Detached: a message must not keep the graph, which the edge already does.
        return output.detach() if isinstance(output, Tensor) else tuple(tensor.detach() for tensor in output)

    def backward(self, action: Action, gradient: Message | None) -> Message | None:
        """Run the graph of the forward of a B or an I; return the gradient of the stage's input."""
        forward = Action(action.stage, "F", action.micro)
        # Removed before backward, so that the graph is freed while it runs.
        edges = self._outputs.pop(forward)
        inputs = self._inputs.pop(forward)
        if edges:  # empty: no output requires a gradient
            # gradient is None on the last stage, whose loss is a scalar.
            torch.autograd.backward(edges, None if gradient is None else tensors_of(gradient))
        if self.plan.consumer(action) is None:
            return None
        # A stage may not use a part of its input; the stage before still waits for a gradient.
        grads = tuple(edge.grad if edge.grad is not None else torch.zeros_like(edge) for edge in inputs)
        return self.message.packed(grads)

    def _post_receives(self, *actions: Action) -> None:
        """Post the receives for ``actions`` and for all earlier messages of their senders, in the senders' order."""
        for action in actions:
            source = self.plan.source(action)
            sender = self.plan.sender(action)
            while source is not None and sender is not None and source not in self._arriving and self._unposted[sender]:
                coming = self._unposted[sender].popleft()
                self._arriving[coming] = self.message.receive(self.p2p, coming, sender)

    def _take_input(self, action: Action) -> Message | None:
        """Return the input of ``action`` from another stage, on this or another rank; None if it has no such input."""
        source = self.plan.source(action)
        if source is None or source.stage == action.stage:
            return None
        if source in self._here:
            return self._here.pop(source)
        self._post_receives(action)  # variable messages have not been posted yet
        message, handles = self._arriving.pop(source)
        for handle in handles:
            handle.wait()
        return message

    def _send_output(self, action: Action, message: Message) -> None:
        """Pass the output of ``action`` to the stage that consumes it."""
        receiver = self.plan.receiver(action)
        # Neighbouring stages of a V are on one rank: a tensor is handed over without a message.
        if receiver is None:
            self._here[action] = message
        else:
            self._sent += self.message.send(self.p2p, action, message, receiver)

    def _release_sends(self, *, wait: bool) -> None:
        """Free the messages that have been sent; with ``wait`` first wait for all of them."""
        for _, handle in self._sent if wait else ():
            handle.wait()
        # Only completed sends are freed: a send reads its tensor until then.
        self._sent = [] if wait else [(tensor, handle) for tensor, handle in self._sent if not handle.is_completed()]


def _kinds(turn: tuple[Action, ...]) -> str:
    """The kinds of the actions of a turn: F, B, or one of ``Feature.turns``."""
    return "".join(action.kind for action in turn)
