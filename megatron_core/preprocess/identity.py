"""The settings and input files that determine the output of a run."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from megatron_core.preprocess.inputs import InputFile
from megatron_core.preprocess.settings import PreprocessSettings


def identity(settings: PreprocessSettings, sources: Sequence[InputFile], fingerprint: str) -> dict[str, Any]:
    """Return the settings and input files that determine the output of a run, by flag name."""
    described = [[source.path, source.size, source.version] for source in sources]
    return token_identity(settings, fingerprint) | {"--input": described}


def token_identity(settings: PreprocessSettings, fingerprint: str) -> dict[str, Any]:
    """Return the settings that determine the tokens of a document, by flag name."""
    return {
        "--json-keys": list(settings.json_keys),
        "--append-eod": settings.append_eod,
        "--split-sentences": settings.split_sentences,
        "--keep-newlines": settings.keep_newlines,
        "--document-separator": settings.document_separator,
        "--tokenizer-type": settings.tokenizer_type,
        "tokenizer fingerprint": fingerprint,
    }


def differences(before: dict[str, Any], now: dict[str, Any], count: int) -> str:
    """Describe the differences of two runs in their settings and first `used` input files; empty if there are none."""
    changes = [
        f"{name} {before.get(name)}, now {now[name]}"
        for name in now
        if name != "--input" and before.get(name) != now[name]
    ]
    for number, (was, is_now) in enumerate(zip_longest(before["--input"][:count], now["--input"][:count]), 1):
        if was != is_now:
            old = was[0] if was else "none"
            new = is_now[0] if is_now else "none"
            changed = f"different --input files (number {number} was {old}, now {new})"
            return " and ".join([*changes, changed if old != new else f"{old} in a different state"])
    return " and ".join(changes)
