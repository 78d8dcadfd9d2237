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

from megatron_core.datasets.base import PackedSample
from megatron_core.datasets.keyed_dataset import KeyedPermutation
from megatron_core.datasets.message_schemas import messages_of, tools_of
from megatron_core.datasets.packing import first_fit
from megatron_core.errors import DataError, shortened
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.base import BaseTokenizer, Offsets, end_ids
from megatron_core.tokenizers.chat import ChatTemplate

Message = Mapping[str, Any]
OTHER_FORMATS = {
    b"[": ("a JSON array", "jq -c '.[]' {old} > {new}"),
    b"PAR1": ("a Parquet file", "pandas.read_parquet('{old}').to_json('{new}', orient='records', lines=True)"),
    b"\x1f\x8b": ("compressed", "gzip -dc {old} > {new}"),
}
"""First bytes of files that are not JSON Lines, with their kind and a conversion."""


class ConversationFile:
    """JSON Lines with messages in a schema of ``message_schemas``; the offsets of the lines are kept in memory."""

    def __init__(self, path: str) -> None:
        self.path, self._begins = Path(path), array("q")
        if self.path.exists() and not self.path.is_file():
            raise DataError(
                f"{path} is not a regular file; --sft and --dpo need JSON Lines in a file that it can read in any order"
            )
        try:
            with self.path.open("rb") as file:
                at = 0
                for line in file:
                    if line.strip():
                        if not self._begins:
                            self._check_format(line)
                        self._begins.append(at)
                    at += len(line)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; --sft and --dpo need JSON Lines with messages"
            ) from None
        if not self._begins:
            raise DataError(f"{path} is empty; --sft and --dpo need JSON Lines with messages")

    def _check_format(self, line: bytes) -> None:
        """DataError if the first line is of a file in another format."""
        begin, name = line.removeprefix(b"\xef\xbb\xbf").lstrip(), self.path
        for first, (kind, way) in OTHER_FORMATS.items():
            if begin.startswith(first):
                raise DataError(
                    f"{name} is {kind}, expected one object per line (JSON Lines); convert it, for example with "
                    f"{way.format(old=name, new=name.stem + '_lines.jsonl')}"
                )

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, line: int) -> tuple[list[list[Message]], Any]:
        """The conversations of a line, and their tools."""
        with self.path.open("rb") as file:
            file.seek(self._begins[line])
            text = file.readline()
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not JSON ({error}); correct or remove the line") from None
        if not isinstance(content, dict):
            raise DataError(f"is a {type(content).__name__}, expected an object with messages")
        return self.parsed(content), tools_of(content)

    def parsed(self, content: Mapping[str, Any]) -> list[list[Message]]:
        """The conversations of a line, each starting at a system message."""
        conversations: list[list[Message]] = []
        for message in messages_of(content):
            if not conversations or message["role"] == "system":
                conversations.append([])
            conversations[-1].append(message)
        return conversations

    def place(self, line: int) -> str:
        """The file and number of a line, counted from 1 and including blank lines, as in editors."""
        left, number = self._begins[line], 1
        with self.path.open("rb") as file:
            while left and (data := file.read(min(left, 1 << 20))):
                left, number = left - len(data), number + data.count(b"\n")
        return f"{self.path}, line {number}"


WEIGHT = "weight"
"""Key of a message of the assistant: 0 if it is not learned."""
PACKING = -1
"""In the key of the order in which lines are packed; other keys have the number of a round."""
Encoded = tuple[list[int], list[bool]]
"""The tokens of a conversation, and True for those of answers."""
CHECKED = 64
"""Lines whose lengths are checked at the start."""
Span = tuple[int, int]
"""Half-open character range of a text."""


