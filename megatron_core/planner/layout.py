"""Short names of layouts: ``tp2 pp2 v2 dp2 sp zero1 overlap``, ``pp4 zb_h1``."""

import re
from dataclasses import dataclass

from megatron_core.config.parallel import ParallelConfig
from megatron_core.errors import LayoutError
from megatron_core.schedules import schedules, training_schedules

_SIZES = {"tp": "tp", "cp": "cp", "pp": "pp", "v": "chunks", "dp": "dp", "ep": "ep", "etp": "etp"}
_OTHER_NAMES = {"x": "v"}
"""Words that are read as others: ``x2`` as ``v2``."""
_SWITCHES = {
    "sp": ("sequence_parallel", True),
    **{f"zero{stage}": ("zero_stage", stage) for stage in (1, 2, 3)},
    "overlap": ("overlap", True),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, schedule and sharding."""

    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    pp: int = 1
    """Pipeline ranks."""
    chunks: int = 1
    """Chunks of layers on each pipeline rank, unless the schedule fixes their number."""
    dp: int = 1
    """Copies of the model."""
    ep: int = 1
    """Ranks over which the experts are split."""
    etp: int | None = None
    """Ranks over which each expert is split; None: as ``tp``."""
    sequence_parallel: bool = False
    """Activations outside the matrix products are split along the sequence over tp."""
    zero_stage: int = 0
    """Tensors sharded over the copies: 0 none, 1 optimizer state, 2 also gradients, 3 also weights (ZeRO, Rajbhandari
    et al. 2020)."""
    schedule: str | None = None
    """The pipeline schedule; None: the default."""
    overlap: bool = False
    """Gradients are reduced during backward and, if sharded, weights gathered during forward."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The inverse of ``str``: words in any order, sizes not given are 1. ``LayoutError`` for other words."""
        values: dict[str, int | bool | str] = {}
        for word in text.split() if text.strip() != "1 process" else ():
            name, value = _field_of(word, text)
            if name in values:
                raise LayoutError(
                    f"layout {text!r}: {word!r} gives {name} a second time; use each of {_words()} at most once"
                )
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def of(cls, parallel: ParallelConfig, num_layers: int, world_size: int) -> "Layout":
        """The layout of these settings."""
        return cls.parse(parallel.layout_words(num_layers, world_size))

    def __str__(self) -> str:
        sizes = {word: getattr(self, name) for word, name in _SIZES.items()}
        words = [f"{word}{size}" for word, size in sizes.items() if size is not None and (size > 1 or word == "etp")]
        words += [self.schedule] if self.schedule else []
        words += [word for word, (name, value) in _SWITCHES.items() if getattr(self, name) == value]
        return " ".join(words) or "1 process"

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        implied = schedules()[self.schedule].chunks if self.schedule else None
        return self.pp * (implied or self.chunks)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.tp * self.cp * self.pp * self.dp

    def settings(self) -> dict[str, object]:
        """The layout as settings for ``RunConfig.from_flat``."""
        return {
            **ParallelConfig().stage_defaults(),
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "num_virtual_stages_per_pipeline_rank": self.chunks if self.chunks > 1 else None,
            "pipeline_schedule": self.schedule,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sequence_parallel,
            "use_distributed_optimizer": False,
            "zero_stage": self.zero_stage,
            "data_parallel_sharding_strategy": None,
            "zero3_keep_after_forward": False,
            "zero3_param_persistence_threshold": 0,
            "num_distributed_optimizer_instances": 1,
            "overlap_grad_reduce": self.overlap,
            "overlap_param_gather": self.overlap and self.zero_stage > 0,
        }


def _words() -> str:
    return f"tpN, cpN, ppN, vN, dpN, epN, etpN, sp, zero1, zero2, zero3, overlap, {', '.join(training_schedules())}"


def _field_of(word: str, text: str) -> tuple[str, int | bool | str]:
    if word in _SWITCHES:
        return _SWITCHES[word]
    if word in training_schedules():
        return "schedule", word
    match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
    axis = None if match is None else _OTHER_NAMES.get(match[1], match[1])
    if match is None or axis not in _SIZES:
        raise LayoutError(f"layout {text!r} has the word {word!r}; legal: {_words()} (for example 'tp2 pp2 v2 sp')")
    return _SIZES[axis], int(match[2])
