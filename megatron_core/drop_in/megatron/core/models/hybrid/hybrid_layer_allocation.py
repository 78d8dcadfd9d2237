"""Patterns of hybrid models: a letter for each layer, ``|`` between stages, ``/`` before multi-token prediction."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from megatron.core._rank_utils import log_single_rank
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import log_on_each_pipeline_stage
from megatron_core.drop_in.unsupported import unsupported_class
from megatron_core.errors import ConfigError

logger = logging.getLogger(__name__)


class Symbols:
    """The letters of layers, and the separators."""

    MAMBA = "M"
    GDN = "G"
    ATTENTION = "*"
    DS_ATTENTION = "D"
    MLA = "+"
    MLP = "-"
    MOE = "E"
    PIPE = "|"
    MTP_SEPARATOR = "/"
    VALID_LAYERS: ClassVar[set[str]] = {MAMBA, GDN, ATTENTION, DS_ATTENTION, MLA, MLP, MOE}

    @classmethod
    def name_sorted_valid_layer_symbols(cls) -> list[str]:
        """Return the letters in the order of their names."""
        return [letter for _, letter in sorted(vars(cls).items()) if str(letter) in cls.VALID_LAYERS]


@dataclass
class ParsedHybridPattern:
    """The layers of the decoder, those of one depth of multi-token prediction, and the number of depths."""

    main_pattern: str | None
    mtp_pattern: str | None
    mtp_num_depths: int


def parse_hybrid_pattern(pattern: str | None) -> ParsedHybridPattern:
    """Return the parts of a pattern. Errors: ConfigError (a ValueError) for unknown letters and different depths."""
    main, *depths = (pattern or "").split(Symbols.MTP_SEPARATOR)
    validate_segment_layers(main.replace(Symbols.PIPE, ""))
    ahead = depths if any(depths) else []
    if len(set(ahead)) > 1:
        raise ConfigError(f"All MTP patterns must be identical, but {pattern!r} has {sorted(set(ahead))}; use one")
    validate_segment_layers("".join(ahead[:1]))
    return ParsedHybridPattern(main or (pattern if not depths else None), ahead[0] if ahead else None, len(ahead))


def validate_segment_layers(segment: str) -> list[str]:
    """Return the letters of a stage. Errors: ConfigError for unknown letters, and for ``*`` with ``+`` or ``D``."""
    if wrong := [letter for letter in segment if letter not in Symbols.VALID_LAYERS]:
        legal = " ".join(Symbols.name_sorted_valid_layer_symbols())
        raise ConfigError(f"hybrid_layer_pattern: {wrong[0]!r} is not a valid layer symbol; legal: {legal}")
    if Symbols.ATTENTION in segment and {Symbols.MLA, Symbols.DS_ATTENTION} & {*segment}:
        raise ConfigError(f"Not supported to have both * and + or D in one model: {segment!r}; use one of them")
    return list(segment)


def get_hybrid_total_layer_count(pattern: str) -> int:
    """Return the number of layers of the decoder."""
    main = pattern.split(Symbols.MTP_SEPARATOR)[0].replace(Symbols.PIPE, "")
    return len(validate_segment_layers(main))


def get_hybrid_total_pipeline_segment_count(pattern: str) -> int:
    """Return the number of stages."""
    return pattern.split(Symbols.MTP_SEPARATOR)[0].count(Symbols.PIPE) + 1


def get_hybrid_layer_counts(pattern: str) -> dict[str, int]:
    """Return the number of layers of each letter, those of multi-token prediction once for each depth."""
    parsed = parse_hybrid_pattern(pattern)
    whole = (parsed.main_pattern or "") + (parsed.mtp_pattern or "") * parsed.mtp_num_depths
    return {letter: whole.count(letter) for letter in Symbols.name_sorted_valid_layer_symbols()}


def _spread(letters: list[str], new: str, section: float) -> None:
    """Replace Mamba layers by ``new``, with about ``section`` Mamba layers before each."""
    left = section
    for index, letter in enumerate(letters):
        if letter == Symbols.MAMBA and left < 0.5:
            letters[index] = new
            left += section
        elif letter == Symbols.MAMBA:
            left -= 1


def pattern_from_ratios(num_layers: int, attention_ratio: float = 0.0, mlp_ratio: float = 0.0) -> str:
    """Return a pattern with these fractions of attention and MLP layers, evenly spaced among Mamba layers."""
    legal = num_layers > 0 and attention_ratio >= 0.0 and mlp_ratio >= 0.0 and attention_ratio + mlp_ratio <= 1.0
    assert legal, f"{num_layers=}, {attention_ratio=}, {mlp_ratio=}: give layers, and ratios whose sum is at most 1"
    letters = [Symbols.MAMBA] * num_layers
    attention, mlp = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    _spread(letters, Symbols.ATTENTION, (num_layers - attention) / (attention + 1))
    if mlp:
        _spread(letters, Symbols.MLP, (num_layers - attention - mlp) / mlp)
    return "".join(letters)


def select_pipeline_segment(
    main_pattern: str,
    pp_group: Any,
    vp_stage: int | None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    tp_group: Any = None,
    dp_cp_group: Any = None,
) -> tuple[list[str], int]:
    """Return the letters of this rank's stage or chunk, and the number of layers before it.

    Stages are those of ``|`` in the pattern; without them layers are divided evenly, except for the given numbers of
    the first and the last stage. Errors: ConfigError for stages that the ranks and chunks cannot share.
    """
    rank, ranks = (0, 1) if pp_group is None else (dist.get_rank(pp_group), dist.get_world_size(pp_group))
    segments, ends = main_pattern.split(Symbols.PIPE), (first_stage_layers, last_stage_layers)
    if len(segments) > 1 and ends != (None, None):
        raise ConfigError(
            f"Cannot specify the numbers of layers {ends} of the first and the last stage when hybrid_layer_pattern="
            f"{main_pattern} contains pipe ('|') separators; leave one of them out"
        )
    if len(segments) == 1 and ranks > 1:
        if vp_stage is not None:
            raise ConfigError(
                f"Virtual pipeline parallelism (vp_stage={vp_stage}) is not supported when hybrid_layer_pattern="
                f"{main_pattern} has no pipe ('|') separators; add them"
            )
        text = "DEPRECATION: divide hybrid_layer_pattern=%s into pipeline stages with pipe ('|') separators"
        log_single_rank(logger, logging.WARNING, text, main_pattern)
        segments = _divided(main_pattern, ranks, *ends)
    if len(segments) > 1 and len(segments) % ranks:
        raise ConfigError(
            f"hybrid_layer_pattern={main_pattern} has {len(segments)} stages, which must be evenly divisible by "
            f"pipeline_model_parallel_size={ranks}"
        )
    index = (vp_stage or 0) * ranks + rank
    if index >= len(segments):
        raise ConfigError(f"stage {index} (pp_rank={rank}, vp_stage={vp_stage}) is out of range for {len(segments)}")
    letters, offset = validate_segment_layers(segments[index]), len("".join(segments[:index]))
    text = f"HybridModel: pp_rank={rank}/{ranks}, vp_stage={vp_stage}, layers={segments[index]!r}, {offset=}"
    log_on_each_pipeline_stage(logger, logging.INFO, text, tp_group=tp_group, dp_cp_group=dp_cp_group)
    return letters, offset


def _divided(pattern: str, ranks: int, first: int | None, last: int | None) -> list[str]:
    """Return the letters of each stage."""
    before, after = ([] if count is None else [count] for count in (first, last))
    inner = ranks - len(before) - len(after)
    middle = len(pattern) - sum(before) - sum(after)
    if middle % max(inner, 1):
        raise ConfigError(
            f"Middle layers ({middle}) of hybrid_layer_pattern={pattern} must be evenly divisible by {inner} stages"
        )
    counts = [*before, *[middle // max(inner, 1)] * inner, *after]
    begins = [sum(counts[:rank]) for rank in range(ranks)]
    return [pattern[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]


def get_layer_maps_from_layer_type_list(layer_type_list: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return for each letter the positions of its layers, each with its number among the layers of this letter."""
    letters = Symbols.name_sorted_valid_layer_symbols()
    places = {letter: [i for i, found in enumerate(layer_type_list) if found == letter] for letter in letters}
    return {letter: {place: number for number, place in enumerate(found)} for letter, found in places.items()}


HybridStack = unsupported_class(
    "megatron.core.models.hybrid.hybrid_block.HybridStack",
    "the layers of a hybrid model cannot be built alone; use HybridModel with a hybrid_layer_pattern",
)
hybrid_stack_spec = hybrid_inference_stack_spec = ModuleSpec(module=HybridStack)