@dataclass(frozen=True)
class ConversationTokenizer:
    """Converts messages to tokens and marks the tokens of answers."""

    tokenizer: Tokenizer
    template: ChatTemplate
    last_only: bool = False
    """Whether only the last answer of a conversation counts."""
    to_end: bool = False
    """Whether the only answer is all text after the prompt of the last message, with what follows its end-of-turn
    token, as in trl's DPO."""

    def encode(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
        """Tokens of the whole conversation as one text, and True for those with a character of an answer.

        An answer is the text that the template marks with ``{% generation %}``. Without marks it is the text that a
        message of the assistant adds after its prompt, up to the end-of-turn token (white space after it is never
        generated). An answer whose message has ``weight`` 0 does not count, as in OpenAI's files. The tokens equal
        ``apply_chat_template(messages, tokenize=True)`` in transformers.
        """
        all_answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        counting = [n for n in (all_answers[-1:] if self.last_only else all_answers) if _is_learned(messages[n])]
        messages = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
        if self.to_end:
            beginnings = [(len(messages) - 1, True)]
        elif self.template.marks_answers:
            beginnings = []
        else:
            beginnings = [pair for number in counting for pair in ((number, True), (number + 1, False))]
        rendered = self.template.render_answers(messages, tools=tools, beginnings=beginnings)
        text = rendered.text
        ids, offsets = cast(BaseTokenizer, self.tokenizer).tokenize_with_offsets(text)
        if self.to_end:
            answers = [(rendered.beginnings[0][1], len(text))]
        elif self.template.marks_answers:
            answers = self._of_marks(rendered.marks, all_answers, counting)
        else:
            answers = list(self._answers(messages, counting, rendered.beginnings))
        if not any(begin < end for begin, end in answers) and any(messages[n].get("content") for n in counting):
            raise DataError(
                "the chat template writes nothing for an answer, so nothing would be learned; choose another one "
                "with --chat-template"
            )
        counted = [False] * len(ids)
        for begin, end in answers:
            if not (self.template.marks_answers or self.to_end):
                end = self._turn_end(ids, offsets, begin + len(text[begin:end].rstrip()), end)
            for number, (first, last) in enumerate(offsets):
                counted[number] |= first < end and max(last, first + 1) > begin
        return ids, counted

    def _of_marks(self, marked: list[Span], all_answers: Sequence[int], counting: Sequence[int]) -> list[Span]:
        """The marked characters of the messages ``counting``."""
        if self.last_only:
            return marked[-1:] if counting else []
        if len(counting) == len(all_answers):
            return marked
        if len(marked) != len(all_answers):
            raise DataError(
                f"the chat template marks {len(marked)} texts as answers of {len(all_answers)} messages of the "
                "assistant, so weight=0 cannot be applied; use a template that marks each, or none"
            )
        return [span for span, number in zip(marked, all_answers, strict=True) if number in counting]

    def _answers(
        self, messages: Sequence[Message], counting: Sequence[int], beginnings: Sequence[Span]
    ) -> Iterator[Span]:
        """The characters that the messages ``counting`` add to the text after their prompts."""
        for number, asked, whole in zip(counting, beginnings[::2], beginnings[1::2], strict=True):
            (asked_length, asked_common), (whole_length, whole_common) = asked, whole
            if asked_common < asked_length or whole_common < whole_length or whole_length < asked_length:
                raise DataError(
                    "the chat template changes earlier messages when later ones are added, so answers cannot be "
                    "located; choose another one with --chat-template, or one that marks answers "
                    f"with {{% generation %}}{'' if self.last_only else ', or add --sft-loss last_answer'}"
                )
            if asked_length == whole_length and messages[number].get("content"):
                raise DataError(
                    "the chat template writes nothing for an answer, so nothing would be learned; choose another "
                    "one with --chat-template"
                )
            yield asked_length, whole_length

    def _turn_end(self, ids: Sequence[int], offsets: Offsets, visible: int, end: int) -> int:
        """End of an answer up to ``end``: after its last ``visible`` character if an end-of-turn token is there."""
        last = bisect_left(offsets, visible, key=lambda span: span[0]) - 1
        return visible if last >= 0 and ids[last] in self._ends else end

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that may end a turn: end-of-text tokens and added tokens outside the model's vocabulary."""
        return end_ids(self.tokenizer) | getattr(self.tokenizer, "added_ids", frozenset)()


class ConversationDataset:
    """Lines of files in a new keyed order per round: item i is pack KeyedPermutation(packs, (seed, round))[k].

    A sample has the conversations of a line, each a document with its own positions, truncated or padded to
    ``sequence_length``; with ``packs`` those of several lines, which ``first_fit`` chooses once, from the lines in a
    keyed order. Only labels that are tokens of an answer count. Source: Megatron-LM's ``SFTDataset``.
    """

    def __init__(
        self,
        files: Sequence[ConversationFile],
        lines: Sequence[int],
        encoder: ConversationTokenizer,
        sequence_length: int,
        seed: int,
        *,
        packs: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self._files, self._lines, self._encoder, self._seed = files, lines, encoder, seed
        own = encoder.tokenizer
        self._padding = next((i for i in (getattr(own, "pad", None), own.eod) if i is not None), 0)
        self.packs: Sequence[Sequence[int]] = [[line] for line in lines]
        """The lines of each sample of a round."""
        if packs:
            order = KeyedPermutation(len(lines), (seed, PACKING))
            chosen = (lines[order[at]] for at in range(len(lines)))
            sizes = ((line, sum(len(ids) for ids, _ in self._line(line))) for line in chosen)
            self.packs = first_fit(sizes, sequence_length)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples of a round."""
        return len(self.packs)

    def __getitem__(self, index: int) -> PackedSample:
        """The sample at a position of the endless order."""
        return self._sample([encoded for line in self.lines_of(index) for encoded in self._line(line)])

    def describe(self) -> tuple[str, ...]:
        """Notes: the samples of a round, and how many of up to 64 lines, evenly spaced, are cut if any are.

        DataError if no answer remains in any of these lines.
        """
        samples = len(self.packs)
        of_lines = f" with {len(self._lines):,} lines" if samples < len(self._lines) else ""
        size = f"the training data has {samples:,} samples{of_lines}: --train-samples {samples} reads each once"
        lines, kept = self._lines[:: -(-len(self._lines) // CHECKED)], self.sequence_length + 1
        found = [_joined(self._line(line)) for line in lines]
        longest, cut = max(len(ids) for ids, _ in found), sum(len(ids) > kept for ids, _ in found)
        answers, left = sum(any(counted) for _, counted in found), sum(any(counted[:kept]) for _, counted in found)
        if not answers:
            raise DataError(
                f"{self.place(lines[0])}, and {len(lines) - 1} other lines that were checked, have no answer to learn: "
                "no message has the role assistant and a weight other than 0; correct the roles"
            )
        if not left:
            raise DataError(
                f"seq_length={self.sequence_length} cuts all {len(lines)} lines that were checked before their "
                f"answers; the longest has {longest} tokens: give a larger --seq-length"
            )
        if not cut:
            return (size,)
        lost = f", {answers - left} of them before their answers" if answers > left else ""
        return (
            size,
            f"seq_length={self.sequence_length} cuts {cut} of {len(lines)} lines that were checked{lost}; the longest "
            f"has {longest} tokens: give a larger --seq-length to learn the whole answers",
        )

    def lines_of(self, index: int) -> Sequence[int]:
        """The lines of all files together that make up a sample."""
        number, position = divmod(index, len(self.packs))
        return self.packs[KeyedPermutation(len(self.packs), (self._seed, number))[position]]

    def place(self, line: int) -> str:
        """The file of a line, and its number there."""
        file, own = self._find(line)
        return file.place(own)

    def _find(self, line: int) -> tuple[ConversationFile, int]:
        for file in self._files:
            if line < len(file):
                return file, line
            line -= len(file)
        raise IndexError(f"line {line} after the last file")

    def _line(self, line: int) -> list[Encoded]:
        """The conversations of a line as tokens."""
        file, own = self._find(line)
        try:
            conversations, tools = file[own]
            return [self._encoder.encode(conversation, tools) for conversation in conversations]
        except DataError as error:
            raise DataError(f"{file.place(own)}: {error}") from None

    def _sample(self, conversations: Sequence[Encoded]) -> PackedSample:
        length = self.sequence_length
        lengths: list[int] = []
        tokens, counted = _joined(conversations)
        for ids, _ in conversations:
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


def _is_learned(message: Message) -> bool:
    """Whether an answer counts: its weight is 1, which is the default, and not 0."""
    weight = message.get(WEIGHT, 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"weight={shortened(repr(weight))} must be 0 (the answer is not learned) or 1")
    return bool(weight)


def _joined(conversations: Sequence[Encoded]) -> Encoded:
    """Conversations one after the other; their first tokens do not count, because no token of theirs precedes."""
    tokens: list[int] = []
    counted: list[bool] = []
    for ids, answers in conversations:
        tokens += ids
        counted += [False, *answers[1:]][: len(ids)]
    return tokens, counted
