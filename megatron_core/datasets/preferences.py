"""Pairs of a preferred and a rejected answer as training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_core.datasets.base import PackedSample
from megatron_core.datasets.conversations import ConversationDataset, ConversationFile, Message
from megatron_core.datasets.message_schemas import turns
from megatron_core.errors import DataError


class PreferenceFile(ConversationFile):
    """JSON Lines with ``chosen`` and ``rejected``, and optionally ``prompt`` (trl's formats): lists of messages, or
    texts, of which the prompt is the user's."""

    def parsed(self, content: Mapping[str, Any]) -> list[list[Message]]:
        """The two conversations of a line, which end in the chosen and in the rejected answer."""
        prompt = turns(content, "prompt", "user") if "prompt" in content else []
        return [[*prompt, *turns(content, side, "assistant")] for side in ("chosen", "rejected")]


class PreferenceDataset(ConversationDataset):
    """As ``ConversationDataset``: item 2 i is the chosen conversation of a line, item 2 i + 1 the rejected one."""

    def __getitem__(self, index: int) -> PackedSample:
        """The sample at a position of the endless order; DataError if no token of the answer fits."""
        (line,) = self.lines_of(index // 2)
        sample = self._sample([self._line(line)[index % 2]])
        if not sample["loss_mask"].any():
            raise DataError(
                f"{self.place(line)}: the prompt alone has seq_length={self.sequence_length} tokens or more, so "
                "no token of the answer remains; give a larger --seq-length, or remove the line"
            )
        return sample
