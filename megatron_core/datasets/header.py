"""Header of a token file: records the tokenizer, so that training with another one is detected at start."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from megatron_core.errors import DataError
from megatron_core.locations import location
from megatron_core.terminal import print_once
from megatron_core.tokenizers import Tokenizer

FAMILY = "megatron-native token file "
FORMAT = f"{FAMILY}2"
# A third file, so that the pair stays byte for byte what Megatron-LM writes and reads.
# Version 1 did not have bos, eos and pad; they are read as None.
READABLE = (f"{FAMILY}1", FORMAT)

SPECIAL_IDS = ("eod", "bos", "eos", "pad")

# Our headers are below 1,000 bytes; a corpus with the name of a header is not read completely.
LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class DatasetHeader:
    """The content of `PREFIX.json`."""

    tokenizer_type: str
    """The kind of tokenizer, as in `--tokenizer-type`."""
    fingerprint: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    """Number of tokens in the vocabulary."""
    eod: int | None
    """The tokenizer's end-of-document id."""
    append_eod: bool
    """Whether every document of the file ends with that id."""
    documents: int
    """Number of documents in the file."""
    tokens: int
    """Number of tokens in the file."""
    bos: int | None = None
    """The tokenizer's begin-of-sequence id."""
    eos: int | None = None
    """The tokenizer's end-of-sequence id."""
    pad: int | None = None
    """The tokenizer's padding id."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tokenizer_type: str, *, append_eod: bool, documents: int, tokens: int
    ) -> "DatasetHeader":
        """The header of a file written with the tokenizer."""
        known: dict[str, Any] = {name: getattr(tokenizer, name) for name in ("vocab_size", *SPECIAL_IDS)}
        known |= {"append_eod": append_eod, "documents": documents, "tokens": tokens}
        return cls(tokenizer_type=tokenizer_type, fingerprint=tokenizer.fingerprint(), **known)


def get_header_path(path_prefix: str) -> str:
    """Path of the header."""
    return f"{path_prefix}.json"


def check_header_path(path_prefix: str) -> None:
    """DataError if another program's JSON file has the header's name."""
    path = Path(get_header_path(path_prefix))
    if path.exists() and _content(path) is None:
        raise DataError(
            f"{path} exists and is not the header of a token file; move it, or choose another --output-prefix"
        )


def read_header(path_prefix: str) -> DatasetHeader | None:
    """The header of a token file; None if there is none, as for files written by Megatron.

    DataError: an unknown version, a missing field, or a field of the wrong type.
    """
    path = location(get_header_path(path_prefix))
    if not path.is_file():
        return None
    content = _content(path)
    if content is None:
        print_once(f"warning: {path} is not the header of a token file: the tokenizer is not checked")
        return None
    file_format = content.pop("format")
    if file_format not in READABLE:
        raise DataError(
            f"{path} has the format {file_format!r}, expected one of {', '.join(map(repr, READABLE))}; use the "
            f"version of the package that wrote it, or {_WITHOUT}"
        )
    try:
        header = DatasetHeader(**content)
    except TypeError as error:
        raise DataError(
            f"{path} has missing or unexpected fields ({error}); prepare the data again, or {_WITHOUT}"
        ) from error
    _check_types(path, header)
    return header


def remove_header(path_prefix: str) -> None:
    """Delete the header of a token file, if the file is a header."""
    path = Path(get_header_path(path_prefix))
    if path.is_file() and _content(path) is not None:
        path.unlink()


def check_tokenizer(path_prefix: str, tokenizer: Tokenizer) -> None:
    """DataError if the token file was written with another tokenizer; without a header nothing is checked.

    Size, fingerprint and the end-of-document id must be equal. Other special ids do not occur in the file and may
    differ.
    """
    header = read_header(path_prefix)
    if header is None:
        return
    way_out = "use the tokenizer that made it with --tokenizer-model, or prepare the data again"
    if header.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{path_prefix} was made with a {header.tokenizer_type} of {header.vocab_size} tokens, but the tokenizer "
            f"of this run has {tokenizer.vocab_size}{_other_ids(header, tokenizer)}; {way_out}"
        )
    fingerprint = tokenizer.fingerprint()
    if header.fingerprint != fingerprint:
        raise DataError(
            f"{path_prefix} was made with another {header.tokenizer_type}: fingerprint "
            f"{header.fingerprint[:12]}, but that of this run has {fingerprint[:12]}"
            f"{_other_ids(header, tokenizer)}; {way_out}"
        )
    if header.append_eod and header.eod != tokenizer.eod:
        raise DataError(
            f"the documents of {path_prefix} end with the id {header.eod}, but the tokenizer of this run ends them "
            f"with {tokenizer.eod}, with the same vocabulary; give all the files of the tokenizer that made the data "
            "(tokenizer_config.json may name special tokens), or prepare the data again"
        )


def check_vocabulary(path_prefix: str, vocab_size: int) -> None:
    """DataError if a token file may contain ids outside a vocabulary; for runs without a tokenizer."""
    header = read_header(path_prefix)
    if header is not None and header.vocab_size > vocab_size:
        raise DataError(
            f"{path_prefix} was made with a {header.tokenizer_type} of {header.vocab_size} tokens, but --vocab-size "
            f"is {vocab_size}; give at least that many, or the tokenizer itself"
        )


def check_counts(header: DatasetHeader | None, path_prefix: str, documents: int, tokens: int) -> None:
    """DataError if the counts of documents or tokens differ from the header."""
    for name, count in (("documents", documents), ("tokens", tokens)) if header is not None else ():
        if getattr(header, name) != count:
            raise DataError(
                f"{get_header_path(path_prefix)} says {name}={getattr(header, name)}, but the files have {count}: "
                "they are not from the same run; copy all three files again, prepare the data again with "
                f"megatron-preprocess, or {_WITHOUT}"
            )


_WITHOUT = "remove the file to skip the check"


def _other_ids(header: DatasetHeader, tokenizer: Tokenizer) -> str:
    """The special ids that differ from the header, as part of a sentence."""
    theirs = {name: getattr(header, name) for name in SPECIAL_IDS if getattr(header, name) is not None}
    ours = {name: getattr(tokenizer, name) for name in theirs}
    other = [f"{name} {theirs[name]} there and {ours[name]} here" for name in theirs if theirs[name] != ours[name]]
    return f" ({', '.join(other)})" if other else ""


def _check_types(path: Path, header: DatasetHeader) -> None:
    for field in fields(header):
        value = getattr(header, field.name)
        field_type = cast(Any, field.type)
        # bool is a subclass of int in Python, but not a valid id or count.
        if not isinstance(value, field_type) or (isinstance(value, bool) and field_type is not bool):
            expected = field_type.__name__ if isinstance(field_type, type) else field_type
            raise DataError(
                f"{path} has {field.name}={value!r}, expected {expected}; prepare the data again, or {_WITHOUT}"
            )


def _content(path: Path) -> dict[str, Any] | None:
    """The JSON object of a header of any version; None if the file is not a header."""
    if path.stat().st_size > LARGEST:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    ours = isinstance(content, dict) and str(content.get("format")).startswith(FAMILY)
    return content if ours else None
