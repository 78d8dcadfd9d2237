"""Rules of fill-in-the-middle."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.fill_in_the_middle.settings import rearranges_documents


def rearrangement_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which documents cannot be rearranged."""
    if rearranges_documents(config) and config.data.tokenizer is None:
        yield "fim_data=True needs the end-of-document id of a tokenizer; give --tokenizer-type or remove it"
