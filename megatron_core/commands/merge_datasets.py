"""Join token files into one.

megatron-merge-datasets --input shards --output-prefix corpus_text_document

megatron-merge-datasets --input wiki_text_document books_text_document --output-prefix corpus_text_document

megatron-merge-datasets --input shards --output-prefix corpus_text_document --keep-parts
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("merge_datasets")

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from megatron_core.data_parts.manifest import PartEntry, PartList, get_parts_path, read_parts, relative_to_list
from megatron_core.datasets import DatasetHeader, IndexedDataset, get_bin_path, get_idx_path, read_header
from megatron_core.datasets.header import check_counts, check_header_path
from megatron_core.datasets.indexed import index_bytes
from megatron_core.errors import ConfigError, DataError, visible
from megatron_core.locations import location
from megatron_core.prepared_output import make_output_folder
from megatron_core.preprocess.atomic_write import atomic_write
from megatron_core.preprocess.builder import IndexedDatasetBuilder, refuse_existing, refuse_other_files, write_header
from megatron_core.preprocess.report import progress_of_bytes
from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    """Join token files into one, document after document."""

    input: tuple[str, ...]
    """Folder of .bin/.idx pairs, joined in the sorted order of their names; or prefixes, joined in the given order. The
    prefix of a list of parts stands for its parts."""
    output_prefix: str
    """Path of the output without suffix: PREFIX.bin, PREFIX.idx, and the header PREFIX.json if every input has one."""
    multimodal: bool = False
    """Keep the mode of each sequence; only for multimodal inputs."""
    keep_parts: bool = False
    """Write only PREFIX.parts.json, a list of the pairs that training reads as one file; they must be in or below
    the list's folder."""
    overwrite: bool = False
    """Replace existing token files of the output's name; without it they are an error."""


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """The prefixes of --input; DataError if a folder has no pairs, or a .bin has no .idx or vice versa."""
    if not inputs:
        raise ConfigError("--input is empty; give a folder of .bin/.idx pairs, or prefixes of pairs")
    prefixes: list[str] = []
    for name in inputs:
        prefixes += folder_prefixes(Path(name)) if Path(name).is_dir() else parts_of(name)
    times = Counter(map(os.path.realpath, prefixes))
    twice = next((prefix for prefix in prefixes if times[os.path.realpath(prefix)] > 1), None)
    if twice is not None:
        raise ConfigError(f"--input has {twice} twice, so its documents would be duplicated; remove one")
    return prefixes


def parts_of(prefix: str) -> list[str]:
    """The prefixes of the parts in a list, or the prefix of a pair."""
    listed = location(get_parts_path(prefix))
    return [str(listed.parent / shard.path) for shard in read_parts(prefix).parts] if listed.is_file() else [prefix]


def folder_prefixes(folder: Path) -> list[str]:
    """The prefixes of the pairs in a folder, sorted."""
    halves = {suffix: {path.stem for path in folder.glob(f"*{suffix}")} for suffix in (".bin", ".idx")}
    for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
        alone = sorted(halves[suffix] - halves[other])
        if alone:
            raise DataError(
                f"--input {folder}: {alone[0]}{suffix} has no {alone[0]}{other}; preprocess it again, or move "
                "it out of the folder"
            )
    if not halves[".bin"]:
        raise DataError(f"--input {folder}: there is no .bin/.idx pair; give the folder of the pairs or their prefixes")
    return [str(folder / stem) for stem in sorted(halves[".bin"])]


def check_output(prefixes: Sequence[str], settings: MergeFlags) -> None:
    """ConfigError if the output is an input, exists or has no folder; DataError if the header replaces another file."""
    output = os.path.realpath(settings.output_prefix)
    if any(os.path.realpath(prefix) == output for prefix in prefixes):
        raise ConfigError(
            f"--output-prefix {settings.output_prefix} is one of the inputs; choose another one, or move the "
            "output of an earlier run out of --input"
        )
    if not settings.overwrite:
        refuse_existing([settings.output_prefix])
    refuse_other_files([settings.output_prefix])
    check_header_path(settings.output_prefix)
    make_output_folder("--output-prefix", settings.output_prefix)


def check_inputs(prefixes: Sequence[str], multimodal: bool) -> tuple[type[np.number], int]:
    """The dtype of all inputs, and the bytes of their tokens; DataError if they cannot be joined."""
    dtype = IndexedDataset(prefixes[0], multimodal=multimodal).dtype
    size = 0
    closes = None
    open_ended = None
    for prefix in prefixes:
        dataset = IndexedDataset(prefix, multimodal=multimodal)
        if dataset.dtype is not dtype:
            raise DataError(
                f"{prefix} holds {np.dtype(dataset.dtype).name} and {prefixes[0]} {np.dtype(dtype).name}; preprocess "
                "all of them with the same tokenizer"
            )
        check_counts(read_header(prefix), prefix, dataset.num_documents, dataset.num_tokens)
        size += Path(get_bin_path(prefix)).stat().st_size
        if not multimodal and has_modes(dataset):
            raise DataError(f"{prefix} was written as multimodal, and its modes would be lost; give --multimodal")
        closes = closes or (prefix if dataset.num_documents else None)
        open_ended = open_ended or (prefix if dataset.document_indices[-1] < len(dataset) else None)
    if closes and open_ended:
        raise DataError(
            f"the last sequences of {open_ended} belong to no document, and would join the next file's document; "
            "preprocess it again"
        )
    if not size:
        raise DataError(f"--input {' '.join(prefixes)}: these files have no tokens; preprocess them again")
    return dtype, size


