r"""Print the contents of a token file: counts, document lengths, the tokenizer, and some documents as text.

megatron-inspect-dataset corpus_text_document

megatron-inspect-dataset corpus_text_document --validate

megatron-inspect-dataset corpus_text_document --samples 3 --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model tokenizer.json
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("inspect_dataset")

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from megatron_core.datasets import IndexedDataset, check_tokenizer, get_bin_path, get_idx_path, read_header
from megatron_core.datasets.header import get_header_path
from megatron_core.errors import ConfigError, visible
from megatron_core.locations import location
from megatron_core.prepared_output import picture_kind, prepare_output
from megatron_core.preprocess.lengths import Lengths, closed_document_lengths
from megatron_core.preprocess.report import progress_of_bytes
from megatron_core.preprocess.validate import total_bytes, validate
from megatron_core.terminal import parse_flags
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.build import TokenizerFiles


@dataclass(frozen=True, kw_only=True)
class ShowTextFlags:
    """The tokenizer with which documents are shown as text."""

    tokenizer_type: str | None = None
    """Type of the tokenizer, as for training, to show documents as text; default: show token ids."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Vocabulary size, for --validate and NullTokenizer; default the tokenizer's, else the header's."""
    tiktoken_pattern: str | None = None
    """Pattern of TikTokenizer: v1 or v2."""
    tiktoken_num_special_tokens: int = 1000
    """Number of ids that TikTokenizer reserves for special tokens."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the flags, if they name one."""
        return None if self.tokenizer_type is None else TokenizerFiles.of(self.tokenizer_type, self).load()


