"""One executor for every plan: it does what this rank's list of actions says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.pipeline_parallel.actions import Action, Plan
from megatron_core.pipeline_parallel.p2p import Links

ForwardStep = Callable[[int, int, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class MessageFormat:
    """Shape, dtype and device of what travels between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Executor:
    """Runs one step of a plan on one pipeline rank.

    ``forward(stage, micro, input)`` computes a stage; ``input`` is None on the first one, and the last one returns a
    scalar whose gradient is wanted. Receives are posted in the order in which the sender's plan sends, one action
    ahead of need; sends are waited for at the end. Make one executor for each step.
    """

    def __init__(
        self,
        plan: Plan,
        links: Links,
        message: MessageFormat,
        forward: ForwardStep,
        *,
        on_last_backward: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self.plan, self.links, self.message, self.forward = plan, links, message, forward
        self.on_last_backward = on_last_backward
        self.actions = plan.ranks[links.index]
        self._last_backward = {a.stage: a for a in self.actions if a.kind == "B"}
        self._keep_graph = bool(self._last_backward)
        senders = set(plan.place) - {links.index}
        self._unposted = {sender: deque(plan.messages(sender, links.index)) for sender in senders}
        self._arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Action, Tensor] = {}
        self._inputs: dict[Action, Tensor | None] = {}
        self._outputs: dict[Action, Tensor] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def run(self) -> dict[int, Tensor]:
        """Run all actions; the last stage's outputs by micro-batch (empty on ranks without it)."""
        results: dict[int, Tensor] = {}
        for action, following in zip(self.actions, (*self.actions[1:], None), strict=True):
            self._post_receive(action)
            if following is not None:
                self._post_receive(following)
            if action.kind == "F":
                output = self._run_forward(action)
                if action.stage == self.plan.num_stages - 1:
                    results[action.micro] = output.detach()
            else:
                self._run_backward(action)
        for _, handle in self._sent:
            handle.wait()
        return results

    def _run_forward(self, action: Action) -> Tensor:
        received = self._take(self.plan.source(action)) if action.stage else None
        if received is not None and self._keep_graph:
            received.requires_grad_()
        with torch.set_grad_enabled(self._keep_graph):
            output = self.forward(action.stage, action.micro, received)
        if self._keep_graph:
            self._inputs[action], self._outputs[action] = received, output
        self._hand_on(action, output.detach())
        return output

    def _run_backward(self, action: Action) -> None:
        forward = Action(action.stage, "F", action.micro)
        last_stage = action.stage == self.plan.num_stages - 1
        gradient = None if last_stage else self._take(self.plan.source(action))
        if self._last_backward[action.stage] == action:
            self.on_last_backward(action.stage)
        torch.autograd.backward(self._outputs.pop(forward), gradient)
        received = self._inputs.pop(forward)
        if received is not None:
            self._hand_on(action, received.grad)

    def _post_receive(self, action: Action) -> None:
        """Post receives up to the message that ``action`` needs, in the order in which its sender sends."""
        source = self.plan.source(action)
        if source is None or self.plan.place[source.stage] == self.links.index:
            return
        sender = self.plan.place[source.stage]
        while source not in self._arriving and self._unposted[sender]:
            message = self.message
            posted = self.links.receive(message.shape, message.dtype, message.device, sender)
            self._arriving[self._unposted[sender].popleft()] = posted

    def _take(self, source: Action) -> Tensor:
        """What ``source`` produced, from this rank or from another."""
        if source in self._here:
            return self._here.pop(source)
        tensor, handle = self._arriving.pop(source)
        handle.wait()
        return tensor

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """Give the output of ``action`` to the stage that consumes it."""
        consumer = self.plan.consumer(action)
        if consumer is None:
            return
        receiver = self.plan.place[consumer.stage]
        if receiver == self.links.index:
            self._here[action] = tensor
            return
        tensor = tensor.contiguous()
        self._sent = [(kept, handle) for kept, handle in self._sent if not handle.is_completed()]
        self._sent.append((tensor, self.links.send(tensor, receiver)))
