"""Megatron Core's functions for pipelines of an encoder and a decoder; without a split every stage has both."""

from megatron_core.parallel.getters import getters

_, _world_size, _rank, _, _ = getters("pp", "that share the layers")
_split: dict[str, int | None] = {"rank": None}


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first pipeline rank of the decoder of an encoder-decoder model, if one was set."""
    return _split["rank"]


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the first pipeline rank of the decoder."""
    _split["rank"] = rank


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has layers of the encoder; always without a split."""
    rank, split = _rank() if rank is None else rank, _split["rank"]
    return _world_size() == 1 or split is None or rank < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has layers of the decoder; always without a split."""
    rank, split = _rank() if rank is None else rank, _split["rank"]
    return _world_size() == 1 or split is None or rank >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank has layers of the encoder and the next one layers of the decoder."""
    rank = _rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)