@dataclass(frozen=True, kw_only=True)
class InspectDatasetFlags(ShowTextFlags):
    """Print the contents of a token file: counts, document lengths, the tokenizer, and some documents as text."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """Path of the files without .bin or .idx."""
    validate: bool = False
    """First check the whole index and every token id; report the first fault and exit with status 1."""
    samples: int = 0
    """Number of documents to show, evenly spread over the file."""
    document: tuple[int, ...] = ()
    """Numbers of the documents to show, starting at 0; -1 is the last."""
    max_tokens: int = 200
    """Largest number of tokens to show of a document."""
    png: str | None = None
    """Write a plot of the document lengths to this file."""


def inspect_dataset(settings: InspectDatasetFlags) -> None:
    """Check the settings and files, and print."""
    check_inspection(settings)
    dataset = IndexedDataset(settings.prefix)
    tokenizer = settings.tokenizer()
    if tokenizer is not None:
        check_tokenizer(settings.prefix, tokenizer)
    if settings.png is not None:
        prepare_output(settings, "png", picture_kind(settings.png))
    if settings.validate:
        print(checked(settings, tokenizer), end="\n\n")
    lengths = closed_document_lengths(dataset)
    numbers = chosen(settings, lengths)
    print(counts(dataset), end="\n\n")
    print(recorded_tokenizer(settings.prefix), end="\n\n")
    print("\n".join(histogram(lengths, shutil.get_terminal_size((100, 24)).columns)))
    if settings.png is not None:
        from megatron_core.preprocess.lengths import plot_lengths  # matplotlib takes a while to load

        plot_lengths(lengths, settings.png, f"{Path(settings.prefix).name}: {lengths.count:,} {lengths.unit}")
        print(f"\nwrote {settings.png}")
    for number in numbers:
        print("\n" + document_line(dataset, number, lengths.unit, tokenizer, settings.max_tokens))


def check_inspection(settings: InspectDatasetFlags) -> None:
    """ConfigError for flags with illegal values."""
    for name, least in (("samples", 0), ("max_tokens", 1)):
        if getattr(settings, name) < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(settings, name)} is too small; give {least} or more"
            )


def checked(settings: InspectDatasetFlags, tokenizer: Tokenizer | None) -> str:
    """Check all of both files, with a progress bar; a message if they have no fault, else DataError."""
    vocab_size = settings.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    with progress_of_bytes(total_bytes(settings.prefix), desc="checking", leave=False) as bar:
        report = validate(settings.prefix, vocab_size, bar.update)
    against = (
        "no vocabulary (give --vocab-size)" if report.vocab_size is None else f"a vocabulary of {report.vocab_size:,}"
    )
    ids = f"{report.tokens:,} token ids up to {report.largest_id:,}"
    return f"no fault: index complete, {ids} checked against {against}"


def counts(dataset: IndexedDataset) -> str:
    """Numbers of documents, sequences, tokens and bytes."""
    dtype = np.dtype(dataset.dtype)
    lines = [
        dataset.path_prefix,
        f"  documents  {dataset.num_documents:,}",
        f"  sequences  {len(dataset):,}",
        f"  tokens     {dataset.num_tokens:,}, as {dtype.name} ({dtype.itemsize} bytes each)",
    ]
    for path in (get_bin_path(dataset.path_prefix), get_idx_path(dataset.path_prefix)):
        lines.append(f"  {path[-4:]}       {location(path).stat().st_size:,} bytes")
    return "\n".join(lines)


def recorded_tokenizer(prefix: str) -> str:
    """The tokenizer recorded in the header."""
    header = read_header(prefix)
    if header is None:
        return f"no header {get_header_path(prefix)}: the tokenizer of the files is unknown"
    ids = ", ".join(
        f"{name} {'none' if value is None else value}"
        for name, value in (("eod", header.eod), ("bos", header.bos), ("eos", header.eos), ("pad", header.pad))
    )
    return "\n".join(
        [
            f"made by {header.tokenizer_type} ({get_header_path(prefix)})",
            f"  vocabulary   {header.vocab_size:,} tokens, fingerprint {header.fingerprint[:12]}",
            f"  special ids  {ids}; documents {'end' if header.append_eod else 'do not end'} with eod",
        ]
    )


def histogram(lengths: Lengths, width: int) -> list[str]:
    """Histogram of the lengths, with a line for each factor of 2."""
    unit = lengths.unit.removesuffix("s")
    if not lengths.count:
        return [f"no {unit}"]
    lines = [
        f"tokens in a {unit}: shortest {lengths.shortest:,}, median about {lengths.quantile(0.5):,}, mean "
        f"{lengths.mean:,.1f}, 99% up to about {lengths.quantile(0.99):,}, longest {lengths.longest:,}"
    ]
    bars = lengths.bars(bars_per_octave=1)
    names = [f"{bar.low:,} to {bar.high - 1:,}" if bar.high - bar.low > 1 else f"{bar.low:,}" for bar in bars]
    numbers = [f"{bar.documents:,}" for bar in bars]
    total = int(lengths.tokens.sum())
    most = max(bar.documents for bar in bars)
    left = max(map(len, ["tokens", *names]))
    middle = max(map(len, [lengths.unit, *numbers]))
    room = max(width - left - middle - 16, 8)
    lines.append(f"{'tokens':>{left}}  {lengths.unit:>{middle}}  of tokens")
    for bar, name, number in zip(bars, names, numbers, strict=True):
        share = 100 * bar.tokens / max(total, 1)
        lines.append(
            f"{name:>{left}}  {number:>{middle}}  {share:8.1f}%  {text_bar(bar.documents / most * room)}".rstrip()
        )
    return lines


def text_bar(length: float) -> str:
    """A bar ``length`` characters long, rounded to 1/8 of a character; at least 1/8 unless ``length`` is 0."""
    eighths = max(round(8 * length), 1 if length else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def chosen(settings: InspectDatasetFlags, lengths: Lengths) -> list[int]:
    """Numbers of the documents to show: those of --document, then samples at equal distances."""
    count = lengths.count
    numbers = []
    for number in settings.document:
        if not -count <= number < count:
            raise ConfigError(
                f"--document {number} is out of range: there are {count} {lengths.unit}; legal: 0 to {count - 1}"
            )
        numbers.append(number % count)
    samples = min(settings.samples, count)
    return numbers + [number * count // samples for number in range(samples)]


def document_line(dataset: IndexedDataset, number: int, unit: str, tokenizer: Tokenizer | None, most: int) -> str:
    """A document's number, size and first tokens."""
    first = number
    end = number + 1
    if unit == "documents":
        first, end = (int(index) for index in dataset.document_indices[number : number + 2])
    length = int(dataset.sequence_lengths[first:end].sum(dtype=np.int64))
    ids = first_tokens(dataset, first, end, most)
    more = f" ... and {length - len(ids):,} more tokens" if length > len(ids) else ""
    name = f"{unit.removesuffix('s')} {number} ({length:,} tokens)"
    return f"{name}\n{as_text(ids, tokenizer)}{more}"


def first_tokens(dataset: IndexedDataset, first: int, end: int, most: int) -> list[int]:
    """At most ``most`` token ids of the sequences [first, last)."""
    ids: list[int] = []
    for sequence in range(first, end):
        ids += dataset.get(sequence)[: most - len(ids)].tolist()
        if len(ids) == most:
            break
    return ids


def as_text(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of the ids; the ids themselves without a tokenizer, or if one is not in its vocabulary."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    if not all(0 <= i < tokenizer.vocab_size for i in ids):
        return f"(an id is not in the vocabulary; check with --validate) {' '.join(map(str, ids))}"
    # Escape control characters, which could change the terminal.
    return visible(tokenizer.detokenize(ids))


def main() -> None:
    """Parse the flags and run."""
    inspect_dataset(parse_flags(InspectDatasetFlags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
