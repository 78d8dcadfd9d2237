"""Text and small tokenizer files for the tests."""

import base64
import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_core.vocabularies.byte_symbols import BYTE_SYMBOLS

TEXTS = ["def f(x):\n    return x + 1\n", "the cat and the hat", "Grüße, 世界 🙂", "", "  two  spaces \t tab"]


MISSING = b"\x04\xaa\xc2"
"""UTF-8 bytes that do not occur in the texts."""
DROPPED_TEXTS = ["a\x04b", "th\u00aae c\u00aaat", "\x04", "x\u00aa\x04\u00aa the", "plain"]
"""Texts with those bytes; without them the letters around them are separate tokens."""


def train_bpe(special: list[str], size: int = 300, without: bytes = b"") -> Tokenizer:
    """A byte-level BPE over the texts, without tokens for some bytes that are not in them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {BYTE_SYMBOLS[byte] for byte in without})
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def write_tokenizer_json(folder: Path, special: tuple[str, ...] = ("<|endoftext|>",), without: bytes = b"") -> Path:
    """A tokenizer.json in the folder."""
    path = folder / "tokenizer.json"
    train_bpe(list(special), without=without).save(str(path))
    return path


def write_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """A vocab.json and a merges.txt in the folder."""
    state = json.loads(train_bpe(["<|endoftext|>"]).to_str())["model"]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps(state["vocab"]))
    merges.write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]) + "\n")
    return vocabulary, merges


def write_sentence_piece(folder: Path, bos: int = 1, pad: int = -1, keep_spaces: bool = False) -> Path:
    """A SentencePiece model in the folder; bos=-1 omits the begin-of-sentence piece."""
    text, prefix = folder / "text.txt", folder / f"model{bos}{pad}{keep_spaces}"
    text.write_text("\n".join(line for t in TEXTS * 20 for line in t.splitlines() if line.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(prefix),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        bos_id=bos,
        pad_id=pad,
        remove_extra_whitespaces=not keep_spaces,
        normalization_rule_name="identity",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return Path(f"{prefix}.model")


def make_ranks() -> list[bytes]:
    """Tokens in the order of their ranks: all bytes, then pairs that occur in the texts."""
    pairs = [
        "eT",
        "th",
        "he",
        "at",
        "the",
        " the",
        " a",
        "the hat",
        "  ",
        "TH",
        "cat",
        " cat",
        "12",
        "//",
        "\n\n",
        "世",
    ]
    return (
        [bytes([i]) for i in range(256)]
        + [b"\xe4\xb8"]
        + [pair.encode("utf-8") for pair in pairs]
        + [b"%c%c" % (a, b) for a in b"defx" for b in b"(:+)"]
        + [b"%c%c%c" % (a, a, b) for a in b"klmnopq" for b in b"uvwxy"]
    )


def write_rank_json(folder: Path) -> Path:
    """The ranks as Megatron's JSON list."""
    path = folder / "ranks.json"
    path.write_text(
        json.dumps(
            [
                {
                    "rank": rank,
                    "token_bytes": base64.b64encode(token).decode("ascii"),
                    "token_str": token.decode("utf-8", errors="replace"),
                }
                for rank, token in enumerate(make_ranks())
            ]
        )
    )
    return path


def write_rank_lines(folder: Path) -> Path:
    """The ranks as lines of text."""
    path = folder / "ranks.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(make_ranks())))
    return path
