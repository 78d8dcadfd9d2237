"""Learn a byte-level BPE vocabulary from JSON Lines text.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

The result is for --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from megatron_core.datasets.aside import writing_aside
from megatron_core.datasets.jsonl import find_inputs, read_chunks, texts_of
from megatron_core.errors import ConfigError, DataError, MegatronError

END_OF_DOCUMENT = "<|endoftext|>"
CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Learn a byte-level BPE vocabulary from JSON Lines text."""

    input: tuple[str, ...]
    """JSON Lines files, or globs in quotes."""
    output: str
    """The tokenizer.json to write."""
    vocab_size: int = 8192
    """Tokens to end up with, the 256 bytes and <|endoftext|> among them."""
    json_key: str = "text"
    """Key that holds the text."""


def texts(paths: Sequence[Path], key: str) -> Iterator[list[str]]:
    """The texts of the files, some at a time, with a bar that shows how far the reading is."""
    with tqdm(total=sum(path.stat().st_size for path in paths), unit="B", unit_scale=True) as bar:
        for chunk in read_chunks(paths, CHUNK_BYTES):
            yield [text for (text,) in texts_of(chunk, (key,))]
            bar.update(chunk.size)


def train(settings: Settings) -> None:
    """Count, merge and write the file, aside first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 1
    if settings.vocab_size < smallest:
        raise ConfigError(
            f"--vocab-size {settings.vocab_size} is too small; bytes and {END_OF_DOCUMENT} make {smallest}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(find_inputs(settings.input), settings.json_key), trainer)
    if tokenizer.get_vocab_size() == smallest:
        raise DataError(f"--input {' '.join(settings.input)}: no pair of bytes comes up twice; give more text")
    with writing_aside(settings.output) as file:
        file.write(tokenizer.to_str(pretty=True).encode("utf-8"))
    report(settings, tokenizer.get_vocab_size())


def report(settings: Settings, size: int) -> None:
    """Say what was made, and when the text gave fewer tokens than were asked for."""
    print(f"{settings.output}: {size:,} tokens", flush=True)
    if size < settings.vocab_size:
        print(
            f"--vocab-size {settings.vocab_size} was not reached: the text has no more pairs to merge",
            file=sys.stderr,
        )


def main() -> None:
    """Parse the flags and run; one line on stderr and status 1 for an error that has a way out."""
    settings = tyro.cli(Settings, description=__doc__)
    try:
        train(settings)
    except (MegatronError, OSError) as error:
        sys.exit(f"train_tokenizer: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
