"""Requirements of the protocol for all tokenizers, and properties of each."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers, processors

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer, Tokenizer, dropped_bytes, end_ids
from megatron_core.vocabularies.byte_symbols import BYTE_SYMBOLS, count_bytes, missing_bytes
from megatron_core.vocabularies.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer
from tests.vocabularies.corpus import (
    DROPPED_TEXTS,
    MISSING,
    TEXTS,
    train_bpe,
    write_gpt2_files,
    write_rank_json,
    write_sentence_piece,
    write_tokenizer_json,
)

MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "hugging face": lambda folder: HuggingFaceTokenizer(write_tokenizer_json(folder)),
    "gpt2": lambda folder: GPT2BPETokenizer(*write_gpt2_files(folder)),
    "sentencepiece": lambda folder: SentencePieceTokenizer(write_sentence_piece(folder)),
    "tiktoken": lambda folder: TikTokenizer(write_rank_json(folder)),
    "bytes": lambda folder: ByteLevelTokenizer(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_offsets_are_of_the_characters_that_tokens_come_from(name: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[name](tmp_path)
    for text in [*TEXTS, "plain\u6f22x"]:
        ids, offsets = tokenizer.tokenize_with_offsets(text)
        assert ids == tokenizer.tokenize(text) and len(offsets) == len(ids)
        assert offsets == sorted(offsets)
        covered = {at for begin, end in offsets for at in range(begin, end)}
        assert {at for at, char in enumerate(text) if char.strip()} <= covered
        for number, (begin, end) in enumerate(offsets):
            if end - begin > 1 and text.isascii() and name != "sentencepiece":
                assert tokenizer.detokenize(ids[number : number + 1]) == text[begin:end]


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
    assert tokenizer.eod is not None and tokenizer.eod == tokenizer.eos
    for special in (tokenizer.eod, tokenizer.bos, tokenizer.eos, tokenizer.pad):
        assert special is None or 0 <= special < tokenizer.vocab_size
    assert len(tokenizer.fingerprint()) == 64
    assert all(path.is_file() for path in tokenizer.files())


def test_fingerprints_differ(tmp_path: Path) -> None:
    prints = [make(tmp_path).fingerprint() for make in MAKERS.values()]
    prints += [NullTokenizer(size).fingerprint() for size in (10, 11)]
    prints.append(SentencePieceTokenizer(write_sentence_piece(tmp_path), add_bos=True).fingerprint())
    assert len(set(prints)) == len(prints)
    assert prints[0] == MAKERS["hugging face"](tmp_path).fingerprint()


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"bytes"}))
def test_the_fingerprint_is_computed_once(name: str, tmp_path: Path) -> None:
    """A run compares it with the header of each of its files, of which there may be a thousand."""
    tokenizer = MAKERS[name](tmp_path)
    first = tokenizer.fingerprint()
    for path in tokenizer.files():
        path.unlink()
    assert tokenizer.fingerprint() == first


def write_names(folder: Path, name: str, **tokens: object) -> Path:
    """A file that names special tokens."""
    path = folder / name
    path.write_text(json.dumps(tokens))
    return path


def test_hugging_face_takes_special_ids_from_the_files_beside(tmp_path: Path) -> None:
    model = write_tokenizer_json(tmp_path, ("<a>", "<b>", "<c>", "<pad>", "<s>"))
    alone = HuggingFaceTokenizer(model)
    assert (alone.eod, alone.bos, alone.eos, alone.pad) == (None, 4, None, 3)  # by their usual names
    map_file = write_names(tmp_path, "special_tokens_map.json", bos_token="<a>", pad_token="<b>")
    config = write_names(
        tmp_path, "tokenizer_config.json", eos_token={"content": "<b>"}, pad_token="<c>", bos_token=None
    )
    named = HuggingFaceTokenizer(tmp_path)
    assert (named.eod, named.bos, named.eos, named.pad) == (1, 0, 1, 2)
    assert named.files() == [model, map_file, config]
    # They do not affect ids of texts, so data written without them matches this tokenizer.
    assert named.fingerprint() == alone.fingerprint()
    assert named.tokenize_batch(TEXTS) == alone.tokenize_batch(TEXTS)


def test_hugging_face_end_of_a_turn_is_not_the_end_of_a_document(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path, ("<|endoftext|>", "<|im_end|>"))
    write_names(
        tmp_path, "tokenizer_config.json", eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<gone>"
    )
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.pad, tokenizer.bos) == (0, 1, 0, None)


def test_hugging_face_ends_of_a_generated_text(tmp_path: Path) -> None:
    """Ids in generation_config.json and of a usual name, but not a usual name that is ordinary text."""
    write_tokenizer_json(tmp_path, ("<|endoftext|>", "<|im_end|>", "<mine>", "<other>"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert end_ids(tokenizer) == {0, 1}
    config = write_names(tmp_path, "generation_config.json", eos_token_id=[2, 0])
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert (tokenizer.eod, end_ids(tokenizer), config in tokenizer.files()) == (0, {0, 1, 2}, True)
    write_names(tmp_path, "generation_config.json", eos_token_id=3)
    assert end_ids(HuggingFaceTokenizer(tmp_path)) == {0, 1, 3}
    assert end_ids(ByteLevelTokenizer()) == {ByteLevelTokenizer().eod}


@pytest.mark.parametrize(
    ("content", "sentence"), [("{", "cannot be read as JSON"), ("[]", "contains a list, not an object")]
)
def test_hugging_face_names_file_that_is_broken(content: str, sentence: str, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json {sentence}.*or remove it to use the usual names"):
        HuggingFaceTokenizer(tmp_path)


def test_hugging_face_agrees_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    write_tokenizer_json(tmp_path, ("</s>", "<s>", "<pad>"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_names(tmp_path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(tmp_path)), HuggingFaceTokenizer(tmp_path)
    assert ours.tokenize_batch(TEXTS) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)


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


def test_sentence_piece_special_ids(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(write_sentence_piece(tmp_path, pad=3))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, 3)
    without = SentencePieceTokenizer(write_sentence_piece(tmp_path, bos=-1))
    assert (without.bos, without.pad) == (None, None)


@pytest.mark.parametrize("add_bos", [False, True])
def test_sentence_piece_round_trip(add_bos: bool, tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(write_sentence_piece(tmp_path, keep_spaces=True), add_bos)
    ids = tokenizer.tokenize_batch(TEXTS)
    assert ids == [tokenizer.tokenize(text) for text in TEXTS]
    assert [tokenizer.detokenize(each) for each in ids] == TEXTS


def test_bytes_leave_the_end_out_of_the_text() -> None:
    tokenizer = ByteLevelTokenizer()
    assert tokenizer.vocab_size == 257 and tokenizer.eod == 256
    assert tokenizer.detokenize([104, 105, 256]) == "hi"
    assert tokenizer.detokenize([0xC3]) == "\ufffd"


def test_null() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, None)
    assert tokenizer.tokenize(" 1 2\n99 ") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2]) == "1 2"


@pytest.mark.parametrize("text", ["1 two", "-1", "1.5", "²"])
def test_null_refuses_words(text: str) -> None:
    with pytest.raises(DataError, match="--tokenizer-type"):
        NullTokenizer(100).tokenize(text)


def test_null_refuses_ids_past_its_end() -> None:
    with pytest.raises(DataError, match="token id 100 is not below --vocab-size 100"):
        NullTokenizer(100).tokenize("100")
    with pytest.raises(ConfigError, match="--vocab-size 0"):
        NullTokenizer(0)


def test_no_torch() -> None:
    code = "import sys, megatron_core.tokenizers, megatron_core.datasets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_bytes_without_a_token_are_known_and_counted(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer_json(tmp_path, without=MISSING + b"\xff"))
    assert tokenizer.detokenize(tokenizer.tokenize("a\x04b")) == "ab"
    assert dropped_bytes(tokenizer) == MISSING  # 0xff is in no text
    assert count_bytes(DROPPED_TEXTS, MISSING) == 1 + 4 + 1 + 5
    full = HuggingFaceTokenizer(write_tokenizer_json(tmp_path))
    assert dropped_bytes(full) == dropped_bytes(ByteLevelTokenizer()) == b""
    letters = {symbol: byte for byte, symbol in BYTE_SYMBOLS.items()}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\x00 \u00ad\u00ff\x7f")
    assert bytes(letters[symbol] for symbol in spelt[0][0]) == "\x00 \u00ad\u00ff\x7f".encode()
    unknown = {"type": "BPE", "unk_token": "<unk>"}
    assert missing_bytes({}, unknown, {"type": "ByteLevel"}) == missing_bytes({}, {}, {"type": "Metaspace"}) == b""


def test_unknown_words_without_a_token_are_told_before_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}')
    with pytest.raises(ConfigError, match=r"the token for unknown words, '\[UNK\]', is not in the vocabulary"):
        HuggingFaceTokenizer(path)
