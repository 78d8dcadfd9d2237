"""Whether the stages that the ranks of a pipeline have built are one whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_core.errors import LayoutError
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel.groups import LocalGroup, ParallelGroups
from megatron_core.parallel.texts import gather_texts, listed

EMBEDDING, OUTPUT = "the embedding", "the output layer"


def check_complete(
    stages: Mapping[int, GPTModel], num_layers: int, groups: ParallelGroups, device: torch.device
) -> None:
    """Compare what the ranks really hold with what the model has; all ranks of the pipeline call this together.

    Errors: ``LayoutError``, the same one on all of them, if a part of the model is on no rank or on two.
    """
    pipeline = groups.group("pp")
    if isinstance(pipeline, LocalGroup) and pipeline.size() > 1:
        return  # One rank of a pipeline that does not run: the others cannot be asked.
    mine = "\n".join(part for model in stages.values() for part in parts_of(model))
    held = [text.splitlines() for text in gather_texts(mine, pipeline, device)]
    found = faults(held, num_layers)
    if found:
        raise LayoutError(
            f"the pipeline's ranks {listed(groups.ranks('pp'))} do not make up one whole model: {'; '.join(found)}. "
            "Give all ranks the same flags and the same code, and check pipeline_model_parallel_layout"
        )


def parts_of(model: GPTModel) -> list[str]:
    """The parts of the model that a stage holds, by name."""
    names = [EMBEDDING] * (model.embedding is not None) + [f"layer {number}" for number in model.decoder.layers]
    return names + [OUTPUT] * (model.output_layer is not None)


def faults(held: Sequence[Iterable[str]], num_layers: int) -> list[str]:
    """What is missing, doubled or too much, given the parts that each pipeline rank holds."""
    holders: dict[str, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    wanted = [EMBEDDING, *(f"layer {number}" for number in range(num_layers)), OUTPUT]
    missing = [part for part in wanted if part not in holders]
    found = [f"{listed(missing)} on no rank"] if missing else []
    for part, ranks in holders.items():
        if part not in wanted:
            found.append(f"{part} on pipeline rank {ranks[0]}, but num_layers={num_layers}")
        elif len(ranks) > 1:
            found.append(f"{part} on pipeline ranks {' and '.join(map(str, ranks))}")
    return found
