"""What made a token file, written beside it, so that another tokenizer is noticed before training."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from megatron_core.datasets.atomic_write import atomic_write
from megatron_core.datasets.megatron_order.cache import say_once
from megatron_core.errors import DataError
from megatron_core.tokenizers import Tokenizer

FAMILY = "megatron-native token file "
FORMAT = f"{FAMILY}2"
# Version 1 had no bos, eos and pad; they are read as None.
READABLE = (f"{FAMILY}1", FORMAT)

SPECIAL_IDS = ("eod", "bos", "eos", "pad")

# Ours have less than 1,000 bytes; a corpus that happens to have the name of a header is not read as a whole.
LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class DatasetHeader:
    """The content of `PREFIX.json`."""

    tokenizer_type: str
    """Name of the tokenizer's kind, as in `--tokenizer-type`."""
    fingerprint: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    """The tokenizer's number of tokens."""
    eod: int | None
    """The tokenizer's end-of-document id."""
    append_eod: bool
    """Whether that id ends every document of the file."""
    documents: int
    """Documents in the file."""
    tokens: int
    """Tokens in the file."""
    bos: int | None = None
    """The tokenizer's id at the beginning of a sequence."""
    eos: int | None = None
    """The tokenizer's id at the end of a sequence."""
    pad: int | None = None
    """The tokenizer's padding id."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tokenizer_type: str, *, append_eod: bool, documents: int, tokens: int
    ) -> "DatasetHeader":
        """The header of a file that the tokenizer made."""
        known: dict[str, Any] = {name: getattr(tokenizer, name) for name in ("vocab_size", *SPECIAL_IDS)}
        known |= {"append_eod": append_eod, "documents": documents, "tokens": tokens}
        return cls(tokenizer_type=tokenizer_type, fingerprint=tokenizer.fingerprint(), **known)


def get_header_path(path_prefix: str) -> str:
    """The header's path."""
    return f"{path_prefix}.json"


def write_header(path_prefix: str, header: DatasetHeader) -> None:
    """Write the header; DataError if a JSON file of someone else has its name."""
    check_header_path(path_prefix)
    with atomic_write(get_header_path(path_prefix)) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(header)}, indent=2).encode("utf-8") + b"\n")


def check_header_path(path_prefix: str) -> None:
    """DataError if a JSON file of someone else has the header's name."""
    path = Path(get_header_path(path_prefix))
    if path.exists() and _content(path) is None:
        raise DataError(f"{path} exists and is no header of a token file; move it, or choose another --output-prefix")


def read_header(path_prefix: str) -> DatasetHeader | None:
    """The header of a token file, or None where it has none, as files that Megatron made.

    DataError: the header is of a version that is not known, lacks a field, or has one of another type.
    """
    path = Path(get_header_path(path_prefix))
    if not path.is_file():
        return None
    content = _content(path)
    if content is None:
        say_once(f"{path} IS NO HEADER of a token file: that the tokenizer is the right one is not checked")
        return None
    found = content.pop("format")
    if found not in READABLE:
        raise DataError(
            f"{path} is a header of the format {found!r}, expected one of {', '.join(map(repr, READABLE))}; use the "
            f"version of the package that wrote it, or {_WITHOUT}"
        )
    try:
        header = DatasetHeader(**content)
    except TypeError as error:
        raise DataError(
            f"{path} lacks a field of a token file's header, or has one too many ({error}); prepare the data "
            f"again, or {_WITHOUT}"
        ) from error
    _check_types(path, header)
    return header


def remove_header(path_prefix: str) -> None:
    """Remove the header of a token file, if it is one."""
    path = Path(get_header_path(path_prefix))
    if path.is_file() and _content(path) is not None:
        path.unlink()


def check_tokenizer(path_prefix: str, tokenizer: Tokenizer) -> None:
    """DataError if the token file was made with another tokenizer; without a header nothing is checked.

    Another tokenizer is one of another size or fingerprint, or one that ends documents with another id than the one
    that the file's documents end with. Its other special ids stand nowhere in the file, and may differ.
    """
    header = read_header(path_prefix)
    if header is None:
        return
    way_out = "give the tokenizer that made it with --tokenizer-model, or prepare the data again"
    if header.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{path_prefix} was made with a {header.tokenizer_type} of {header.vocab_size} tokens, and the "
            f"tokenizer of this run has {tokenizer.vocab_size}{_other_ids(header, tokenizer)}; {way_out}"
        )
    found = tokenizer.fingerprint()
    if header.fingerprint != found:
        raise DataError(
            f"{path_prefix} was made with another {header.tokenizer_type}: fingerprint "
            f"{header.fingerprint[:12]}, and the tokenizer of this run has {found[:12]}"
            f"{_other_ids(header, tokenizer)}; {way_out}"
        )
    if header.append_eod and header.eod != tokenizer.eod:
        raise DataError(
            f"the documents of {path_prefix} end with the id {header.eod}, and the tokenizer of this run ends them "
            f"with {tokenizer.eod}, with the same vocabulary; give all the files of the tokenizer that made the data "
            "(tokenizer_config.json may name special tokens), or prepare the data again"
        )


def check_vocabulary(path_prefix: str, vocab_size: int) -> None:
    """DataError if a token file may hold ids beyond a vocabulary; for runs that name no tokenizer."""
    header = read_header(path_prefix)
    if header is not None and header.vocab_size > vocab_size:
        raise DataError(
            f"{path_prefix} was made with a {header.tokenizer_type} of {header.vocab_size} tokens, and --vocab-size "
            f"is {vocab_size}; give at least that many, or the tokenizer itself"
        )


def check_counts(header: DatasetHeader | None, path_prefix: str, documents: int, tokens: int) -> None:
    """DataError if a token file holds other numbers of documents or tokens than its header says."""
    for name, found in (("documents", documents), ("tokens", tokens)) if header is not None else ():
        if getattr(header, name) != found:
            raise DataError(
                f"{get_header_path(path_prefix)} says {name}={getattr(header, name)}, and the files hold {found}: they "
                "are not of one run; copy all three files again, prepare the data again with "
                f"tools/preprocess_data.py, or {_WITHOUT}"
            )


_WITHOUT = "remove the file to go without the check"


def _other_ids(header: DatasetHeader, tokenizer: Tokenizer) -> str:
    """Which special ids that the header knows differ, as a part of a sentence."""
    theirs = {name: getattr(header, name) for name in SPECIAL_IDS if getattr(header, name) is not None}
    ours = {name: getattr(tokenizer, name) for name in theirs}
    other = [f"{name} {theirs[name]} there and {ours[name]} here" for name in theirs if theirs[name] != ours[name]]
    return f" ({', '.join(other)})" if other else ""


def _check_types(path: Path, header: DatasetHeader) -> None:
    for field in fields(header):
        value, kind = getattr(header, field.name), cast(Any, field.type)
        # A bool is an int for Python, and no id or count.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise DataError(
                f"{path} has {field.name}={value!r}, expected {expected}; prepare the data again, or {_WITHOUT}"
            )


def _content(path: Path) -> dict[str, Any] | None:
    """The JSON object of a header, of any version; None if the file is something else."""
    if path.stat().st_size > LARGEST:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    ours = isinstance(content, dict) and str(content.get("format")).startswith(FAMILY)
    return content if ours else None
