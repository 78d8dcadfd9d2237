"""Learning a vocabulary from JSON Lines text."""

import json
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import HuggingFaceTokenizer
from tests.tokenizers.corpus import TEXTS
from tools.train_tokenizer import Settings, main, train


def settings(folder: Path, vocab_size: int = 280) -> Settings:
    """Settings for a small corpus in the folder."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in TEXTS))
    return Settings(input=(str(corpus),), output=str(folder / "tokenizer.json"), vocab_size=vocab_size)


def test_vocabulary(tmp_path: Path) -> None:
    train(settings(tmp_path))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.vocab_size == 280
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    text = "any text: Ω 🙂\n\tthe cat"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize("the cat")) < len("the cat")


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    train(settings(tmp_path))
    first = HuggingFaceTokenizer(tmp_path).fingerprint()
    train(settings(tmp_path))
    assert HuggingFaceTokenizer(tmp_path).fingerprint() == first


def test_too_few_merges_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(settings(tmp_path, vocab_size=5000))
    assert "--vocab-size 5000 was not reached" in capsys.readouterr().err


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 256 is too small.* make 257"):
        train(settings(tmp_path, vocab_size=256))
    given = settings(tmp_path)
    Path(given.input[0]).write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no pair of bytes comes up twice"):
        train(given)
    assert not Path(given.output).exists()


def test_error_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["train_tokenizer.py", "--input", str(tmp_path / "absent"), "--output", str(tmp_path / "t.json")]
    monkeypatch.setattr("sys.argv", flags)
    with pytest.raises(SystemExit, match=r"train_tokenizer: --input .*absent: no file has that name"):
        main()
