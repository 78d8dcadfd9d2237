"""Rules for pipelines: the assignment of layers to stages (a layout, or layer counts), and the schedule."""

from collections.abc import Iterable, Iterator

from megatron_core.config.parallel import BALANCED_STAGES
from megatron_core.config.rule_helpers import divisors, leaves_rest
from megatron_core.config.run import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.schedules import SCHEDULES, TRAINING
from megatron_core.schedules.stage_notation import parse_layout

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
CHUNKS = "num_virtual_stages_per_pipeline_rank"


def stage_problems(config: RunConfig) -> Iterator[str]:
    """Layouts and layer counts that contradict the model, the pipeline or each other."""
    if config.parallel.pipeline_model_parallel_layout is not None:
        yield from _contradictions(config, "pipeline_model_parallel_layout", BALANCED_STAGES)
        yield from _layout_problems(config)
        return
    counted = next((name for name in (FIRST, LAST) if getattr(config.parallel, name) is not None), None)
    if counted is not None:
        yield from _contradictions(config, counted, set(BALANCED_STAGES) - {FIRST, LAST, CHUNKS})
        yield from _count_problems(config)


def _contradictions(config: RunConfig, chosen: str, alternatives: Iterable[str]) -> Iterator[str]:
    """Other settings that also determine how layers are split."""
    values = {name: getattr(config.parallel, name) for name in sorted(alternatives) if name != chosen}
    assigned = [f"{name}={value}" for name, value in values.items() if value != BALANCED_STAGES[name]]
    if assigned:
        yield (
            f"{chosen}={getattr(config.parallel, chosen)} assigns layers to stages, and so does "
            f"{' and '.join(assigned)}; keep {chosen} alone or remove it"
        )


def _layout_problems(config: RunConfig) -> Iterator[str]:
    text, layers = config.parallel.pipeline_model_parallel_layout or "", config.model.num_layers
    try:
        stages = parse_layout(text)
    except ConfigError as error:
        yield str(error)
        return
    head, letters = f"pipeline_model_parallel_layout={text}", "".join(stages)
    predicting = config.model.added_layers
    if letters.count("m") != predicting or stages[-1].count("m") != predicting or "mt" in stages[-1]:
        yield (
            f"{head} has {letters.count('m')} layers of multi-token prediction (m), but mtp_num_layers="
            f"{predicting or None}; write {predicting} m just before L"
        )
    for letter, what, first in (("E", "embedding", True), ("L", "output layer", False)):
        at_end = stages[0].startswith(letter) if first else stages[-1].endswith(letter)
        if letters.count(letter) != 1 or not at_end:
            where = "at the very beginning" if first else "at the very end"
            yield f"{head} has {letters.count(letter)} {letter} ({what}), not one {where}; write one {letter} there"
    if letters.count("t") != layers >= 1:
        yield (
            f"{head} has {letters.count('t')} layers (t), but num_layers={layers}; write {layers} t, "
            f"or give num_layers={letters.count('t')}"
        )
    yield from _size_problems(config, head, len(stages))


def _size_problems(config: RunConfig, head: str, stages: int) -> Iterator[str]:
    """Check the number of stages against the number of pipeline ranks; one rank has one stage."""
    pp = config.parallel.pipeline_model_parallel_size
    if leaves_rest(stages, pp) or stages > pp == 1:
        ranks = ", ".join(str(n) for n in divisors(stages) if n > 1 or stages == 1)
        legal = f"{pp}, {2 * pp}, {3 * pp}, ... stages" if pp > 1 else "1 stage"
        yield (
            f"{head} has {stages} stage{'s' * (stages > 1)}, which pipeline_model_parallel_size={pp} cannot share; "
            f"legal: {legal}, or pipeline_model_parallel_size={ranks}"
        )


