"""Training a vocabulary on JSON Lines text."""

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_core.commands import train_tokenizer
from megatron_core.commands.train_tokenizer import TokenizerFlags, main, train_and_write
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess import Limits
from megatron_core.tokenizers import Tokenizer
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.vocabularies.corpus import TEXTS

UNSEEN = ["any text: Ω 🙂\n\tthe cat", "", "  two  spaces ", "Привет\r\n\x00 мир\u2028"]
KINDS = [("tokenizer.json", "bpe"), ("tokenizer.json", "unigram"), ("t.model", "bpe"), ("t.model", "unigram")]
FORMATS = ["tokenizer.json", "t.model"]


def settings(folder: Path, vocab_size: int = 280, output: str = "tokenizer.json", **changes: object) -> TokenizerFlags:
    """Settings for a small corpus in the folder."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in TEXTS * 3))
    given = {"input": (str(corpus),), "output": str(folder / output), "vocab_size": vocab_size}
    return TokenizerFlags(**{**given, **changes})


def load(given: TokenizerFlags) -> Tokenizer:
    """The written tokenizer."""
    kind = HuggingFaceTokenizer if given.output.endswith(".json") else SentencePieceTokenizer
    return kind(given.output)


def test_vocabulary(tmp_path: Path) -> None:
    train_and_write(settings(tmp_path))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.vocab_size == 280
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    text = "any text: Ω 🙂\n\tthe cat"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize("the cat")) < len("the cat")


@pytest.mark.parametrize(("output", "algorithm"), KINDS)
def test_every_format_and_algorithm(
    output: str, algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(tmp_path, 400, output, algorithm=algorithm, special_tokens=("<pad>", "<|turn|>"))
    with Path(given.input[0]).open("a") as file:
        file.write(json.dumps({"text": Path(__file__).read_text()}) + "\n")
    train_and_write(given)
    tokenizer = load(given)
    assert tokenizer.vocab_size == 400
    # Encoding is lossless for any text, even if it was not in the training text.
    for text in [*TEXTS, *UNSEEN]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize(" the cat and the hat")) < len("the cat and the hat")
    own = 1 if output.endswith(".json") else 3
    assert tokenizer.eod is not None and tokenizer.pad == own
    assert tokenizer.detokenize([own + 1]) == "<|turn|>" and tokenizer.tokenize("a<|turn|>").count(own + 1) == 1
    kind = type(tokenizer).__name__
    assert f"use it with --tokenizer-type {kind} --tokenizer-model {given.output}" in capsys.readouterr().out


def test_no_padding_unless_asked_for(tmp_path: Path) -> None:
    for output in FORMATS:
        given = settings(tmp_path, 310, output)
        train_and_write(given)
        assert load(given).pad is None


def test_long_lines_are_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencepiece silently skips lines that are too long for it."""
    monkeypatch.setattr(train_tokenizer, "LINE_CHARACTERS", 50)
    given = settings(tmp_path, 290, "t.model")
    Path(given.input[0]).write_text(json.dumps({"text": "zebra " * 1000}) + "\n")
    train_and_write(replace(given, vocab_size=270))
    assert len(load(given).tokenize("zebra zebra")) < 5


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    train_and_write(settings(tmp_path))
    first = HuggingFaceTokenizer(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match="exists and is not a new or empty file"):  # it may be of another program
        train_and_write(settings(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    train_and_write(settings(tmp_path))
    assert HuggingFaceTokenizer(tmp_path).fingerprint() == first


def test_too_few_merges_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_write(settings(tmp_path, vocab_size=5000))
    assert "--vocab-size 5000 was not reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 256}, r"--vocab-size 256 is too small; the 256 bytes and <\|endoftext\|> need 257"),
        ({"vocab_size": 258, "output": "t.model"}, r"258 is too small; the 256 bytes and <unk> <s> </s> need 259"),
        ({"special_tokens": ("<a>",), "vocab_size": 257}, r"<\|endoftext\|> <a> need 258"),
        ({"output": "t.bin"}, r"--output .*t\.bin has the unknown format \.bin; use the suffix \.json"),
        ({"output": "t"}, r"the unknown format \(no suffix\)"),
        ({"special_tokens": ("<a>", "<a>")}, r"--special-tokens <a> <a>: with <\|endoftext\|>.*<a> occurs twice"),
        ({"special_tokens": ("</s>",), "output": "t.model"}, r"</s> occurs twice; remove it"),
        ({"special_tokens": ("",)}, "one name is empty"),
        (
            {"vocab_size": 100_000, "output": "t.model"},
            r"100000 is too large for the text, which has at most \d+ pieces",
        ),
        ({"vocab_size": 260, "output": "t.model"}, r"260 is too small for the text, whose characters.*make \d+; raise"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: dict, sentence: str, tmp_path: Path) -> None:
    given = settings(tmp_path, **changes)
    with pytest.raises(ConfigError, match=sentence):
        train_and_write(given)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("content", ['{"text": ""}\n', "", '{"text": "\\n"}\n'])
@pytest.mark.parametrize(("output", "algorithm"), KINDS)
def test_nothing_to_learn(content: str, output: str, algorithm: str, tmp_path: Path) -> None:
    given = settings(tmp_path, 290, output, algorithm=algorithm)
    Path(given.input[0]).write_text(content)
    with pytest.raises(DataError, match=r"--input .*corpus\.jsonl: not enough text under --json-keys text; give"):
        train_and_write(given)
    assert not Path(given.output).exists()


@pytest.mark.parametrize("output", FORMATS)
def test_broken_documents_are_left_out_and_told(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in preprocess_data, in the first batch and in later ones; nothing else is printed to a file."""
    monkeypatch.setattr("megatron_core.preprocess.readers.Limits", partial(Limits, batch_bytes=50))
    given = settings(tmp_path, 290, output)
    with Path(given.input[0]).open("ab") as file:
        file.write(b'{broken\n{"text": "caf\xe9"}\n')
    train_and_write(given)
    assert load(given).vocab_size == 290
    told = capsys.readouterr().err
    assert told.startswith("2 broken documents omitted; the first: ") and told.count("\n") == 1
    assert "corpus.jsonl, line 16 is not JSON" in told


@pytest.mark.parametrize("output", FORMATS)
def test_a_damaged_file_is_named(output: str, tmp_path: Path) -> None:
    """Both libraries read through their own code, which must not hide the error."""
    given = settings(tmp_path, 290, output)
    damaged = tmp_path / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress(Path(given.input[0]).read_bytes())[:-9])
    with pytest.raises(DataError, match=r"b\.jsonl\.gz is truncated"):
        train_and_write(replace(given, input=(*given.input, str(damaged))))
    assert not Path(given.output).exists()


def test_error_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["train_tokenizer.py", "--input", str(tmp_path / "absent"), "--output", str(tmp_path / "t.json")]
    monkeypatch.setattr("sys.argv", flags)
    with pytest.raises(DataError, match=r"--input .*absent: no file has that name"):
        main()
