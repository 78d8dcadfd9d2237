"""Pairs of a preferred and a rejected answer as training data."""

from collections.abc import Mapping
from typing import Any

from megatron_core.datasets.base import PackedSample
from megatron_core.errors import DataError
from megatron_core.features.conversations import line_notes as notes
from megatron_core.features.conversations import schemas
from megatron_core.features.conversations.build import ConversationData
from megatron_core.features.conversations.dataset import ConversationDataset, ConversationFile
from megatron_core.features.conversations.encoder import Message
from megatron_core.features.conversations.message_keys import check_line, is_learned

SIDES = ("chosen", "rejected")


class PreferenceFile(ConversationFile):
    """JSON Lines with ``chosen`` and ``rejected``, and optionally ``prompt`` (trl's formats): lists of messages, or
    texts, of which the prompt is the user's."""

    def __getitem__(self, line: int) -> schemas.Line:
        """A line; DataError if it has no messages, or if its conversations do not answer the same prompt.

        As in trl, both answers begin with the first message in which the conversations differ.
        """
        content = super().__getitem__(line)
        chosen, rejected = content.conversations
        shared = [first == second for first, second in zip(chosen, rejected, strict=False)]
        # The last message of the shorter conversation is an answer, also if the other one begins with it.
        prompt_length = [*shared[:-1], False].index(False)
        for side, messages in zip(SIDES, content.conversations, strict=True):
            if (role := messages[prompt_length]["role"]) != "assistant":
                raise DataError(
                    f"chosen and rejected differ from message {prompt_length + 1} on, which in {side} has the role "
                    f"{role!r}; both must begin with the same messages, and continue with the assistant's"
                )
            if not all(is_learned(message) for message in messages[prompt_length:] if message["role"] == "assistant"):
                raise DataError(f"a message of {side} is excluded from the loss; remove its flag, or the line")
        if all(message["role"] == "system" for message in chosen[:prompt_length]):
            raise DataError("chosen and rejected answer no message; give prompt, or lists with the user's messages")
        return content._replace(prompt_length=prompt_length)

    def parsed(self, content: Mapping[str, Any]) -> list[list[Message]]:
        """The two conversations of a line, which end in the chosen and in the rejected answer."""
        check_line(content)
        prompt = self._prompt(content)
        answers = (schemas.turns(content, side, "assistant") for side in SIDES)
        return [[*schemas.with_system(content, [*prompt, *answer])] for answer in answers]

    def used_keys(self, content: Mapping[str, Any]) -> set[str]:
        """The keys that ``parsed`` reads."""
        if _has_own_prompt(content):
            return {*SIDES, *schemas.system_keys(content)}
        if content.get("prompt") is not None:
            return {*SIDES, "prompt", *schemas.system_keys(content)}
        return {*SIDES, *schemas.question_keys(content)}

    def _prompt(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages before both answers."""
        if _has_own_prompt(content):
            return []
        if content.get("prompt") is not None:
            return schemas.turns(content, "prompt", "user")
        if any(content.get(name) is not None for name in schemas.QUESTIONS):
            return [*schemas.history(content), schemas.asked(content)]
        for name in ("messages", "conversations", "input"):
            if content.get(name):
                raise DataError(f"{name} next to chosen and rejected is not read; write its messages as prompt")
        return []


def _has_own_prompt(content: Mapping[str, Any]) -> bool:
    """Whether chosen and rejected are whole conversations, for which trl ignores a text as prompt."""
    if isinstance(content.get("prompt"), list) or not all(isinstance(content.get(side), list) for side in SIDES):
        return False
    roles = [message["role"] for message in schemas.turns(content, "chosen", "assistant")]
    return "user" in roles[:2]


class PreferenceDataset(ConversationDataset):
    """As ``ConversationDataset``: item 2 i is the chosen conversation of a line, item 2 i + 1 the rejected one."""

    def describe(self) -> tuple[str, ...]:
        """Notes: the keys of lines that have no effect."""
        lines = notes.evenly_spaced(self._lines, notes.KEYS_CHECKED)
        return tuple(notes.of_keys(map(self.read, lines), self._encoder.template.names))

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


class PreferenceData(ConversationData):
    """The data sets of ``--dpo``."""

    setting = "dpo"
    file_type = PreferenceFile
    dataset_type = PreferenceDataset
