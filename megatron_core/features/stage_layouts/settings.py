"""Settings that assign layers to stages: a layout, layer counts of both ends, or a size of chunks; their rules."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.partition import Ends, layer_runs, partition
from megatron_core.config.rule_helpers import divisors, exclusive, leaves_rest
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import BY_RULE, section, setting
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.stage_layouts.spellings import parse_layout

ENDS = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
CHUNKS = "num_virtual_stages_per_pipeline_rank"


@dataclass(frozen=True, kw_only=True)
@section()
class StageLayoutConfig(ParallelConfig):
    """The layers of each stage."""

    pipeline_model_parallel_layout: str | None = setting(None, when=BY_RULE)
    """Contents of the stages, for example Et*3|(tt|)*29|L: E embedding, t layer, L output layer and loss, | next stage,
    *n repeats; stage i is on pipeline rank i mod PP. Default: the split whose slowest stage is fastest."""
    decoder_first_pipeline_num_layers: int | None = setting(None, r.COUNT, when=BY_RULE)
    """Number of layers on the first pipeline rank, in all its chunks; the others are split evenly over the other
    ranks."""
    decoder_last_pipeline_num_layers: int | None = setting(None, r.COUNT, when=BY_RULE)
    """Number of layers on the last pipeline rank, in all its chunks; the others are split evenly over the other
    ranks."""
    account_for_embedding_in_pipeline_split: bool = setting(False, when=c.PIPELINE)
    """Count the embedding as one layer when layers are split over stages; default: its cost is its FLOPs, 0."""
    account_for_loss_in_pipeline_split: bool = setting(False, when=c.PIPELINE)
    """Count output layer and loss as one layer when layers are split over stages; default: their cost is their
    FLOPs."""
    num_layers_per_virtual_pipeline_stage: int | None = setting(None, r.COUNT, when=BY_RULE)
    """Number of layers in each chunk of the interleaved schedule."""

    @classmethod
    def stage_defaults(cls) -> Mapping[str, bool | None]:
        """The settings of stages, with these."""
        return {**ASSIGNING, **super().stage_defaults()}

    def stage_problems(self, config: RunConfig) -> Iterator[str]:
        """Layouts and layer counts that contradict the model, the pipeline or each other."""
        return stage_problems(config)

    @property
    def accounted_layers(self) -> int:
        """Number of additional layers, 0 to 2, for which embedding and loss count."""
        return int(self.account_for_embedding_in_pipeline_split) + int(self.account_for_loss_in_pipeline_split)

    def stages(self, config: RunConfig, num_stages: int) -> list[range] | None:
        """The layers of each stage from the layout, else from the layer counts, else with ends that count as layers."""
        num_layers = config.model.num_layers
        if self.pipeline_model_parallel_layout is not None:
            sizes = [letters.count("t") for letters in parse_layout(self.pipeline_model_parallel_layout)]
            if len(sizes) != num_stages:
                raise LayoutError(
                    f"pipeline_model_parallel_layout={self.pipeline_model_parallel_layout} has {len(sizes)} stages, "
                    f"but there are {num_stages} (ranks x chunks); write {num_stages} stages"
                )
            return layer_runs(sizes)
        if (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers) != (None, None):
            return layer_runs(self._sizes_by_count(num_layers, num_stages))
        if self.accounted_layers or self.num_layers_per_virtual_pipeline_stage is not None:
            embedding = Fraction(int(self.account_for_embedding_in_pipeline_split))
            output = Fraction(int(self.account_for_loss_in_pipeline_split))
            return partition(num_layers, num_stages, Ends(embedding, output, as_layers=True))
        return None

    def num_chunks(self, num_layers: int) -> int:
        """Number of chunks of layers on each pipeline rank; 1 without interleaving."""
        if self.pipeline_model_parallel_layout is not None:
            return max(len(parse_layout(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size, 1)
        if self.num_layers_per_virtual_pipeline_stage:  # 0 is out of range
            per_rank = (num_layers + self.accounted_layers) // self.pipeline_model_parallel_size
            return max(per_rank // self.num_layers_per_virtual_pipeline_stage, 1)
        return super().num_chunks(num_layers)

    def _sizes_by_count(self, num_layers: int, num_stages: int) -> list[int]:
        """Number of layers of each stage for given counts of the first or last rank, evenly over a rank's chunks."""
        ranks = self.pipeline_model_parallel_size
        counts: dict[int, int | None] = {
            0: self.decoder_first_pipeline_num_layers,
            ranks - 1: self.decoder_last_pipeline_num_layers,
        }
        count_by_rank = {rank: count for rank, count in counts.items() if count is not None}
        other_count = (num_layers - sum(count_by_rank.values())) // max(ranks - len(count_by_rank), 1)
        return [count_by_rank.get(stage % ranks, other_count) // (num_stages // ranks) for stage in range(num_stages)]


ASSIGNING = {name: getattr(StageLayoutConfig, name) for name in StageLayoutConfig.__annotations__}
"""The settings, with their defaults."""


def stage_problems(config: RunConfig) -> Iterator[str]:
    """Layouts and layer counts that contradict the model, the pipeline or each other."""
    if config.value("pipeline_model_parallel_layout") is not None:
        yield from _contradictions(config, "pipeline_model_parallel_layout", [*ASSIGNING, CHUNKS])
        yield from _layout_problems(config)
        return
    counted = next((name for name in ENDS if getattr(config.parallel, name) is not None), None)
    if counted is not None:
        yield from _contradictions(config, counted, set(ASSIGNING).difference(ENDS))
        yield from _count_problems(config)


def _contradictions(config: RunConfig, chosen: str, alternatives: Iterable[str]) -> Iterator[str]:
    """Other settings that also determine how layers are split."""
    values = {name: getattr(config.parallel, name) for name in sorted(alternatives) if name != chosen}
    assigned = [f"{name}={value}" for name, value in values.items() if value != ASSIGNING.get(name)]
    if assigned:
        yield (
            f"{chosen}={getattr(config.parallel, chosen)} assigns layers to stages, and so does "
            f"{' and '.join(assigned)}; keep {chosen} alone or remove it"
        )


def _layout_problems(config: RunConfig) -> Iterator[str]:
    text, layers = config.value("pipeline_model_parallel_layout"), config.model.num_layers
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
    counts = {name: getattr(parallel, name) for name in ENDS if getattr(parallel, name) is not None}
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
        yield f"{assigned} of num_layers={layers} leaves {_count_fault(config, counts)}"


def _fits(layers: int, ranks: int, chunks: int) -> bool:
    """Whether ``layers`` can be split evenly over the chunks of ``ranks`` ranks, with at least one layer per chunk."""
    if ranks == 0:
        return layers == 0
    return layers >= ranks * chunks and layers % (ranks * chunks) == 0


def _count_fault(config: RunConfig, counts: dict[str, int]) -> str:
    """The part of the message about the layers of the other ranks, and about legal counts."""
    layers, chunks = config.model.num_layers, config.parallel.num_virtual_stages_per_pipeline_rank or 1
    left = layers - sum(counts.values())
    ranks = config.parallel.pipeline_model_parallel_size - len(counts)
    parties = f"{ranks} other rank{'s' * (ranks > 1)}" + (f" of {chunks} chunks" if chunks > 1 else "")
    fault = f"{left} for {parties} to share evenly" if ranks else f"{left} for no other rank"
    sums = range(len(counts) * chunks, layers + 1, chunks)
    legal = [str(n) for n in sums if _fits(layers - n, ranks, chunks)]
    examples = ", ".join(legal[:8]) + ", ..." * (len(legal) > 8) + " in all" * (len(counts) > 1)
    way_out = f"legal: {examples}" if legal else f"change num_layers to a multiple of {chunks}"
    return f"{'less than none' if left < 0 else fault}; {way_out}"


def stage_layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Sizes of chunks that do not divide the layers, and layer counts of ranks with stages at both ends."""
    parallel, layers = config.parallel.section(StageLayoutConfig), config.model.num_layers
    pp, per_chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if any(size is not None and size < 1 for size in (pp, layers, per_chunk, chunks)):
        return
    if per_chunk is not None and parallel.pipeline_model_parallel_layout is None:
        if chunks is not None:
            yield exclusive(f"num_layers_per_virtual_pipeline_stage={per_chunk}", f"{CHUNKS}={chunks}")
        if pp == 1:
            yield (
                f"num_layers_per_virtual_pipeline_stage={per_chunk} needs a pipeline of several ranks, but this one "
                "has one rank; remove it or raise pipeline_model_parallel_size to 2 or more"
            )
        if leaves_rest(layers + parallel.accounted_layers, pp * per_chunk):
            yield _uneven_chunks(layers, parallel.accounted_layers, pp, per_chunk)
    if pp == 1 or parallel.implied_chunks != 2 or any(stage_problems(config)):
        return
    if parallel.num_chunks(layers) == 2 and any(getattr(parallel, name) is not None for name in ENDS):
        yield (
            f"pipeline_schedule={parallel.pipeline_schedule} has the first and the last stage on the first rank, so "
            f"{' and '.join(ENDS)} do not apply; use pipeline_model_parallel_layout instead"
        )


def _uneven_chunks(layers: int, accounted: int, pp: int, per_chunk: int) -> str:
    """The message for chunks that do not divide evenly; ``accounted``: embedding and loss if they count as layers."""
    what = f"(num_layers + {accounted} accounted for)" if accounted else "num_layers"
    layers += accounted
    head = f"num_layers_per_virtual_pipeline_stage={per_chunk} does not divide "
    if layers % pp:
        return head + (
            f"{what} / pipeline_model_parallel_size = {layers} / {pp}, which is not an integer; "
            "use num_virtual_stages_per_pipeline_rank instead"
        )
    return head + (
        f"{what} / pipeline_model_parallel_size = {layers} / {pp} = {layers // pp}; "
        f"legal: {', '.join(map(str, divisors(layers // pp)))}"
    )
