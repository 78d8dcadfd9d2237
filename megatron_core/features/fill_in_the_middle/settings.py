"""Settings of fill-in-the-middle, and their rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting

REARRANGED = given("fim_data")


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class FillInTheMiddleConfig:
    """Rearrange documents for fill-in-the-middle."""

    fim_data: bool = setting(False, when=ALWAYS)
    """Fill-in-the-middle (FIM): rearrange documents so that the model learns to write a missing middle part."""
    fim_rate: float = setting(0.5, r.UP_TO_1, when=REARRANGED)
    """Share of documents that --fim-data rearranges."""
    fim_spm_rate: float = setting(0.5, r.UP_TO_1, when=REARRANGED)
    """Share of rearranged documents in which the suffix precedes the prefix (SPM)."""
    fim_split_sample: str | None = setting(None, needs=(REARRANGED, given("fim_fragment_rate", "X")))
    """Token that splits a document into fragments, which are rearranged separately."""
    fim_fragment_rate: float | None = setting(None, r.UP_TO_1, needs=(REARRANGED, given("fim_split_sample", "TOKEN")))
    """Share of fragments that are rearranged; required with --fim-split-sample."""
    fim_no_prefix: str | None = setting(None, needs=REARRANGED)
    """Do not rearrange documents or fragments that begin with this text."""
    fim_prefix_token: str = setting("<fim_prefix>", when=REARRANGED)
    """Token before the prefix."""
    fim_middle_token: str = setting("<fim_middle>", when=REARRANGED)
    """Token before the middle part, which is placed last."""
    fim_suffix_token: str = setting("<fim_suffix>", when=REARRANGED)
    """Token before the suffix."""
    fim_pad_token: str = setting("<fim_pad>", when=REARRANGED)
    """Token that pads a sequence whose documents became shorter; masked in the loss."""
    fim_eod_token: str | None = setting(None, needs=REARRANGED)
    """Token that ends a document; default: the tokenizer's end-of-document token."""


def rearranges_documents(config: RunConfig) -> bool:
    """Whether a run rearranges documents."""
    return config.section(FillInTheMiddleConfig).fim_data


def rearrangement_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which documents cannot be rearranged."""
    if rearranges_documents(config) and config.data.tokenizer is None:
        yield "fim_data=True needs the end-of-document id of a tokenizer; give --tokenizer-type or remove it"
