"""Conversations as training data: chat template, loss only on the assistant's answers, one sample per line."""

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_core.config import DataConfig
from megatron_core.datasets.base import PackedSample
from megatron_core.datasets.blend import parse_blend
from megatron_core.datasets.build import Splits
from megatron_core.datasets.keyed_dataset import KeyedPermutation
from megatron_core.datasets.message_schemas import messages_of
from megatron_core.datasets.paths import DEFAULT_SPLIT, parse_split, read_paths, split_ranges
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.base import BaseTokenizer, Offsets, end_ids
from megatron_core.tokenizers.chat import ChatTemplate, chat_template_of

Message = Mapping[str, Any]


class ConversationFile:
    """JSON Lines with messages in a schema of ``message_schemas``; the offsets of the lines are kept in memory."""

    def __init__(self, path: str) -> None:
        self.path, self._begins = Path(path), array("q")
        if self.path.exists() and not self.path.is_file():
            raise DataError(
                f"{path} is not a regular file; --sft needs JSON Lines in a file that it can read in any order"
            )
        try:
            with self.path.open("rb") as file:
                at = 0
                for line in file:
                    if line.strip():
                        self._begins.append(at)
                    at += len(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; --sft needs JSON Lines with messages") from None
        if not self._begins:
            raise DataError(f"{path} is empty; --sft needs JSON Lines with messages")

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, line: int) -> tuple[list[list[Message]], Any]:
        """The conversations of a line, each starting at a system message, and their tools."""
        with self.path.open("rb") as file:
            file.seek(self._begins[line])
            text = file.readline()
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not JSON ({error}); correct or remove the line") from None
        if not isinstance(content, dict):
            raise DataError(f"is a {type(content).__name__}, expected an object with messages")
        conversations: list[list[Message]] = []
        for message in messages_of(content):
            if not conversations or message["role"] == "system":
                conversations.append([])
            conversations[-1].append(message)
        return conversations, content.get("tools")

    def place(self, line: int) -> str:
        """The file and number of a line, counted from 1 and including blank lines, as in editors."""
        left, number = self._begins[line], 1
        with self.path.open("rb") as file:
            while left and (data := file.read(min(left, 1 << 20))):
                left, number = left - len(data), number + data.count(b"\n")
        return f"{self.path}, line {number}"


Span = tuple[int, int]
"""Half-open character range of a text."""


@dataclass(frozen=True)
class ConversationTokenizer:
    """Converts messages to tokens and marks the tokens of answers."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
        """Tokens of the whole conversation as one text, and True for those with a character of an answer.

        An answer is the text that the template marks with ``{% generation %}``. Without marks it is the text that a
        message of the assistant adds after its prompt, up to the end-of-turn token (white space after it is never
        generated). The tokens equal ``apply_chat_template(messages, tokenize=True)`` in transformers.
        """
        text, marked = self.template.render_answers(messages, tools=tools)
        ids, offsets = cast(BaseTokenizer, self.tokenizer).tokenize_with_offsets(text)
        answers = marked if self.template.marks_answers else list(self._answers(messages, tools, text))
        if not any(begin < end for begin, end in answers) and any(
            message["role"] == "assistant" and message.get("content") for message in messages
        ):
            raise DataError(
                "the chat template writes nothing for an answer, so nothing would be learned; choose another one "
                "with --chat-template"
            )
        counted = [False] * len(ids)
        for begin, end in answers:
            if not self.template.marks_answers:
                end = self._turn_end(ids, offsets, begin + len(text[begin:end].rstrip()), end)
            for number, (first, last) in enumerate(offsets):
                counted[number] |= first < end and max(last, first + 1) > begin
        return ids, counted

    def _answers(self, messages: Sequence[Message], tools: Any, text: str) -> Iterator[Span]:
        """The characters that each assistant message adds to ``text`` after its prompt."""
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self.template.render(messages[:number], tools=tools, add_generation_prompt=True)
                whole = self.template.render(messages[: number + 1], tools=tools, add_generation_prompt=False)
                if not text.startswith(whole) or not whole.startswith(asked):
                    raise DataError(
                        "the chat template changes earlier messages when later ones are added, so answers cannot be "
                        "located; choose another one with --chat-template, or one that marks answers "
                        "with {% generation %}"
                    )
                if len(asked) == len(whole) and message.get("content"):
                    raise DataError(
                        "the chat template writes nothing for an answer, so nothing would be learned; choose another "
                        "one with --chat-template"
                    )
                yield len(asked), len(whole)

    def _turn_end(self, ids: Sequence[int], offsets: Offsets, visible: int, end: int) -> int:
        """End of an answer up to ``end``: after its last ``visible`` character if an end-of-turn token is there."""
        last = bisect_left(offsets, visible, key=lambda span: span[0]) - 1
        return visible if last >= 0 and ids[last] in self._ends else end

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that may end a turn: end-of-text tokens and added tokens outside the model's vocabulary."""
        return end_ids(self.tokenizer) | getattr(self.tokenizer, "added_ids", frozenset)()


