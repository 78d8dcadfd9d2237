"""Work of the worker processes: read a range of a file, or take text read by the main process, and tokenize it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.preprocess.backends import Backend, TokenizerBackend
from megatron_core.preprocess.inputs import DamagedFileError, InputFile
from megatron_core.preprocess.readers import Batch, ContentBlock, content_blocks
from megatron_core.preprocess.settings import Limits, PreprocessSettings
from megatron_core.tokenizers import Tokenizer, dropped_bytes
from megatron_core.vocabularies.byte_symbols import count_bytes

# Up to this number of ends a loop of copies takes a third of the time of np.insert, which reads all ids several times.
FEW = 64

Splitter = Callable[[str], list[str]]
InputFiles = Sequence[InputFile] | Mapping[int, InputFile]
"""Input files by their index."""


@dataclass(frozen=True)
class TokenFormat:
    """Storage format of tokens.

    dtype: dtype of a token. vocab_size: one more than the largest id. eod: the id after each document; None: no id.
    """

    dtype: str
    vocab_size: int
    eod: int | None


@dataclass(frozen=True)
class Encoded:
    """Documents of one key: concatenated tokens, lengths of sequences [S], number of sequences per document [D]."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


def encode(texts: Sequence[str], backend: Backend, layout: TokenFormat, splitter: Splitter | None = None) -> Encoded:
    """Tokenize documents; an empty document has no sequence and no end-of-document id, as in Megatron's files."""
    sentences = [splitter(text) for text in texts] if splitter else None
    ids, lengths = backend.encode(list(chain.from_iterable(sentences)) if sentences is not None else texts)
    if len(ids) and ids.max() >= layout.vocab_size:
        raise DataError(
            f"the tokenizer gave the id {ids.max()} and has {layout.vocab_size} tokens: its files contradict each "
            "other; correct them, or use --tokenization-backend tokenizers"
        )
    filled = lengths > 0
    if sentences is None:
        counts = filled.astype(np.int32)
    else:
        owner = np.repeat(np.arange(len(texts)), [len(document) for document in sentences])
        counts = np.bincount(owner[filled], minlength=len(texts)).astype(np.int32)
    lengths = lengths[filled]
    if layout.eod is not None:
        ends = np.cumsum(counts)[counts > 0] - 1
        ids = with_ends(ids, np.cumsum(lengths)[ends], layout.eod, layout.dtype)
        lengths[ends] += 1
    return Encoded(ids.astype(layout.dtype, copy=False), lengths.astype(np.int32), counts)


def with_ends(ids: np.ndarray, ends: np.ndarray, eod: int, dtype: str) -> np.ndarray:
    """Return the ids with an eod inserted at each of the positions `ends` [D]; the last position is their end."""
    if len(ends) > FEW:
        return np.insert(ids.astype(dtype), ends, eod)
    output = np.empty(len(ids) + len(ends), dtype)
    start = 0
    for number, end in enumerate(ends.tolist()):
        output[start + number : end + number] = ids[start:end]
        output[end + number] = eod
        start = end
    return output


def refused(texts: Sequence[str], backend: Backend) -> dict[int, str]:
    """Return the tokenizer's error for each text that it cannot tokenize, by index of the text."""
    errors = {}
    for number, text in enumerate(texts):
        try:
            backend.encode([text])
        except MegatronError as error:
            errors[number] = f"cannot be tokenized: {error}"
    return errors


def sentence_splitter(keep_newlines: bool) -> Splitter:
    """Return a function that splits a text into sentences, by Punkt without trained abbreviations (Kiss, Strunk 2006).

    keep_newlines: keep the white space after a sentence; otherwise it is removed.
    ConfigError: the optional package nltk is not installed.
    """
    if find_spec("nltk") is None:
        raise ConfigError("--split-sentences needs the package nltk, which is not installed; pip install nltk")
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    punkt = PunktSentenceTokenizer()
    if not keep_newlines:
        return punkt.tokenize

    def with_spaces(text: str) -> list[str]:
        starts = [start for start, _ in punkt.span_tokenize(text)]
        if not starts:
            return [text] if text else []
        begins = [0, *starts[1:]]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    return with_spaces


# Long enough to reveal a difference; the comparison takes a third of a millisecond.
PROBE_CHARACTERS = 1000


@dataclass(frozen=True)
class InputRange:
    """A range of one input file; pieces are in the order of the files and of their content.

    source: index of the file. start: start of the piece, in bytes of content (Parquet: rows). end: start of the next
    piece; None for the last piece of a file. raw: bytes of the file read from disk up to the end of the piece. block:
    the content; None if the worker reads it. damage: why the file cannot be read from here on. size: bytes of
    content, or of a file that is not divided.
    """

    source: int
    start: int = 0
    end: int | None = None
    raw: int = 0
    block: ContentBlock | None = None
    damage: str = ""
    size: int = 0


