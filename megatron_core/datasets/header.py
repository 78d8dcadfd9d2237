"""What made a token file, written beside it, so that another tokenizer is noticed before training."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_core.datasets.aside import writing_aside
from megatron_core.errors import DataError
from megatron_core.tokenizers import Tokenizer

FORMAT = "megatron-native token file 1"


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


def get_header_path(path_prefix: str) -> str:
    """The header's path."""
    return f"{path_prefix}.json"


def write_header(path_prefix: str, header: DatasetHeader) -> None:
    """Write the header; DataError if a JSON file of someone else has its name."""
    check_header_path(path_prefix)
    with writing_aside(get_header_path(path_prefix)) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(header)}, indent=2).encode("utf-8") + b"\n")


def check_header_path(path_prefix: str) -> None:
    """DataError if a JSON file of someone else has the header's name."""
    path = Path(get_header_path(path_prefix))
    if path.exists() and _content(path) is None:
        raise DataError(f"{path} exists and is no header of a token file; move it, or choose another --output-prefix")


def read_header(path_prefix: str) -> DatasetHeader | None:
    """The header of a token file, or None where it has none, as files that Megatron made."""
    path = Path(get_header_path(path_prefix))
    content = _content(path) if path.is_file() else None
    if content is None:
        return None
    fields = {key: value for key, value in content.items() if key != "format"}
    try:
        return DatasetHeader(**fields)
    except TypeError as error:
        raise DataError(
            f"{path} lacks a field of a token file's header, or has one too many ({error}); prepare the data "
            "again, or remove the file to go without the check"
        ) from error


def remove_header(path_prefix: str) -> None:
    """Remove the header of a token file, if it is one."""
    path = Path(get_header_path(path_prefix))
    if path.is_file() and _content(path) is not None:
        path.unlink()


def check_tokenizer(path_prefix: str, tokenizer: Tokenizer) -> None:
    """DataError if the token file was made with another tokenizer; without a header nothing is checked."""
    header = read_header(path_prefix)
    if header is None:
        return
    way_out = "give the tokenizer that made it with --tokenizer-model, or prepare the data again"
    if header.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{path_prefix} was made with a {header.tokenizer_type} of {header.vocab_size} tokens, and the "
            f"tokenizer of this run has {tokenizer.vocab_size}; {way_out}"
        )
    found = tokenizer.fingerprint()
    if header.fingerprint != found:
        raise DataError(
            f"{path_prefix} was made with another {header.tokenizer_type}: fingerprint "
            f"{header.fingerprint[:12]}, and the tokenizer of this run has {found[:12]}; {way_out}"
        )


def _content(path: Path) -> dict | None:
    """The JSON object of a header, None if the file is something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
