"""Text and small tokenizer files for the tests."""

import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = ["def f(x):\n    return x + 1\n", "the cat and the hat", "Grüße, 世界 🙂", "", "  two  spaces \t tab"]


def train_bpe(special: list[str], size: int = 300) -> Tokenizer:
    """A byte-level BPE over the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def write_tokenizer_json(folder: Path, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """A tokenizer.json in the folder."""
    path = folder / "tokenizer.json"
    train_bpe(list(special)).save(str(path))
    return path


def write_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """A vocab.json and a merges.txt in the folder."""
    state = json.loads(train_bpe(["<|endoftext|>"]).to_str())["model"]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps(state["vocab"]))
    merges.write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]) + "\n")
    return vocabulary, merges


def write_sentence_piece(folder: Path, bos: int = 1) -> Path:
    """A SentencePiece model in the folder; bos=-1 leaves the begin-of-sentence piece out."""
    text, prefix = folder / "text.txt", folder / f"model{bos}"
    text.write_text("\n".join(line for t in TEXTS * 20 for line in t.splitlines() if line.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(prefix),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        bos_id=bos,
        normalization_rule_name="identity",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return Path(f"{prefix}.model")