def _count_problems(config: RunConfig) -> Iterator[str]:
    """Layer counts of the first and last rank after which the rest cannot be split evenly over the other ranks."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank or 1
    counts = {name: getattr(parallel, name) for name in (FIRST, LAST) if getattr(parallel, name) is not None}
    assigned = " and ".join(f"{name}={count}" for name, count in counts.items())
    uneven = " and ".join(f"{name}={count}" for name, count in counts.items() if count % max(chunks, 1))
    if pp == 1:
        yield (
            f"{assigned} needs several pipeline ranks, but pipeline_model_parallel_size=1; "
            "raise it to 2 or more or remove the count"
        )
    elif pp < 1 or chunks < 1 or min(counts.values()) < 1 or layers < pp * chunks:
        return  # other rules report this
    elif uneven:
        yield f"{uneven} cannot be split over {CHUNKS}={chunks}; legal: multiples of {chunks}"
    elif not _fits(layers - sum(counts.values()), pp - len(counts), chunks):
        yield f"{assigned} of num_layers={layers} leaves {_rest(config, counts)}; {_legal_counts(config, counts)}"


def _fits(layers: int, ranks: int, chunks: int) -> bool:
    """Whether ``layers`` can be split evenly over the chunks of ``ranks`` ranks, with at least one layer per chunk."""
    if ranks == 0:
        return layers == 0
    return layers >= ranks * chunks and layers % (ranks * chunks) == 0


def _rest(config: RunConfig, counts: dict[str, int]) -> str:
    """The part of the message about the layers of the other ranks."""
    left = config.model.num_layers - sum(counts.values())
    ranks = config.parallel.pipeline_model_parallel_size - len(counts)
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    if left < 0:
        return "less than none"
    if ranks == 0:
        return f"{left} for no other rank"
    parties = f"{ranks} other rank{'s' * (ranks > 1)}" + (f" of {chunks} chunks" if chunks > 1 else "")
    return f"{left} for {parties} to share evenly"


def _legal_counts(config: RunConfig, counts: dict[str, int]) -> str:
    """The part of the message about legal counts."""
    layers, pp = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    sums = range(len(counts) * chunks, layers + 1, chunks)
    legal = [str(n) for n in sums if _fits(layers - n, pp - len(counts), chunks)]
    if not legal:
        return f"change num_layers to a multiple of {chunks}"
    examples = ", ".join(legal[:8]) + ", ..." * (len(legal) > 8)
    return f"legal: {examples}" + " in all" * (len(counts) > 1)


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """A schedule that does not allow the number of chunks, or is given together with a custom plan."""
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    if schedule is None or config.model.num_layers < 1 or parallel.pipeline_model_parallel_size < 1:
        return
    if any(stage_problems(config)):
        return  # the number of chunks is unknown
    if parallel.pipeline_plan is not None:
        yield f"pipeline_schedule={schedule} and pipeline_plan={parallel.pipeline_plan} exclude one another; keep one"
    wanted, chunks = SCHEDULES[schedule].chunks, parallel.num_chunks(config.model.num_layers)
    if wanted is None and chunks == 1:
        yield (
            f"pipeline_schedule={schedule} with one chunk on each rank is 1f1b; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more, or choose 1f1b"
        )
    elif wanted not in (None, 1) and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"pipeline_schedule={schedule} has {wanted} chunks on each of several pipeline ranks, but there is one "
            "rank; remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    elif wanted == chunks == 2 and any(getattr(parallel, name) is not None for name in (FIRST, LAST)):
        yield (
            f"pipeline_schedule={schedule} has the first and the last stage on the first rank, so "
            f"{FIRST} and {LAST} do not apply; use pipeline_model_parallel_layout instead"
        )
    elif wanted not in (None, chunks):
        alternatives = ", ".join(name for name in TRAINING if SCHEDULES[name].chunks in (None, chunks))
        yield (
            f"pipeline_schedule={schedule} cannot have {chunks} chunks on each rank; legal: {wanted} (with {chunks} "
            f"chunks: {alternatives})"
        )
