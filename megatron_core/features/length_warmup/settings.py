"""The setting of short sequences at the start, and its rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config.data import DataConfig
from megatron_core.config.growth import Growth
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, section, setting
from megatron_core.features.batch_growth.rules import fit_problems
from megatron_core.features.batch_growth.settings import Ramp


@dataclass(frozen=True, kw_only=True)
@section(when=ALWAYS, resume=Resume.REPORTED)
class LengthWarmupConfig(DataConfig):
    """Sequences that are short at the start of a training."""

    seq_length_warmup: tuple[int, int, int] | None = setting(None)
    """START INCREMENT SAMPLES: truncate sequences to START tokens at first. During the first SAMPLES samples the length
    grows in equal steps of INCREMENT to --seq-length (Li et al. 2021)."""

    @property
    def ramp(self) -> Ramp | None:
        """The ramp of the setting."""
        return None if self.seq_length_warmup is None else Ramp(*self.seq_length_warmup, self.seq_length)

    @property
    def length_growth(self) -> Growth:
        """Tokens in a sequence as a function of the samples consumed."""
        return self.ramp or super().length_growth

    @property
    def length_units(self) -> tuple[int, ...]:
        """Numbers of tokens of which every sequence length is a sum."""
        return (*super().length_units, *(() if self.ramp is None else (self.ramp.start, self.ramp.increment)))


def warmup_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the ramp ends at the sequence length, and that all lengths fit the layout."""
    ramp = config.data.section(LengthWarmupConfig).ramp
    if ramp is not None:
        yield from fit_problems("seq_length_warmup", ramp, "seq_length", *config.parallel.sequence_unit)
