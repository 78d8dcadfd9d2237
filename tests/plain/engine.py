"""Runs of the engine that the plain model repeats; no other file here but the tests imports the engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_core.checkpoint import pieces_of
from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.datasets.loader import packing_of
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.parallel import World
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.trace import RankTrace, Trace, assemble
from tests.plain.training import Record

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 12,
    "vocab_size": 37,
    "mock_data": True,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-2,
    "clip_grad": 0.5,
    "fp64": True,
    "replica_check_interval": None,
    "link_check_interval": None,
}
BOUND = 1e-9


def samples_of(values: dict[str, Any], count: int) -> list[dict[str, torch.Tensor]]:
    """Samples with masks of different lengths; the fourth counts no token. With documents, about one token in five is
    the last id of the vocabulary, which ends a document. Other tokens of a sample differ: attention over equal ones
    would make tokens equal up to rounding, which then chooses the experts' tokens."""
    generator = np.random.default_rng(5)
    samples = []
    for number in range(count):
        length = values["seq_length"]
        text = generator.permutation(values["vocab_size"] - 1)[: length + 1]
        if values.get("reset_attention_mask") or values.get("reset_position_ids"):
            text[generator.random(length + 1) < 0.2] = values["vocab_size"] - 1
        counted = 0 if number == 3 else generator.integers(length // 2, length + 1)
        mask = (np.arange(length) < counted).astype(np.float64)
        arrays = {"tokens": text[:-1], "labels": text[1:], "mask": mask}
        samples.append({name: torch.tensor(array) for name, array in arrays.items()})
    return samples


class Samples:
    """The samples as a dataset of the engine."""

    def __init__(self, samples: list[dict[str, torch.Tensor]]) -> None:
        self.samples, self.sequence_length = samples, len(samples[0]["tokens"])

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``; the loader also reads ahead."""
        sample = self.samples[index % len(self.samples)]
        return Sample(
            tokens=sample["tokens"].numpy(),
            labels=sample["labels"].numpy(),
            loss_mask=sample["mask"].numpy().astype(np.float32),
        )


def settings_of(values: dict[str, Any]) -> SimpleNamespace:
    """All settings, with their defaults, by name."""
    return SimpleNamespace(**RunConfig.from_flat(BASE | values).flat())


def started(values: dict[str, Any], world: World) -> Run:
    """A run of the engine on the samples."""
    torch.set_num_threads(1)
    config = RunConfig.from_flat(BASE | values)
    run = set_up(config, world)
    samples = samples_of(BASE | values, 64)
    assert packing_of(config.data, run.tokenizer) is None or run.tokenizer.eod == config.data.vocab_size - 1
    run.train_loader = run.loader(Samples(samples))
    return run


def trained(values: dict[str, Any], steps: int, world: World, loss_scale: float | None = None) -> RankTrace:
    """Train on this rank: the trace has the initial weights as the first of its steps' parts, named ``start.``."""
    run = started(values, world)
    if loss_scale is not None:
        run.optimizer.loss_scale = LossScale(loss_scale)
    first = RankTrace()
    first.add_weights(run.data_parallel, run.stages.values())
    trace = RankTrace()
    trace.pieces = [("start." + name.removeprefix("weight."), *others) for name, *others in first.pieces]
    hooks = StepHooks(before_update=lambda: trace.add_gradients(run.data_parallel, run.state.iteration))
    for step in range(steps):
        result = train_step(run, hooks=hooks)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        loads = {f"load {layer}": load[:-1] for layer, load in result.expert_load.items()}
        trace.add_reports(step, {name: [value] for name, value in result.auxiliary_losses.items()} | loads)
    trace.add_weights(run.data_parallel, run.stages.values())
    if run.config.optimizer.ema_decay is not None:
        add_averages(trace, run)
    return trace


def add_averages(trace: RankTrace, run: Run) -> None:
    """Add the averages of the weights of this rank's shards."""
    for shard in run.optimizer.shards:
        for name, parameter, start, stop, offset in shard.bucket.pieces():
            flat = shard.state["ema"][offset : offset + stop - start]
            for piece in pieces_of(name, spec_of(parameter), tuple(parameter.shape), start, stop, flat):
                box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                trace.pieces.append((f"average.{piece.name}", piece.global_shape, box, piece.memory.numpy().copy()))


def engine_trace(values: dict[str, Any], steps: int = 3, world_size: int = 1, loss_scale: float | None = None) -> Trace:
    """The trace of the engine: in this process, or on ``world_size`` ranks."""
    if world_size == 1:
        return assemble([trained(values, steps, World(0, 1, 0, torch.device("cpu")), loss_scale)])
    return assemble(run_ranks(world_size, on_rank, values, steps, loss_scale))


def on_rank(values: dict[str, Any], steps: int, loss_scale: float | None) -> RankTrace:
    """``trained`` on a rank of ``run_ranks``."""
    return trained(values, steps, this_world(), loss_scale)


def start_of(trace: Trace) -> dict[str, torch.Tensor]:
    """The initial weights by their global names."""
    return {
        name.removeprefix("start."): torch.from_numpy(values)
        for name, values in trace.tensors.items()
        if name.startswith("start.")
    }


def differences(trace: Trace, record: Record, loss_scale: float = 1.0) -> dict[str, float]:
    """The relative difference of each quantity of the engine from the plain model's, by name."""
    found = {fault: float("inf") for fault in trace.faults}
    for step, (loss, norm) in enumerate(zip(record.losses, record.norms, strict=True)):
        found[f"loss{step}"] = abs(trace.losses[step] - loss) / abs(loss)
        found[f"norm{step}"] = abs(trace.norms[step] - norm) / norm
    for name, ours, expected in compared(trace, record):
        if name.startswith("grad"):
            ours = ours / loss_scale
        if ours is None or ours.shape != tuple(expected.shape):
            found[name] = float("inf")
            continue
        scale = max(expected.abs().max().item(), 1e-7)
        found[name] = np.abs(ours - expected.numpy()).max().item() / scale
    return found


def compared(trace: Trace, record: Record) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Name, the engine's value and the plain model's value of each tensor."""
    for step, gradients in enumerate(record.gradients):
        for name, value in gradients.items():
            yield f"grad{step}.{name}", trace.tensors.get(f"grad{step}.{name}"), value
        reports = {name: [number] for name, number in record.auxiliary[step].items()}
        reports |= {f"load {layer}": load for layer, load in record.loads[step].items()}
        for name, numbers in reports.items():
            expected = torch.tensor(numbers, dtype=torch.float64)
            yield f"report{step}.{name}", trace.tensors.get(f"report{step}.{name}"), expected
    for name, value in record.weights.items():
        yield f"weight.{name}", trace.tensors.get(f"weight.{name}"), value
    for name in trace.tensors:
        if name.startswith("average."):
            yield name, trace.tensors[name], record.average[name.removeprefix("average.")]


def beyond(found: dict[str, float], bound: float = BOUND) -> list[str]:
    """The quantities beyond the bound, the largest first."""
    wrong = sorted(((error, name) for name, error in found.items() if not error <= bound), reverse=True)
    return [f"{name} differs by {error:.1e}" for error, name in wrong]
