"""Messages between stages of any model: nested tuples, lists and dicts of tensors, learnt in the first step."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_core.errors import LayoutError, MegatronError
from megatron_core.pipeline_parallel.messages import Message, Received, Sent, tensors_of
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules.actions import Action


@dataclass(frozen=True)
class Structure:
    """Nested tuples, lists and dicts with tensors, as JSON: ``["tensor", shape, dtype, gradient]`` in their places."""

    text: str

    @cached_property
    def tensors(self) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
        """Shape, dtype and whether a gradient is sent back, of each tensor."""
        return [(tuple(shape), getattr(torch, dtype), grad) for _, shape, dtype, grad in _leaves(json.loads(self.text))]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value with ``tensors`` in the places of its tensors."""
        return _filled(json.loads(self.text), iter(tensors))


def flatten(value: Any) -> tuple[Structure, tuple[Tensor, ...]]:
    """Return the structure and the tensors of ``value``; ``LayoutError`` for other classes."""
    tensors: list[Tensor] = []
    tree = _tree(value, tensors)
    return Structure(json.dumps(tree)), tuple(tensors)


def _tree(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad]
    # The exact class: a subclass, such as a named tuple, would arrive as a plain one.
    if type(value) in (tuple, list):
        return [type(value).__name__, [_tree(inner, tensors) for inner in value]]
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return ["dict", [[name, _tree(inner, tensors)] for name, inner in value.items()]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise LayoutError(
        f"the last layer of a pipeline stage returns {type(value).__name__}; return tensors, or tuples, lists and "
        "dicts of tensors, numbers and text"
    )


def _leaves(tree: Any) -> Iterator[Any]:
    label = tree[0]
    content = tree[1]
    if label == "tensor":
        yield tree
    elif label != "value":
        for inner in content:
            yield from _leaves(inner[1] if label == "dict" else inner)


def _filled(tree: Any, tensors: Iterator[Tensor]) -> Any:
    label = tree[0]
    content = tree[1]
    if label == "tensor":
        return next(tensors)
    if label == "dict":
        return {name: _filled(inner, tensors) for name, inner in content}
    if label in ("tuple", "list"):
        filled = [_filled(inner, tensors) for inner in content]
        return tuple(filled) if label == "tuple" else filled
    return content


@dataclass(frozen=True)
class StructuredMessages:
    """Messages of several tensors, whose structures are known after the first step with each kind of micro-batch.

    ``kinds[micro]`` identifies everything on which structures depend (shapes of the batch), equal on all ranks of a
    pipeline. In a step with new kinds on any rank of the job (``posts_late``) each message begins with a text: the
    structure, or the reason of a failure, which the receiver raises. ``known`` and ``structures`` are kept from step to
    step.
    """

    device: torch.device
    kinds: Sequence[Hashable]
    posts_late: bool
    """Whether messages begin with texts."""
    structures: dict[tuple[int, Hashable], Structure]
    """Structure of the output of each stage next to a stage of this rank, by (stage, kind)."""

    def with_lengths(self, lengths: Mapping[int, int]) -> "StructuredMessages":
        """Return itself: lengths are part of structures."""
        return self

    def structure_of(self, stage: int, micro: int) -> Structure:
        """Return the structure of a stage's output."""
        return self.structures[stage, self.kinds[micro]]

    def received(self, stage: int, micro: int, message: Message | None) -> Any:
        """Return the input of a stage: the output of the stage before, from its message; None on the first stage."""
        return None if message is None else self.structure_of(stage - 1, micro).fill(tensors_of(message))

    def learn(self, action: Action, structure: Structure) -> None:
        """Store the structure of a forward's output; ``LayoutError`` if it was another one before."""
        # Receivers allocate buffers by the structure: another one would fill only a part, or overflow.
        known = self.structures.setdefault((action.stage, self.kinds[action.micro]), structure)
        if known != structure:
            raise LayoutError(
                f"pipeline stage {action.stage} returns {structure.text} for micro-batch {action.micro}, but before it "
                f"returned {known.text} for a batch of the same shapes; messages between stages must depend on the "
                "shapes of the batch only"
            )

    def check(self, action: Action, output: Message) -> None:
        """Compare shapes and dtypes with the structure, which ``learn`` has stored."""
        formats = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(output)]
        expected = [(shape, dtype) for shape, dtype, _ in self.structure_of(action.stage, action.micro).tensors]
        assert formats == expected, "learn() stores the structure of this output"

    def trained(self, action: Action, message: Message) -> list[Tensor]:
        """Return the tensors that required a gradient where they were computed; integers never do."""
        # By the structure and not by the received tensors, which require no gradient yet.
        flags = [grad for _, _, grad in self.structure_of(action.stage, action.micro).tensors]
        return [tensor for tensor, grad in zip(tensors_of(message), flags, strict=True) if grad]

    def packed(self, gradients: tuple[Tensor, ...]) -> Message:
        """Return ``gradients``."""
        return gradients

    def send(self, p2p: PipelineP2P, action: Action, message: Message, receiver: int) -> Sent:
        """Start to send the output of ``action``, with its structure if its kind is new."""
        tensors = [tensor.contiguous() for tensor in tensors_of(message)]
        if self.posts_late:
            text = self.structure_of(action.stage, action.micro).text if action.kind == "F" else ""
            tensors = [*self._text(text), *tensors]
        return [(tensor, p2p.send(tensor, receiver)) for tensor in tensors if tensor.numel()]

    def receive(self, p2p: PipelineP2P, source: Action, sender: int) -> Received:
        """Start to receive the output of ``source``; wait for its structure if its kind is new."""
        text = self._receive_text(p2p, sender) if self.posts_late else ""
        if source.kind == "F":
            if self.posts_late:
                self.learn(source, Structure(text))
            formats = self.structure_of(source.stage, source.micro).tensors
        else:  # gradients of the output of the stage before
            formats = [entry for entry in self.structure_of(source.stage - 1, source.micro).tensors if entry[2]]
        tensors = []
        handles = []
        for shape, dtype, _ in formats:
            # Not every backend can send a message of no bytes.
            if prod(shape):
                tensor, handle = p2p.receive(shape, dtype, self.device, sender)
                handles.append(handle)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            tensors.append(tensor)
        return tuple(tensors), handles

    def send_failure(self, p2p: PipelineP2P, error: Exception, receiver: int) -> Sent:
        """Start to send the reason, if messages begin with texts."""
        reason = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
        tensors = self._text(reason, is_failure=True) if self.posts_late else []
        return [(tensor, p2p.send(tensor, receiver)) for tensor in tensors]

    def _text(self, text: str, *, is_failure: bool = False) -> list[Tensor]:
        """Return the tensors of a text: twice its length, plus 1 for a failure, and its bytes."""
        # JSON as bytes: unpickling a message would run code of another process.
        data = text.encode()
        length = torch.tensor([2 * len(data) + is_failure], dtype=torch.int64, device=self.device)
        return [length, torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(self.device)]

    def _receive_text(self, p2p: PipelineP2P, sender: int) -> str:
        """Return the text before a message; ``MegatronError`` with the reason of a failure."""
        length, handle = p2p.receive((1,), torch.int64, self.device, sender)
        handle.wait()
        size, is_failure = divmod(int(length), 2)
        if size == 0:
            return ""
        data, handle = p2p.receive((size,), torch.uint8, self.device, sender)
        handle.wait()
        text = data.cpu().numpy().tobytes().decode()
        if is_failure:
            raise MegatronError(text)
        return text