@dataclass
class EncodedPart:
    """Result of a piece: `Encoded` for each key of each batch, and counts over all batches; read once.

    raw: bytes of the file read from disk up to the end of the piece. size: bytes of text. remarks: line, kind
    ("broken", "empty") and sentence for documents with problems. dropped: bytes without a token.
    """

    piece: InputRange
    raw: int = 0
    size: int = 0
    lines: int = 0
    documents: int = 0
    dropped: int = 0
    encoded: Iterable[list[Encoded]] = field(default_factory=list)
    remarks: Iterable[tuple[int, str, str]] = field(default_factory=list)


@dataclass
class Worker:
    """Tokenizes pieces.

    tokenizer: its ids are compared with those of another backend, for one text of each task.
    """

    settings: PreprocessSettings
    sources: InputFiles
    limits: Limits
    folder: Path
    backend: Backend
    tokenizer: Tokenizer
    layout: TokenFormat

    def __post_init__(self) -> None:
        self._dropped = dropped_bytes(self.tokenizer)
        self._splitter = sentence_splitter(self.settings.keep_newlines) if self.settings.split_sentences else None

    def run(self, pieces: Sequence[InputRange]) -> list[EncodedPart]:
        """Return a part for each piece; DataError if the backend gives other ids than the tokenizer."""
        compared = self.backend.name == TokenizerBackend.name
        encoded_parts = []
        for piece in pieces:
            encoded_part = EncodedPart(replace(piece, block=None), raw=piece.raw)
            try:
                for block in self._blocks(piece):
                    batch, encoded = self._encode(block.batch(self.settings.json_keys))
                    self._add(encoded_part, block, batch, encoded)
                    compared = compared or self._compare(batch, encoded[0])
            except DamagedFileError as error:
                encoded_part.piece = replace(encoded_part.piece, damage=str(error))
            encoded_parts.append(encoded_part)
        return encoded_parts

    def _blocks(self, piece: InputRange) -> Iterable[ContentBlock]:
        if piece.damage or piece.block:
            return [piece.block] if piece.block else []
        keys = self.settings.json_keys
        separator = self.settings.separator
        source = self.sources[piece.source]
        return content_blocks(source, keys, separator, self.limits, self.folder, piece.start, piece.end)

    def _encode(self, batch: Batch) -> tuple[Batch, list[Encoded]]:
        """Return the batch without the documents that the tokenizer refuses, and the ids of each key."""

        def all_keys(batch: Batch) -> list[Encoded]:
            return [encode(texts, self.backend, self.layout, self._splitter) for texts in batch.texts]

        try:
            return batch, all_keys(batch)
        except MegatronError:
            wrong: dict[int, str] = {}
            for texts in batch.texts:
                wrong |= refused(texts, self.backend)
            if not wrong:
                raise
        accepted = [number for number in range(len(batch.numbers)) if number not in wrong]
        broken = batch.broken + [(batch.numbers[number], sentence) for number, sentence in wrong.items()]
        left = [[texts[number] for number in accepted] for texts in batch.texts]
        batch = replace(batch, numbers=[batch.numbers[n] for n in accepted], texts=left, broken=sorted(broken))
        return batch, all_keys(batch)

    def _add(self, encoded_part: EncodedPart, block: ContentBlock, batch: Batch, encoded: list[Encoded]) -> None:
        remarks = [(number, "broken", sentence) for number, sentence in batch.broken]
        for key, sequences in zip(self.settings.json_keys, encoded, strict=True):
            empty = np.flatnonzero(sequences.counts == 0).tolist()
            where = "" if self.sources[encoded_part.piece.source].format == "text" else f" under {key!r}"
            remarks += [(batch.numbers[number], "empty", f"has no text{where}") for number in empty]
        first = encoded_part.lines
        added = [(first + number, category, sentence) for number, category, sentence in sorted(remarks)]
        encoded_part.remarks = [*encoded_part.remarks, *added]
        encoded_part.lines += batch.lines
        encoded_part.documents += len(batch.numbers)
        encoded_part.size += batch.size
        encoded_part.dropped += sum(count_bytes(texts, self._dropped) for texts in batch.texts)
        encoded_part.raw = block.raw
        encoded_part.encoded = [*encoded_part.encoded, encoded]

    def _compare(self, batch: Batch, encoded: Encoded) -> bool:
        """Compare the ids of one document with the tokenizer's; False if no document in the batch is short enough."""
        for number, text in enumerate(batch.texts[0]):
            if len(text) > PROBE_CHARACTERS or not encoded.counts[number]:
                continue
            right = encode([text], TokenizerBackend(self.tokenizer), self.layout, self._splitter).tokens
            first = int(encoded.counts[:number].sum())
            start = int(encoded.lengths[:first].sum(dtype=np.int64))
            if not np.array_equal(encoded.tokens[start : start + len(right)], right):
                raise DataError(
                    f"gigatoken and the tokenizer give different tokens for the text {text[:60]!r}; use "
                    "--tokenization-backend tokenizers"
                )
            return True
        return False
