"""Schedules as lists of instructions, for reading; the engine runs the plans of ``megatron_core.schedules``.

With S stages, the forward of micro-batch m on stage s is step 2 m + s, and its backward step 2 m + 2 S - 1 - s: 1F1B
with equal times. An instruction names a buffer, which is the number of its micro-batch modulo the number of buffers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import Any


class PipeInstruction:
    """An instruction of a stage; ``kwargs`` are its arguments."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """An instruction on the buffer ``buffer_id``."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(base: type[PipeInstruction], name: str, text: str) -> type[Any]:
    return type(name, (base,), {"__doc__": text, "__module__": __name__})


OptimizerStep = _kind(PipeInstruction, "OptimizerStep", "Update the weights.")
ReduceGrads = _kind(PipeInstruction, "ReduceGrads", "Sum gradients over data-parallel ranks.")
ReduceTiedGrads = _kind(PipeInstruction, "ReduceTiedGrads", "Sum gradients of tied weights over their stages.")
LoadMicroBatch = _kind(BufferOpInstruction, "LoadMicroBatch", "Read a micro-batch.")
ForwardPass = _kind(BufferOpInstruction, "ForwardPass", "Compute the stage's layers.")
BackwardPass = _kind(BufferOpInstruction, "BackwardPass", "Compute gradients.")
SendActivation = _kind(BufferOpInstruction, "SendActivation", "Send the output to the next stage.")
RecvActivation = _kind(BufferOpInstruction, "RecvActivation", "Receive the output of the stage before.")
SendGrad = _kind(BufferOpInstruction, "SendGrad", "Send the gradient of the input to the stage before.")
RecvGrad = _kind(BufferOpInstruction, "RecvGrad", "Receive the gradient of the output from the next stage.")


class PipeSchedule(ABC):
    """The steps of one stage, each a list of instructions; iterating yields ``steps()``."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Number of buffers."""
        return self.micro_batches

    stage = property(attrgetter("stage_id"), doc="The stage.")
    num_stages = property(attrgetter("stages"), doc="Number of stages.")
    num_micro_batches = property(attrgetter("micro_batches"), doc="Number of micro-batches.")
    is_first_stage = property(lambda self: self.stage_id == 0, doc="Whether the stage is the first.")
    is_last_stage = property(lambda self: self.stage_id == self.stages - 1, doc="Whether the stage is the last.")

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> "PipeSchedule":
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class TrainSchedule(PipeSchedule):
    """Forward and backward of all micro-batches, and the update."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield 2 (micro-batches + stages - 1) steps; outputs of a step are sent in the next one."""
        total, before = 2 * (self.micro_batches + self.stages - 1), -1
        for step in range(total):
            is_forward = (step - self.stage_id) % 2 == 0
            micro = (step - (self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id)) // 2
            own, sent = self._valid_micro_batch(micro), self._valid_micro_batch(before)
            now, past = self._buffer_idx(micro), self._buffer_idx(before)
            found: list[PipeInstruction] = []
            if is_forward and self._valid_stage(self.prev_stage):
                found += [SendGrad(past)] * sent + [RecvActivation(now)] * own
            elif not is_forward and self._valid_stage(self.next_stage):
                found += [RecvGrad(now)] * own + [SendActivation(past)] * sent
            if is_forward and own and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(now))
            if own:
                found.append(ForwardPass(now) if is_forward else BackwardPass(now))
            if step == total - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield found

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches between forward and backward, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class InferenceSchedule(PipeSchedule):
    """Only forwards, with two buffers."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield micro-batches + stages - 1 steps; even stages send before they receive, odd ones after."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            now, past = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            found: list[PipeInstruction] = []
            own = self._valid_micro_batch(micro)
            if own and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(now))
            sends = self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1)
            messages: list[PipeInstruction] = [SendActivation(past)] * sends
            messages += [RecvActivation(now)] * (own and self._valid_stage(self.prev_stage))
            found += messages if self.stage_id % 2 == 0 else messages[::-1]
            yield found + [ForwardPass(now)] * own

    def num_pipe_buffers(self) -> int:
        """2."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """One stage: micro-batches one after the other, with one buffer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one step for each micro-batch."""
        for step in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield found + ([ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else [])

    def num_pipe_buffers(self) -> int:
        """1."""
        return 1
