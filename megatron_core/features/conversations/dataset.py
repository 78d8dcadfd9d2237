"""Conversations as training data: chat template, loss only on the assistant's answers, one sample per line."""

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.datasets.base import PackedSample
from megatron_core.datasets.keyed_dataset import KeyedPermutation
from megatron_core.errors import DataError
from megatron_core.features.conversations import line_notes as notes
from megatron_core.features.conversations.encoder import ConversationTokenizer, Encoded, Encoding, Message
from megatron_core.features.conversations.message_keys import VARIABLES, template_variables
from megatron_core.features.conversations.packing import first_fit
from megatron_core.features.conversations.schemas import Line, keys_of, messages_of
from megatron_core.features.conversations.tool_calls import tools_of
from megatron_core.text_file import without_duplicates

OTHER_FORMATS = {
    b"[": ("a JSON array", "jq -c '.[]' {old} > {new}"),
    b"PAR1": ("a Parquet file", "pandas.read_parquet('{old}').to_json('{new}', orient='records', lines=True)"),
    b"\x1f\x8b": ("compressed", "gzip -dc {old} > {new}"),
}
"""First bytes of files that are not JSON Lines, with their kind and a conversion."""


class ConversationFile:
    """JSON Lines with messages in a schema of ``message_schemas``; the offsets of the lines are kept in memory."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._begins = array("q")
        if self.path.exists() and not self.path.is_file():
            raise DataError(
                f"{path} is not a regular file; --sft and --dpo need JSON Lines in a file that it can read in any order"
            )
        try:
            with self.path.open("rb") as file:
                position = 0
                for line in file:
                    if line.strip():
                        if not self._begins:
                            self._check_format(line)
                        self._begins.append(position)
                    position += len(line)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; --sft and --dpo need JSON Lines with messages"
            ) from None
        if not self._begins:
            raise DataError(f"{path} is empty; --sft and --dpo need JSON Lines with messages")

    def _check_format(self, line: bytes) -> None:
        """DataError if the first line is of a file in another format."""
        begin = line.removeprefix(b"\xef\xbb\xbf").lstrip()
        name = self.path
        for first, (format_, command) in OTHER_FORMATS.items():
            if begin.startswith(first):
                raise DataError(
                    f"{name} is {format_}, expected one object per line (JSON Lines); convert it, for example with "
                    f"{command.format(old=name, new=name.stem + '_lines.jsonl')}"
                )

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, line: int) -> Line:
        """A line; DataError if it has no messages."""
        with self.path.open("rb") as file:
            file.seek(self._begins[line])
            text = file.readline()
        try:
            content = json.loads(text, object_pairs_hook=without_duplicates)
        except (ValueError, RecursionError) as error:
            raise DataError(f"cannot be read as JSON ({error}); correct or remove the line") from None
        if not isinstance(content, dict):
            raise DataError(f"is a {type(content).__name__}, expected an object with messages")
        conversations = self.parsed(content)
        keys_read = {*self.used_keys(content), "tools", "functions", VARIABLES}
        unused = frozenset(key for key in content if key not in keys_read and content[key] is not None)
        return Line(conversations, tools_of(content), content, unused)

    def parsed(self, content: Mapping[str, Any]) -> list[list[Message]]:
        """The conversations of a line, each starting at a system message."""
        conversations: list[list[Message]] = []
        for message in messages_of(content):
            if not conversations or message["role"] == "system":
                conversations.append([])
            conversations[-1].append(message)
        return conversations

    def used_keys(self, content: Mapping[str, Any]) -> set[str]:
        """The keys that ``parsed`` reads."""
        return keys_of(content)

    def place(self, line: int) -> str:
        """The file and number of a line, counted from 1 and including blank lines, as in editors."""
        left = self._begins[line]
        number = 1
        with self.path.open("rb") as file:
            while left and (data := file.read(min(left, 1 << 20))):
                left = left - len(data)
                number = number + data.count(b"\n")
        return f"{self.path}, line {number}"


PACKING = -1
"""In the key of the order in which lines are packed; other keys have the number of a round."""


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
        self._files = files
        self._lines = lines
        self._encoder = encoder
        self._seed = seed
        tokenizer = encoder.tokenizer
        self._padding = next((i for i in (getattr(tokenizer, "pad", None), tokenizer.eod) if i is not None), 0)
        self.packs: Sequence[Sequence[int]] = [[line] for line in lines]
        """The lines of each sample of a round."""
        if packs:
            order = KeyedPermutation(len(lines), (seed, PACKING))
            chosen = (lines[order[index]] for index in range(len(lines)))
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
        """Notes: the samples of a round, and what ``conversation_notes`` finds in the lines.

        DataError if no answer remains in any line that is checked.
        """
        samples = len(self.packs)
        of_lines = f" with {len(self._lines):,} lines" if samples < len(self._lines) else ""
        size = f"the training data has {samples:,} samples{of_lines}: --train-samples {samples} reads each once"
        lines = notes.evenly_spaced(self._lines, notes.CHECKED)
        checked = [(encodings, self.read(line).tools) for line in lines for encodings in [self._encodings(line)]]
        joined = [_joined([(encoding.ids, encoding.counted) for encoding in encodings]) for encodings, _ in checked]
        if not any(any(counted) for _, counted in joined):
            raise DataError(
                f"{self.place(lines[0])}, and {len(lines) - 1} other lines that were checked, have no answer to learn: "
                "no message has the role assistant and a weight other than 0; correct the roles"
            )
        names = self._encoder.template.names
        return (
            size,
            *notes.of_lengths(joined, self.sequence_length),
            *notes.of_losses(checked, self._encoder.tokenizer),
            *notes.of_keys(map(self.read, notes.evenly_spaced(self._lines, notes.KEYS_CHECKED)), names),
        )

    def lines_of(self, index: int) -> Sequence[int]:
        """The lines of all files together that make up a sample."""
        number, position = divmod(index, len(self.packs))
        return self.packs[KeyedPermutation(len(self.packs), (self._seed, number))[position]]

    def place(self, line: int) -> str:
        """The file of a line, and its number there."""
        file, local_line = self._find(line)
        return file.place(local_line)

    def _find(self, line: int) -> tuple[ConversationFile, int]:
        for file in self._files:
            if line < len(file):
                return file, line
            line -= len(file)
        raise IndexError(f"line {line} after the last file")

    def read(self, line: int) -> Line:
        """A line of all files together."""
        file, local_line = self._find(line)
        try:
            return file[local_line]
        except DataError as error:
            raise DataError(f"{file.place(local_line)}: {error}") from None

    def _encodings(self, line: int) -> list[Encoding]:
        """The conversations of a line as texts and tokens."""
        content = self.read(line)
        try:
            variables = template_variables(content.content, content.unused, self._encoder.template.variables)
            return [
                self._encoder.encoding(talk, content.tools, variables, content.prompt_length)
                for talk in content.conversations
            ]
        except DataError as error:
            raise DataError(f"{self.place(line)}: {error}") from None

    def _line(self, line: int) -> list[Encoded]:
        """The conversations of a line as tokens."""
        return [(encoding.ids, encoding.counted) for encoding in self._encodings(line)]

    def _sample(self, conversations: Sequence[Encoded]) -> PackedSample:
        length = self.sequence_length
        lengths: list[int] = []
        tokens, counted = _joined(conversations)
        for ids, _ in conversations:
            lengths.append(min(len(ids), length - sum(lengths)))
        missing = max(length + 1 - len(tokens), 0)
        filled = np.array(tokens[: length + 1] + [self._padding] * missing, dtype=np.int64)
        mask = np.array(counted[: length + 1] + [False] * missing, dtype=np.float32)
        lengths = [size for size in lengths if size]
        if (padding := length - sum(lengths)) > 0:
            lengths.append(padding)
        positions = np.concatenate([np.arange(size, dtype=np.int64) for size in lengths])
        return {
            "tokens": filled[:-1],
            "labels": filled[1:],
            "loss_mask": mask[1:],
            "position_ids": positions,
            "document_lengths": np.array(lengths, dtype=np.int64),
        }


def _joined(conversations: Sequence[Encoded]) -> Encoded:
    """Conversations one after the other; their first tokens do not count, because no token of theirs precedes."""
    tokens: list[int] = []
    counted: list[bool] = []
    for ids, answers in conversations:
        tokens += ids
        counted += [False, *answers[1:]][: len(ids)]
    return tokens, counted
