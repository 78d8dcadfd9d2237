"""Train a tokenizer on text.

megatron-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

megatron-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer.model --algorithm unigram

Use a .json file with --tokenizer-type HuggingFaceTokenizer, a .model file with SentencePieceTokenizer.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("train_tokenizer")

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.prepared_output import NEW, prepare_output
from megatron_core.preprocess import find_inputs, read_texts
from megatron_core.preprocess.atomic_write import atomic_write
from megatron_core.preprocess.report import counted, progress_of_bytes
from megatron_core.terminal import parse_flags
from megatron_core.tokenizers import build_tokenizer

END_OF_DOCUMENT = "<|endoftext|>"

# Pieces that sentencepiece adds to every .model, and the piece of its padding id.
PIECES = ("<unk>", "<s>", "</s>")
PADDING = "<pad>"
# sentencepiece silently skips lines longer than max_sentence_length bytes: they are split into parts of this length
# instead. A character has at most 4 bytes.
LINE_CHARACTERS = 4096
# Sixteen times the largest vocabulary in use; the libraries allocate memory for all of it at once.
LARGEST_VOCABULARY = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Train a tokenizer on text."""

    input: tuple[str, ...]
    """Files, folders, or patterns in quotes: JSON Lines (.jsonl, .json), Parquet (.parquet), or plain text (all other
    suffixes), each also compressed (.gz, .zst)."""
    output: str
    """File to write: tokenizer.json (byte-level, by the tokenizers library) or tokenizer.model (by sentencepiece)."""
    vocab_size: int = 8192
    """Number of tokens, including the 256 bytes and the special tokens."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """bpe: merge frequent pairs. unigram: keep the most useful pieces (in a .json they may differ between runs)."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens besides <|endoftext|> (.json) or <unk>, <s> and </s> (.model), in the order of their ids."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns of Parquet) that hold the text."""


def texts(settings: TokenizerFlags) -> Iterator[list[str]]:
    """Batches of the texts in the inputs, with a progress bar on a terminal; broken documents are omitted and
    reported."""
    paths = find_inputs(settings.input)
    total = sum(path.stat().st_size for path in paths)
    broken = 0
    first = ""
    with progress_of_bytes(total, desc="reading") as bar:
        for batch, size, faults in read_texts(paths, settings.json_keys):
            yield batch
            bar.update(size)
            broken = broken + len(faults)
            first = first or next(iter(faults), "")
    if broken:
        print(f"{counted(broken, 'broken document')} omitted; the first: {first}", file=sys.stderr, flush=True)


def train_and_write(settings: TokenizerFlags) -> None:
    """Train, write the file atomically, and print how to use it."""
    learn, tokenizer_type = kind(settings)
    prepare_output(settings, "output", NEW)  # tokenizers of other programs look alike
    data = learn(settings)
    with atomic_write(settings.output) as file:
        file.write(data)
    size = build_tokenizer(tokenizer_type, settings.output).vocab_size
    print(f"{settings.output}: {size:,} tokens", flush=True)
    if size < settings.vocab_size:
        print(
            f"--vocab-size {settings.vocab_size} was not reached: the text does not have enough different pieces",
            file=sys.stderr,
        )
    print(f"use it with --tokenizer-type {tokenizer_type} --tokenizer-model {settings.output}", flush=True)


def kind(settings: TokenizerFlags) -> tuple[Callable[[TokenizerFlags], bytes], str]:
    """The training function for the format of the output, and the tokenizer type that reads it."""
    kinds = {
        ".json": (train_tokenizers, "HuggingFaceTokenizer"),
        ".model": (train_sentence_piece, "SentencePieceTokenizer"),
    }
    suffix = Path(settings.output).suffix
    if suffix not in kinds:
        raise ConfigError(
            f"--output {settings.output} has the unknown format {suffix or '(no suffix)'}; use the suffix .json (for "
            "the tokenizers library) or .model (for sentencepiece)"
        )
    return kinds[suffix]


def check_training(settings: TokenizerFlags, always: Sequence[str]) -> None:
    """ConfigError for flags with illegal values, before any text is read."""
    named = [*always, *settings.special_tokens]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None or "" in named:
        fault = f"{twice} occurs twice" if twice else "one name is empty"
        raise ConfigError(
            f"--special-tokens {' '.join(settings.special_tokens)}: with {' '.join(always)}, which is always included, "
            f"{fault}; remove it"
        )
    smallest = len(named) + 256
    if settings.vocab_size < smallest:
        raise ConfigError(
            f"--vocab-size {settings.vocab_size} is too small; the 256 bytes and {' '.join(named)} need {smallest}"
        )
    if settings.vocab_size > LARGEST_VOCABULARY:
        raise ConfigError(f"--vocab-size {settings.vocab_size} is too large; legal: up to {LARGEST_VOCABULARY}")


def train_tokenizers(settings: TokenizerFlags) -> bytes:
    """A byte-level tokenizer.json, which encodes any text without loss."""
    check_training(settings, (END_OF_DOCUMENT,))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    common: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "special_tokens": [END_OF_DOCUMENT, *settings.special_tokens],
        "initial_alphabet": alphabet,
        "show_progress": sys.stderr.isatty(),
    }
    trainer: trainers.Trainer
    if settings.algorithm == "bpe":
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(**common)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**common)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(settings), trainer)
    if tokenizer.get_vocab_size() == len(alphabet) + len(common["special_tokens"]):
        raise nothing_to_learn(settings)
    return tokenizer.to_str(pretty=True).encode("utf-8")


def train_sentence_piece(settings: TokenizerFlags) -> bytes:
    """A sentencepiece .model like Llama 2's: no normalisation of the text, and rare characters become bytes."""
    check_training(settings, PIECES)
    faults: list[BaseException] = []
    read = remembering(faults, lines(chain.from_iterable(texts(settings))))
    first = next(read, None)
    if first is None:
        raise nothing_to_learn(settings)
    padding = PADDING in settings.special_tokens
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], read),
            model_writer=model,
            model_type=settings.algorithm,
            vocab_size=settings.vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * LINE_CHARACTERS,
            user_defined_symbols=[name for name in settings.special_tokens if name != PADDING],
            pad_id=len(PIECES) if padding else -1,
            pad_piece=PADDING,
            # Its log is its only progress display.
            minloglevel=0 if sys.stderr.isatty() else 2,
        )
    except RuntimeError as error:
        raise faults[0] if faults else explain_failure(settings, error) from error
    return model.getvalue()


