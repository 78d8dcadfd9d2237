"""Trains a tiny model under a layout and brings back everything that must not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_core.checkpoint import Piece, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.datasets.permutation import mix64
from megatron_core.parallel import World
from megatron_core.training.setup import Run, set_up
from megatron_core.training.state import shard_pieces
from megatron_core.training.step import train_step
from tests.ranks import run_ranks

Part = tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]


class RaggedDataset:
    """Random tokens with loss masks of every length; each seventh sample counts no token at all."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def __getitem__(self, index: int) -> Sample:
        text = np.array([mix64(7, index, i) % self.vocab_size for i in range(self.length + 1)], dtype=np.int64)
        counted = 0 if index % 7 == 3 else 1 + mix64(8, index) % self.length
        mask = (np.arange(self.length) < counted).astype(np.float32)
        return Sample(tokens=text[:-1], labels=text[1:], loss_mask=mask)


@dataclass
class Trace:
    """Losses and norms by step, and global tensors by name: ``grad0.NAME`` of the first step, ..., ``weight.NAME``."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def trace(config: RunConfig, world_size: int, steps: int = 3) -> Trace:
    """Train ``steps`` steps on ``world_size`` forked ranks and put the tensors of all ranks together.

    Asserts on the way that every element is there and that all ranks which hold it agree on it to the bit.
    """
    results = run_ranks(world_size, _train, config, steps)
    first = results[0]
    for other in results[1:]:
        assert other[:2] == first[:2], "ranks disagree about loss or norm"
    return Trace(first[0], first[1], _assemble(part for result in results for part in result[2]))


def _train(config: RunConfig, steps: int) -> tuple[list[float], list[float], list[Part]]:
    world = World(
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        local_rank=0,
        device=torch.device("cpu"),
    )
    run = set_up(config, world)
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, config.data.seq_length))
    parts: list[Part] = []
    _record_gradients(run, parts)
    results = [train_step(run) for _ in range(steps)]
    run.data_parallel.finish_gather()
    for stage in run.stages.values():
        parts += _copy("weight", parameter_pieces(stage.named_global_parameters()), "model.")
    return [r.loss for r in results], [r.grad_norm for r in results], parts


def _record_gradients(run: Run, parts: list[Part]) -> None:
    """Copy all final gradients just before each optimizer step."""
    step = run.optimizer.step

    def recording_step(lr: float):
        for bucket in run.data_parallel.buckets:
            label = f"grad{run.state.iteration}"
            parts.extend(_copy(label, shard_pieces(bucket, label, bucket.grad_shard), f"{label}."))
        return step(lr)

    run.optimizer.step = recording_step


def _copy(label: str, pieces: Iterable[Piece], prefix: str) -> list[Part]:
    whole = slice(None)
    return [
        (
            f"{label}.{piece.name.removeprefix(prefix)}",
            piece.global_shape,
            tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True)) or (whole,),
            piece.memory.to(torch.float64).numpy().copy(),
        )
        for piece in pieces
    ]


def _assemble(parts: Iterable[Part]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, shape, box, values in parts:
        full = tensors.setdefault(name, np.full(shape, np.nan))
        seen = ~np.isnan(full[box])
        np.testing.assert_array_equal(full[box][seen], values[seen], err_msg=f"replicas of {name} differ")
        full[box] = values
    for name, full in tensors.items():
        assert not np.isnan(full).any(), f"{name} is incomplete"
    return tensors


def errors(found: Trace, truth: Trace) -> dict[str, float]:
    """Largest deviation of every quantity, relative to its largest element."""
    assert set(found.tensors) == set(truth.tensors)
    result = {f"loss{i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(found.losses, truth.losses, strict=True))}
    result |= {f"norm{i}": abs(a - b) / b for i, (a, b) in enumerate(zip(found.norms, truth.norms, strict=True))}
    for name, expected in truth.tensors.items():
        scale = np.abs(expected).max() or 1.0
        result[name] = float(np.abs(found.tensors[name] - expected).max() / scale)
    return result
