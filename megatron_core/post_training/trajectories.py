"""Texts with numbers for each of their learned tokens, and their packing into the rows of a step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_core.errors import DataError
from megatron_core.features.conversations.packing import first_fit

Values = Mapping[str, "float | Sequence[float] | Tensor"]


@dataclass(frozen=True)
class Trajectory:
    """A text and its learned tokens, such as a prompt and the answer that a policy has sampled.

    ``tokens`` are its ``[n + 1]`` token ids. ``mask`` has a number for each of the n tokens after the first: 1 if the
    token is learned, 0 for prompts, results of tools, and other tokens that the policy has not written. ``values`` are
    inputs of the objective by name, such as advantages: one number for each learned token, in order, or one for all.
    """

    tokens: Sequence[int]
    mask: Sequence[int]
    values: Values = field(default_factory=dict)
    experts: np.ndarray | None = None
    """``[n, layers, k]``, the experts of the first n tokens in each layer with experts, as ``RolloutSampler`` records
    them; None: the routers choose."""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.mask) != len(self.tokens) - 1:
            raise DataError(
                f"a trajectory of {len(self.tokens)} tokens with a mask of {len(self.mask)}: give at least two tokens, "
                "and a mask of one number fewer, because the first token is not predicted"
            )
        if not set(self.mask) <= {0, 1}:
            raise DataError(f"the mask of a trajectory has the numbers {sorted(set(self.mask))[:5]}; give 0 or 1")
        for name, numbers in self.values.items():
            if _length(numbers) not in (None, self.num_learned):
                raise DataError(
                    f"{name} of a trajectory has {_length(numbers)} numbers for {self.num_learned} learned tokens; "
                    "give one for each of them, or a single number"
                )

    @classmethod
    def of_answer(
        cls,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        experts: np.ndarray | None = None,
        **values: float | Sequence[float] | Tensor,
    ) -> "Trajectory":
        """A prompt of at least one token, and an answer whose tokens are all learned."""
        if not prompt or not answer:
            raise DataError(f"a prompt of {len(prompt)} and an answer of {len(answer)} tokens; give at least one each")
        return cls([*prompt, *answer], [0] * (len(prompt) - 1) + [1] * len(answer), values, experts)

    @classmethod
    def of_text(cls, tokens: Sequence[int], *, experts: np.ndarray | None = None, **values: float) -> "Trajectory":
        """A text whose only learned position is the one after its last token, for the value of the whole text."""
        # The last token of a trajectory is only predicted; a value head does not read the one added here.
        return cls([*tokens, tokens[-1]], [0] * (len(tokens) - 1) + [1], values, experts)

    @property
    def labels(self) -> Sequence[int]:
        """The token that each token but the last predicts, ``[n]``."""
        return self.tokens[1:]

    @property
    def num_learned(self) -> int:
        """Number of learned tokens."""
        return sum(self.mask)

    def row(self, name: str) -> np.ndarray:
        """A value of each predicted token, float64 ``[n]``; 0 where a token is not learned."""
        row = np.zeros(len(self.mask))
        row[np.flatnonzero(self.mask)] = np.asarray(self.values[name], dtype=np.float64)
        return row


def _length(numbers: float | Sequence[float] | Tensor) -> int | None:
    """Number of elements; None for a single number."""
    shape = np.shape(numbers)
    return shape[0] if shape else None


@dataclass(frozen=True)
class RowRoom:
    """The rows into which trajectories are packed."""

    longest: int
    """Largest number of positions of a row."""
    multiple: int = 1
    """The number of positions is a multiple of this one, because they are divided over ranks."""
    align: int = 1
    """Trajectories start at multiples of this number."""
    whole: bool = False
    """All rows have ``longest`` positions."""
    pack: bool = True
    """Whether a row may have several trajectories."""


@dataclass(frozen=True)
class PackedRows:
    """The trajectories of a step, packed into rows of one length; equal on all ranks."""

    trajectories: Sequence[Trajectory]
    rows: Sequence[Sequence[int]]
    """The trajectories of each row, by number."""
    length: int
    """Positions of a row; the positions after its last trajectory are padding."""
    align: int = 1
    """Trajectories start at multiples of this number; the positions before the next one are padding."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], room: RowRoom, num_rows: int) -> "PackedRows":
        """Pack into rows of at most ``room.longest`` positions; their number is a multiple of ``num_rows``, for which
        rows without trajectories are added.

        Errors: ``DataError`` if a trajectory is longer, or if none has a learned token.
        """
        lengths = [len(trajectory.mask) for trajectory in trajectories]
        if not any(trajectory.num_learned for trajectory in trajectories):
            raise DataError(f"none of the {len(trajectories)} trajectories has a learned token")
        if max(lengths) > room.longest:
            raise DataError(
                f"trajectory {lengths.index(max(lengths))} predicts {max(lengths)} tokens, more than "
                f"seq_length={room.longest}; cut it, or give a larger --seq-length"
            )
        sizes = [-(-length // room.align) * room.align for length in lengths]
        # The longest first: first fit then needs at most 11/9 of the least number of rows, instead of 1.7 times.
        order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
        rows = [[number] for number in order]
        if room.pack:
            rows = first_fit(((number, sizes[number]) for number in order), room.longest)
        rows += [[] for _ in range(-len(rows) % num_rows)]
        used = max(sum(sizes[number] for number in row) for row in rows)
        shortest = min(-(-used // room.multiple) * room.multiple, room.longest)
        return cls(trajectories, rows, room.longest if room.whole else shortest, room.align)

    def arrays(self, row: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The entries of a row, ``[length]`` each, and its document lengths ``[d]``.

        In addition to those of a loader's batch: ``trajectory``, its number for each position, -1 for padding; and the
        values ``names``.
        """
        numbers = self.rows[row]
        parts = [self.trajectories[number] for number in numbers]
        starts = self.starts(row)
        entries: dict[str, np.ndarray] = {
            "tokens": np.zeros(self.length, dtype=np.int64),
            "labels": np.zeros(self.length, dtype=np.int64),
            "loss_mask": np.zeros(self.length, dtype=np.float32),
            "trajectory": np.full(self.length, -1),
            **{name: np.zeros(self.length) for name in names},
        }
        for number, part, start in zip(numbers, parts, starts, strict=True):
            span = slice(start, start + len(part.mask))
            entries["tokens"][span] = part.tokens[:-1]
            entries["labels"][span] = part.labels
            entries["loss_mask"][span] = part.mask
            entries["trajectory"][span] = number
            for name in names:
                entries[name][span] = part.row(name)
        # Padding continues the document before it, which no learned token sees.
        lengths = np.diff([*(starts or [0]), self.length])
        entries["position_ids"] = np.concatenate([np.arange(length) for length in lengths])
        entries["document_lengths"] = lengths
        return entries

    def experts(self, row: int, layers: int, choices: int) -> np.ndarray:
        """The recorded experts of a row's tokens, int64 ``[length, layers, choices]``."""
        # Padding takes the first experts: the choices of a token are distinct.
        experts = np.tile(np.arange(choices), (self.length, layers, 1))
        for number, start in zip(self.rows[row], self.starts(row), strict=True):
            recorded = self.trajectories[number].experts
            assert recorded is not None, "checked: all trajectories have experts"
            experts[start : start + len(recorded)] = recorded
        return experts

    def starts(self, row: int) -> list[int]:
        """The position at which each trajectory of a row starts."""
        starts = [0]
        for number in self.rows[row]:
            starts.append(starts[-1] + -(-len(self.trajectories[number].mask) // self.align) * self.align)
        return starts[:-1]

    def digest(self) -> int:
        """A number of 62 bits that depends on all tokens, masks and values."""
        hashed = hashlib.sha256()
        for trajectory in self.trajectories:
            hashed.update(np.asarray(trajectory.tokens, dtype=np.int64).tobytes())
            hashed.update(np.asarray(trajectory.labels, dtype=np.int64).tobytes())
            hashed.update(np.asarray(trajectory.mask, dtype=np.int64).tobytes())
            for name in sorted(trajectory.values):
                hashed.update(name.encode() + b"\0" + trajectory.row(name).tobytes())
            if trajectory.experts is not None:
                hashed.update(trajectory.experts.tobytes())
        return int.from_bytes(hashed.digest()[:8], "big") >> 2


def check_experts(trajectories: Sequence[Trajectory], layers: int, choices: int, num_experts: int) -> bool:
    """Whether the experts of all tokens are recorded; ``DataError`` if only some are, or for another model."""
    recorded = [trajectory.experts is not None for trajectory in trajectories]
    if any(recorded) and not all(recorded):
        raise DataError(
            f"{sum(recorded)} of {len(recorded)} trajectories have recorded experts; record all of them or none"
        )
    for number, trajectory in enumerate(trajectories):
        if trajectory.experts is None:
            continue
        shape = len(trajectory.mask), layers, choices
        if trajectory.experts.shape != shape:
            raise DataError(
                f"experts of trajectory {number} have the shape {list(trajectory.experts.shape)}, and this model needs "
                f"{list(shape)} (tokens, layers with experts, experts of a token)"
            )
        if trajectory.experts.min() < 0 or trajectory.experts.max() >= num_experts:
            raise DataError(f"experts of trajectory {number} are outside of 0 to {num_experts - 1}")
    return any(recorded)


def value_names(trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """The names of the values, which all trajectories share; ``DataError`` if they differ."""
    if not trajectories:
        raise DataError("no trajectories; give at least one")
    names = set(trajectories[0].values)
    for number, trajectory in enumerate(trajectories):
        if set(trajectory.values) != names:
            raise DataError(
                f"trajectory {number} has the values {sorted(trajectory.values)}, and trajectory 0 {sorted(names)}; "
                "give each trajectory the same ones"
            )
    return tuple(sorted(names))


def batch_of(entries: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Stack rows into a batch of tensors ``[b, length]``; document lengths are padded with 0."""
    batch = {
        name: torch.from_numpy(np.stack([row[name] for row in entries]))
        for name in entries[0]
        if name != "document_lengths"
    }
    lengths = [torch.from_numpy(row["document_lengths"]) for row in entries]
    batch["document_lengths"] = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
    return batch