def remembering(faults: list[BaseException], texts: Iterable[str]) -> Iterator[str]:
    """The same texts; an error in reading them is kept in ``faults``, because sentencepiece raises another one."""
    try:
        yield from texts
    except (Exception, KeyboardInterrupt) as error:
        faults.append(error)
        raise


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts, without blank ones, split into parts of at most LINE_CHARACTERS."""
    for text in texts:
        for line in text.splitlines():
            for begin in range(0, len(line), LINE_CHARACTERS):
                if (piece := line[begin : begin + LINE_CHARACTERS]).strip():
                    yield piece


def explain_failure(settings: TokenizerFlags, error: RuntimeError) -> MegatronError:
    """An error that names the setting and the way out, for an error of sentencepiece."""
    message = str(error)
    if most := re.search(r"set it to a value <= (\d+)", message):
        return ConfigError(
            f"--vocab-size {settings.vocab_size} is too large for the text, which has at most {most[1]} pieces; "
            "lower it, or give more text"
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab-size {settings.vocab_size} is too small for the text, whose characters, bytes and special tokens "
            f"make {least[1]}; raise it"
        )
    return DataError(f"--input {' '.join(settings.input)}: sentencepiece cannot train on it: {message}")


def nothing_to_learn(settings: TokenizerFlags) -> DataError:
    """The error for inputs without enough text."""
    return DataError(
        f"--input {' '.join(settings.input)}: not enough text under --json-keys "
        f"{' '.join(settings.json_keys)}; give more text, or choose another key"
    )


def main() -> None:
    """Parse the flags and run."""
    train_and_write(parse_flags(TokenizerFlags, description=__doc__))
