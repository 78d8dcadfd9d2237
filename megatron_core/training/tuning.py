"""The weights that fine-tuning starts from: frozen weights, initial adapters, and export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.checkpoint import CheckpointReader, open_newest
from megatron_core.checkpoint.formats import OtherReader, formats_of_settings
from megatron_core.config import RunConfig
from megatron_core.data_parallel import DataParallel, Initialise
from megatron_core.errors import CheckpointError
from megatron_core.models import GPTModel
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.compatibility import check_same_model, check_state
from megatron_core.training.new_indexers import is_of_indexer, lacks_indexers, outside_of_indexers
from megatron_core.training.state import Reader, held_weights, open_initial_weights
from megatron_core.transformer.adapters import adapters_of, is_adapter

Base = CheckpointReader | OtherReader


def open_base(config: RunConfig, device: torch.device, *, resumes: bool = False) -> Base | None:
    """Open the weights that a run fine-tunes: --pretrained-checkpoint or --load-hf; None: drawn by the seed.

    If it ``resumes``, only those that are frozen below adapters.
    """
    settings = config.checkpoint
    starts = not resumes and (config.optional("dpo") or config.tuning.pretrained_checkpoint is not None)
    if config.tuning.lora_rank is None and not starts:
        return None
    if (folder := config.tuning.pretrained_checkpoint) is not None:
        reader = open_newest(folder, None, verify=settings.verify_checkpoint, device=device)
        if reader is None:
            raise CheckpointError(f"pretrained_checkpoint={folder!r} has no checkpoint; give a folder of --save")
        stored = check_state(reader.state, reader.folder)
        check_same_model(
            {name: value for name, value in stored.items() if name not in vars(config.tuning)},
            config,
            only_weights=True,
        )
        if stored.get("lora_rank") is not None:
            raise CheckpointError(
                f"pretrained_checkpoint={folder!r} has only adapters; resume them with --load {folder}, or merge them "
                "with megatron-convert --from native --to hf and give the result as --load-hf"
            )
        return reader
    return open_initial_weights(config)


def drawing(config: RunConfig, base: Reader | None) -> Initialise | None:
    """The function that draws deferred weights: adapters in any case, the others unless they are in ``base``."""
    draw = partial(draw_by_name, seed=config.training.seed)
    if base is None:
        return draw
    if lacks_indexers(base, config.model):
        return _only(is_of_indexer, draw)
    return None if config.tuning.lora_rank is None else _only(is_adapter, draw)


def _only(is_drawn: Callable[[str], bool], draw: Initialise) -> Initialise:
    """Return ``draw`` for some parameters; others stay uninitialized, because they are loaded."""
    return lambda name, parameter: draw(name, parameter) if is_drawn(name) else None


def prepare_weights(
    config: RunConfig, data: DataParallel, stages: Iterable[GPTModel], base: Base | None, *, resumes: bool
) -> None:
    """Load the weights of ``base``; with adapters, set the initial ones unless the run ``resumes`` from others.

    It precedes the construction of the optimizer, which copies the trained weights.
    """
    if base is not None:
        with base:
            stored = outside_of_indexers(held_weights(data), lacks_indexers(base, config.model))
            base.fill(piece for piece in stored if not is_adapter(piece.name))
    if config.tuning.lora_rank is None:
        return
    data.is_saved = is_adapter
    if resumes:
        return
    stages = list(stages)
    if config.tuning.use_dora:
        _assign(data, _magnitudes(data, stages))
    for form, folder in formats_of_settings(config):
        if adapters := form.read_adapters(folder, config, stages[0].vocab_size):
            parameters = [item for stage in stages for item in stage.named_global_parameters() if is_adapter(item[0])]
            _assign(data, {parameter: _local(adapters[name], parameter) for name, parameter in parameters})


def _magnitudes(data: DataParallel, stages: Iterable[GPTModel]) -> dict[nn.Parameter, Tensor]:
    """DoRA's magnitudes: the norms of the rows of the frozen weights."""
    found: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        for _, linear, adapter in adapters_of(stage):
            assert linear.weight is not None
            with data.gathered([linear.weight, *adapter.lora_A.values(), *adapter.lora_B.values()]):
                found |= adapter.initial_magnitudes(linear.weight)
    return found


@torch.no_grad()
def _assign(data: DataParallel, values: Mapping[nn.Parameter, Tensor]) -> None:
    """Set parameters, of which ZeRO 3 keeps a shard, to this rank's ``values``."""
    for parameter, value in values.items():
        bucket = data.bucket_of(parameter)
        if bucket is None or not bucket.splits_weights:
            parameter.data.copy_(value)
            continue
        for _, own, start, stop, at in bucket.pieces():
            if own is parameter:
                bucket.weight_shard[at : at + stop - start] = value.reshape(-1)[start:stop]


def _local(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    spec = spec_of(parameter)
    local = torch.empty(spec.local_shape, dtype=parameter.dtype, device=parameter.device)
    spec.localise(whole, local)
    return local
