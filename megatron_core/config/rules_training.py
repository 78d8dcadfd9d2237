"""Rules for batches and their ramps, the length of training, the learning rate and precision."""

from collections.abc import Iterator

from megatron_core.config.rule_helpers import exclusive, leaves_rest, nearest_multiples, unused
from megatron_core.config.run import RunConfig

MOST_MICRO_BATCHES = 2**16
"""Maximum per step: the schedule is a list in memory."""


def copies_of(config: RunConfig, world_size: int) -> int | None:
    """The data-parallel size; ``None`` if the layout does not fit the world size."""
    size = config.parallel.model_parallel_size
    if size < 1 or world_size < 1 or world_size % size:
        return None
    return world_size // size


def batch_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the global batch is a multiple of the sequences that all ranks process at a time."""
    training, copies = config.training, copies_of(config, world_size)
    if copies is None:
        return
    at_once = training.micro_batch_size * copies
    for name in ("global_batch_size", "eval_global_batch_size"):
        if (size := getattr(training, name)) is not None and leaves_rest(size, at_once):
            yield (
                f"{name}={size} is not a multiple of micro_batch_size x data-parallel size = "
                f"{training.micro_batch_size} x {copies} = {at_once}; nearest legal: {nearest_multiples(size, at_once)}"
            )
        elif size is not None and at_once >= 1 and size // at_once > MOST_MICRO_BATCHES:
            yield (
                f"{name}={size} makes {size // at_once} micro-batches in a step; legal: up to "
                f"{MOST_MICRO_BATCHES * at_once}, or a larger micro_batch_size"
            )


def length_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the length of training is given exactly once and is at least one step."""
    training, copies = config.training, copies_of(config, world_size)
    if training.skip_train and training.eval_iters == 0:
        yield "skip_train=True and eval_iters=0 leave nothing to do; give --eval-iters or remove --skip-train"
    if training.train_iters is None and training.train_samples is None and not training.skip_train:
        yield "train_iters=None and train_samples=None: the length of training is unknown; give one of them"
    if training.train_iters is not None and training.train_samples is not None:
        yield exclusive(f"train_iters={training.train_iters}", f"train_samples={training.train_samples}")
    if training.train_samples is not None and training.micro_batch_size >= 1 and copies is not None:
        batch = _first_batch(config, copies)
        if 1 <= training.train_samples < batch:
            yield (
                f"train_samples={training.train_samples} is less than one global batch of {batch}, so there would be "
                f"no step; legal: {batch} or more"
            )


def _first_batch(config: RunConfig, copies: int) -> int:
    """Sequences in the first step; 0 where another rule reports the schedule."""
    growth = config.training.batch_growth(copies, config.data.seq_length)
    return growth.at(0) if growth.is_sound else 0


def learning_rate_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check the bounds of the learning rate and the lengths of its phases."""
    optimizer = config.optimizer
    if optimizer.lr == 0.0 and not config.training.skip_train:
        yield "lr=0.0 trains nothing; give --lr a number above 0, or add --skip-train"
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(optimizer, name)
        # A negative learning rate is out of range by itself.
        if value > optimizer.lr >= 0:
            yield f"{name}={value} is more than lr={optimizer.lr}; legal: 0 to {optimizer.lr}"
    named = " and ".join(f"{name}={getattr(optimizer, name)}" for name in _PHASES if getattr(optimizer, name))
    if optimizer.counts_samples and optimizer.counts_iterations:
        yield f"{named} exclude one another; give all phases of the learning rate in samples, or all in iters"
        return
    if optimizer.counts_samples and config.training.train_samples is None and not config.training.skip_train:
        yield f"{named} needs a training by samples; give --train-samples instead of --train-iters, or use --lr-*-iters"
        return
    unit = "samples" if config.schedules_by_samples else "iters"
    warmup = getattr(optimizer, f"lr_warmup_{unit}")
    if optimizer.lr_warmup_fraction is not None and warmup:
        yield exclusive(f"lr_warmup_fraction={optimizer.lr_warmup_fraction}", f"lr_warmup_{unit}={warmup}")
    decoupled = optimizer.decoupled()
    if decoupled is not None and max(decoupled.min_lr, decoupled.lr_warmup_init) > decoupled.lr:
        yield (
            f"decoupled_lr={decoupled.lr} is less than the lowest rate of its schedule (decoupled_min_lr or min_lr "
            f"{decoupled.min_lr}, lr_warmup_init {decoupled.lr_warmup_init}); raise it or lower those"
        )
    yield from _weight_decay_problems(config)
    decay = _decay_end(config, world_size)
    # A length that is not positive is out of range by itself.
    if decay and decay > 0 and optimizer.lr_warmup_fraction is None and warmup >= decay:
        yield (
            f"lr_warmup_{unit}={warmup} leaves nothing for the decay, which ends after {decay} {_WORD[unit]}; "
            f"legal: 0 to {decay - 1}, or a longer training"
        )
    yield from _wsd_problems(config, decay, unit)


def _weight_decay_problems(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    changes = optimizer.weight_decay_incr_style != "constant"
    for name in ("start_weight_decay", "end_weight_decay"):
        value = getattr(optimizer, name)
        if value is None and changes:
            yield f"{name}=None is missing for weight_decay_incr_style={optimizer.weight_decay_incr_style}; give it"
        elif value not in (None, optimizer.weight_decay) and not changes:
            way_out = "give --weight-decay-incr-style linear or cosine, or remove it"
            yield unused(name, value, "weight_decay_incr_style", "constant", way_out)


_PHASES = tuple(f"lr_{phase}_{unit}" for unit in ("samples", "iters") for phase in ("decay", "warmup", "wsd_decay"))
_WORD = {"iters": "steps", "samples": "samples"}


def _decay_end(config: RunConfig, world_size: int) -> int | None:
    """Steps, or samples, until the end of the decay; ``None`` if unknown."""
    training, copies = config.training, copies_of(config, world_size)
    if config.schedules_by_samples:
        return config.optimizer.lr_decay_samples or training.train_samples
    if config.optimizer.lr_decay_iters is not None:
        return config.optimizer.lr_decay_iters
    if training.train_iters is not None:
        return training.train_iters
    sizes = training.micro_batch_size, training.global_batch_size or 1
    if copies is None or min(sizes) < 1 or _first_batch(config, copies) < 1:
        return None
    return training.num_iterations(copies, config.data.seq_length)


def _wsd_problems(config: RunConfig, decay: int | None, unit: str) -> Iterator[str]:
    """Check the decay phase of WSD (warm-up, stable, decay)."""
    optimizer, name = config.optimizer, f"lr_wsd_decay_{unit}"
    length = getattr(optimizer, name)
    if optimizer.lr_decay_style != "WSD":
        return
    if length is None:
        yield f"{name}=None is missing for lr_decay_style=WSD; give the {_WORD[unit]} of the last phase"
    elif decay:
        warmup = (optimizer.lr_warmup_fraction or 0) * decay or getattr(optimizer, f"lr_warmup_{unit}")
        if length > decay - warmup > 0:
            yield (
                f"{name}={length} is more than the {decay - warmup:g} {_WORD[unit]} after warm-up; "
                f"legal: 1 to {int(decay - warmup)}"
            )


def precision_problems(config: RunConfig) -> Iterator[str]:
    """Check that there is one precision."""
    chosen = [name for name in ("bf16", "fp16", "fp64") if getattr(config.training, name)]
    if len(chosen) > 1:
        assigned = " and ".join(f"{name}=True" for name in chosen)
        yield f"{assigned} exclude one another; keep one of them, or none for float32"