class ConversationDataset:
    """Lines of files in a new keyed order per round: item i is line KeyedPermutation(lines, (seed, round))[k].

    A line is a sample: its conversations, each a document with its own positions, truncated or padded to
    ``sequence_length``. Only labels that are tokens of an answer count. Source: Megatron-LM's ``SFTDataset``.
    """

    def __init__(
        self,
        files: Sequence[ConversationFile],
        lines: Sequence[int],
        encoder: ConversationTokenizer,
        sequence_length: int,
        seed: int,
    ) -> None:
        self.sequence_length = sequence_length
        self._files, self._lines, self._encoder, self._seed = files, lines, encoder, seed
        own = encoder.tokenizer
        self._padding = next((i for i in (getattr(own, "pad", None), own.eod) if i is not None), 0)

    def __getitem__(self, index: int) -> PackedSample:
        """The sample at a position of the endless order."""
        number, position = divmod(index, len(self._lines))
        line = self._lines[KeyedPermutation(len(self._lines), (self._seed, number))[position]]
        for file in self._files:
            if line < len(file):
                try:
                    return self._sample(*file[line])
                except DataError as error:
                    raise DataError(f"{file.place(line)}: {error}") from None
            line -= len(file)
        raise IndexError(f"sample {index}")

    def _sample(self, conversations: Sequence[Sequence[Message]], tools: Any) -> PackedSample:
        length = self.sequence_length
        lengths: list[int] = []
        tokens: list[int] = []
        counted: list[bool] = []
        for conversation in conversations:
            ids, answers = self._encoder.encode(conversation, tools)
            # The first token has no preceding token in its conversation, so it is not predicted.
            tokens += ids
            counted += [False, *answers[1:]][: len(ids)]
            lengths.append(min(len(ids), length - sum(lengths)))
        missing = max(length + 1 - len(tokens), 0)
        filled = np.array(tokens[: length + 1] + [self._padding] * missing, dtype=np.int64)
        mask = np.array(counted[: length + 1] + [False] * missing, dtype=np.float32)
        lengths = [each for each in lengths if each]
        if (rest := length - sum(lengths)) > 0:
            lengths.append(rest)
        positions = np.concatenate([np.arange(each, dtype=np.int64) for each in lengths])
        return {
            "tokens": filled[:-1],
            "labels": filled[1:],
            "loss_mask": mask[1:],
            "position_ids": positions,
            "document_lengths": np.array(lengths, dtype=np.int64),
        }


def build_conversations(data: DataConfig, *, seed: int, tokenizer: Tokenizer | None) -> Splits:
    """The data sets of ``--sft``: files of ``data_path`` whose lines are divided by ``split``, or files per split."""
    template = None if tokenizer is None else chat_template_of(tokenizer, data.chat_template)
    if tokenizer is None or template is None:
        raise ConfigError(
            "sft=True needs a chat template, which is a part of many tokenizers of Hugging Face; give its folder as "
            "--tokenizer-model, or a template as --chat-template FILE"
        )
    encoder, paths = ConversationTokenizer(tokenizer, template), read_paths(data)

    def dataset(files: Sequence[ConversationFile], lines: Sequence[int]) -> ConversationDataset | None:
        return ConversationDataset(files, lines, encoder, data.seq_length, seed) if len(lines) else None

    if paths.phases:
        files = _files(paths.phases[-1].data_path)
        ranges = split_ranges(parse_split(data.split or DEFAULT_SPLIT), sum(map(len, files)))
        train, valid, test = (dataset(files, lines) for lines in ranges)
        return Splits(train, valid, test)
    own = [_files(each) for each in paths.own]
    train, valid, test = (dataset(files, range(sum(map(len, files)))) for files in own)
    return Splits(train, valid, test)


def _files(paths: Sequence[str]) -> list[ConversationFile]:
    if not paths:
        return []
    weights, files = parse_blend(paths)
    if weights is not None and len(files) > 1:
        raise ConfigError(f"{' '.join(paths)}: --sft reads each line once per round; remove the weights")
    return [ConversationFile(path) for path in files]