def has_modes(dataset: IndexedDataset) -> bool:
    """Whether the index has a mode for each sequence, which can be recognised only by its size."""
    size = Path(get_idx_path(dataset.path_prefix)).stat().st_size
    return len(dataset) > 0 and size == index_bytes(len(dataset), len(dataset.document_indices), multimodal=True)


def common_header(prefixes: Sequence[str]) -> DatasetHeader | None:
    """The header for the output, None if an input has none; DataError if the inputs' headers disagree."""
    headers = {prefix: read_header(prefix) for prefix in prefixes}
    without = [prefix for prefix, header in headers.items() if header is None]
    known = {prefix: header for prefix, header in headers.items() if header is not None}
    if not known:
        return None
    first, reference = next(iter(known.items()))
    for prefix, header in known.items():
        if header.fingerprint != reference.fingerprint or header.vocab_size != reference.vocab_size:
            raise DataError(
                f"{prefix} was made with a {tokenizer_name(header)}, but {first} with a {tokenizer_name(reference)}; "
                "preprocess all of them with the same tokenizer"
            )
        if (header.append_eod, header.eod) != (reference.append_eod, reference.eod):
            raise DataError(
                f"the documents of {prefix} {ending(header)}, but those of {first} {ending(reference)}; preprocess "
                "all of them with the same --append-eod"
            )
    if without:
        print(f"no header is written: {without[0]} has none, so its tokenizer is unknown", file=sys.stderr)
    return None if without else reference


def tokenizer_name(header: DatasetHeader) -> str:
    """A tokenizer, for messages."""
    return f"{header.tokenizer_type} of {header.vocab_size:,} tokens (fingerprint {header.fingerprint[:12]})"


def ending(header: DatasetHeader) -> str:
    """How documents end, for messages."""
    return f"end with the id {header.eod}" if header.append_eod else "have no end-of-document id"


def merge_datasets(settings: MergeFlags) -> None:
    """Check everything, then copy; the files get their final names when they are complete."""
    prefixes = find_prefixes(settings.input)
    check_output(prefixes, settings)
    dtype, size = check_inputs(prefixes, settings.multimodal)
    header = common_header(prefixes)
    if settings.keep_parts:
        documents, tokens = write_list(settings, prefixes, dtype)
    else:
        documents, tokens = join_pairs(settings, prefixes, dtype, size)
    if header is not None:
        write_header(settings.output_prefix, replace(header, documents=documents, tokens=tokens))
    print(f"{settings.output_prefix}: {documents:,} documents, {tokens:,} tokens of {len(prefixes)} files", flush=True)


def write_list(settings: MergeFlags, prefixes: Sequence[str], dtype: type[np.number]) -> tuple[int, int]:
    """Write the list of the pairs; return its numbers of documents and tokens."""
    if settings.multimodal:
        raise ConfigError("--keep-parts: a list has no modes of sequences; remove --multimodal or --keep-parts")
    prefix = settings.output_prefix
    entries = []
    for shard in prefixes:
        pair = IndexedDataset(shard)
        path = relative_to_list(prefix, shard)
        entries.append(PartEntry(path, len(pair), pair.num_documents, pair.num_tokens))
    with atomic_write(get_parts_path(prefix)) as file:
        file.write(PartList(np.dtype(dtype).name, tuple(entries)).encoded())
    for path in (get_bin_path(prefix), get_idx_path(prefix)):
        Path(path).unlink(missing_ok=True)
    return sum(entry.documents for entry in entries), sum(entry.tokens for entry in entries)


def join_pairs(settings: MergeFlags, prefixes: Sequence[str], dtype: type[np.number], size: int) -> tuple[int, int]:
    """Copy the pairs, of `size` bytes of tokens, to one; return its numbers of documents and tokens."""
    with (
        IndexedDatasetBuilder(get_bin_path(settings.output_prefix), dtype, settings.multimodal) as builder,
        progress_of_bytes(size, mininterval=0.5) as bar,
    ):
        for prefix in prefixes:
            bar.set_postfix_str(visible(Path(prefix).name), refresh=False)
            builder.add_index(prefix)
            bar.update(Path(get_bin_path(prefix)).stat().st_size)
        documents = builder.num_documents
        tokens = builder.num_tokens
        builder.finalize(get_idx_path(settings.output_prefix))
    Path(get_parts_path(settings.output_prefix)).unlink(missing_ok=True)
    return documents, tokens


def main() -> None:
    """Parse the flags and run."""
    merge_datasets(parse_flags(MergeFlags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
