"""Time of copying trained weights into the sampler's layout, relative to a copy of the same bytes in memory.

For each pair of layouts the trainer takes a step, and all weights of the sampler are compared with the trained ones to
the bit. Then the ranks alternate between ``RolloutSampler.update_weights`` and a plain copy of the bytes that the
rank's sampler holds. Medians are appended to benchmarks/results.csv; ratio there is the time of the copy / the time of
the update.

python -m benchmarks.bench_weight_transfer
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from megatron_core.checkpoint import Box, TensorBox, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, objectives
from megatron_core.training.state import held_weights
from megatron_core.verify.ranks import run_ranks, this_world

MODEL = {
    "num_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "group_query_attention": True,
    "num_query_groups": 3,
    "ffn_hidden_size": 1536,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "vocab_size": 49152,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 1,
    "bf16": True,
}
"""The sizes of SmolLM2-135M."""
PAIRS: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    "one process": (1, {}, {}),
    "dp2 to replicas": (2, {}, {}),
    "dp2 zero3 to replicas": (2, {"zero_stage": 3}, {}),
    "pp2 to replicas": (2, {"pipeline_model_parallel_size": 2}, {}),
    "pp2 to pp2": (2, {"pipeline_model_parallel_size": 2}, {"pipeline_parallel": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare updates of a sampler's weights with copies in memory."""

    repeats: int = 7
    """Number of alternating pairs, of which the median is reported."""


def check_equal(trained: list[TensorBox], sampled: list[TensorBox]) -> None:
    """Compare this rank's ``sampled`` weights with those that all ranks have ``trained``; a collective call.

    Errors: ``AssertionError`` for a tensor with other bits, and for one of which a part is in no rank's weights.
    """
    compared = [torch.zeros_like(piece.memory, dtype=torch.bool) for piece in sampled]
    boxes = json.dumps([(piece.name, piece.box.start, piece.box.stop) for piece in trained])
    for rank, text in enumerate(gather_from_all_ranks(boxes, torch.device("cpu"))):
        for number, (name, start, stop) in enumerate(json.loads(text)):
            box = Box(tuple(start), tuple(stop))
            values = torch.empty(box.shape, dtype=sampled[0].memory.dtype)
            if rank == dist.get_rank():
                values.copy_(trained[number].memory)
            dist.broadcast(values, rank)
            for piece, mask in zip(sampled, compared, strict=True):
                common = piece.box.intersect(box) if piece.name == name else None
                if common is not None:
                    place = common.within(piece.box)
                    expected = values[common.within(box)].contiguous()
                    if not piece.memory[place].contiguous().view(torch.uint8).equal(expected.view(torch.uint8)):
                        raise AssertionError(f"{name}: the sampler's weight differs from that of rank {rank} at {box}")
                    mask[place] = True
    if missing := [piece.name for piece, mask in zip(sampled, compared, strict=True) if not mask.all()]:
        raise AssertionError(f"no rank has all elements of {', '.join(missing)}")


def measure(settings: dict[str, Any], layout: dict[str, int], repeats: int) -> tuple[list[float], list[float], int]:
    """Seconds of each update and of each copy on this rank, and the bytes."""
    trainer = Trainer(RunConfig.from_flat(MODEL | settings), this_world())
    sampler = RolloutSampler(trainer, **layout)
    trainer.train_on([Trajectory.of_answer([1, 2], [3, 4, 5])], objectives.cross_entropy(), lr=0.01)
    sampler.update_weights()
    stages = sampler._generator.stages.values()
    pieces = [piece for stage in stages for piece in parameter_pieces(stage.named_global_parameters())]
    check_equal(list(held_weights(trainer.run.data_parallel)), pieces)
    memories = [parameter.data for parameter in sampler.parameters()]
    copies = [torch.empty_like(memory) for memory in memories]
    updates = []
    plain = []
    for _ in range(repeats):
        dist.barrier()  # neither time contains the wait for a rank that is late
        began = time.perf_counter()
        sampler.update_weights()
        updates.append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        for copy, memory in zip(copies, memories, strict=True):
            copy.copy_(memory)
        plain.append(time.perf_counter() - began)
    return updates, plain, sum(memory.nbytes for memory in memories)


def main(settings: Settings) -> None:
    """Measure all pairs, print and append the medians."""
    rows = []
    for name, (ranks, trained, sampled) in PAIRS.items():
        results = run_ranks(ranks, measure, trained, sampled, settings.repeats, timeout=600.0)
        update = max(statistics.median(updates) for updates, _, _ in results)
        copy = max(statistics.median(plain) for _, plain, _ in results)
        held = max(held for _, _, held in results)
        print(f"{name}: equal; {held / update / 1e9:.2f} GB/s, {copy / update:.2f} of a copy in memory", flush=True)
        rows.append(Row(name, held / update / 1e9, "GB/s", ratio=copy / update))
    append("bench_weight_transfer", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
