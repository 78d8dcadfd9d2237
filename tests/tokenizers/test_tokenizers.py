"""What all tokenizers owe the protocol, and what is special about each."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import processors

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import (
    ByteLevelTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from tests.tokenizers.corpus import (
    TEXTS,
    train_bpe,
    write_gpt2_files,
    write_sentence_piece,
    write_tokenizer_json,
)

MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "hugging face": lambda folder: HuggingFaceTokenizer(write_tokenizer_json(folder)),
    "gpt2": lambda folder: GPT2BPETokenizer(*write_gpt2_files(folder)),
    "sentencepiece": lambda folder: SentencePieceTokenizer(write_sentence_piece(folder)),
    "bytes": lambda folder: ByteLevelTokenizer(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_protocol(name: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[name](tmp_path)
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    assert tokenizer.tokenize_batch([]) == []
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        if name != "sentencepiece":  # which drops and adds spaces by design
            assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod is not None and 0 <= tokenizer.eod < tokenizer.vocab_size
    assert len(tokenizer.fingerprint()) == 64
    assert all(path.is_file() for path in tokenizer.files())


def test_fingerprints_differ(tmp_path: Path) -> None:
    prints = [make(tmp_path).fingerprint() for make in MAKERS.values()]
    prints += [NullTokenizer(size).fingerprint() for size in (10, 11)]
    prints.append(SentencePieceTokenizer(write_sentence_piece(tmp_path), add_bos=True).fingerprint())
    assert len(set(prints)) == len(prints)
    assert prints[0] == MAKERS["hugging face"](tmp_path).fingerprint()


def test_hugging_face_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    before = HuggingFaceTokenizer(path).fingerprint()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items()))))
    assert HuggingFaceTokenizer(path).fingerprint() == before
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    assert HuggingFaceTokenizer(path).fingerprint() != before


def test_hugging_face_reads_a_folder_and_never_cuts_or_adds(tmp_path: Path) -> None:
    tokenizer = train_bpe(["<s>", "</s>"])
    plain = [tokenizer.encode(text).ids for text in TEXTS]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = HuggingFaceTokenizer(tmp_path)
    assert loaded.tokenize_batch(TEXTS) == plain
    assert loaded.eod == 1
    assert loaded.files() == [tmp_path / "tokenizer.json"]


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<bos>", "<eos>"], "<eos>"),
        (["<other>"], None),
    ],
)
def test_hugging_face_end_of_document(special: list[str], expected: str | None, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer_json(tmp_path, tuple(special)))
    assert tokenizer.eod == (None if expected is None else special.index(expected))


def test_hugging_face_vocabulary_with_gaps(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    content = json.loads(path.read_text())
    entry = content["added_tokens"][0]
    content["added_tokens"].append({**entry, "id": 999, "content": "<extra>"})
    path.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.vocab_size > max(tokenizer.tokenize("a<extra>"))


def test_gpt2_takes_its_end_as_plain_text(tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*write_gpt2_files(tmp_path))
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>")
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"


def test_sentence_piece_puts_bos_first_on_request(tmp_path: Path) -> None:
    path = write_sentence_piece(tmp_path)
    plain, llama = SentencePieceTokenizer(path), SentencePieceTokenizer(path, add_bos=True)
    assert llama.tokenize_batch(TEXTS) == [[1, *ids] for ids in plain.tokenize_batch(TEXTS)]
    assert llama.detokenize(llama.tokenize("the cat")) == "the cat"


def test_bytes_leave_the_end_out_of_the_text() -> None:
    tokenizer = ByteLevelTokenizer()
    assert tokenizer.vocab_size == 257 and tokenizer.eod == 256
    assert tokenizer.detokenize([104, 105, 256]) == "hi"
    assert tokenizer.detokenize([0xC3]) == "\ufffd"


def test_null() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize(" 1 2\n99 ") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2]) == "1 2"


@pytest.mark.parametrize("text", ["1 two", "-1", "1.5", "²"])
def test_null_refuses_words(text: str) -> None:
    with pytest.raises(DataError, match="--tokenizer-type"):
        NullTokenizer(100).tokenize(text)


def test_null_refuses_ids_past_its_end() -> None:
    with pytest.raises(DataError, match="token id 100 does not fit --vocab-size 100"):
        NullTokenizer(100).tokenize("100")
    with pytest.raises(ConfigError, match="--vocab-size 0"):
        NullTokenizer(0)


def test_no_torch() -> None:
    code = "import sys, megatron_core.tokenizers, megatron_core.datasets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
