"""From flags to a tokenizer, and the errors about invalid flags."""

from pathlib import Path

import pytest

from megatron_core.config import DataConfig
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import build_tokenizer, tokenizer_kinds, tokenizer_of
from megatron_core.tokenizers.build import TokenizerFiles
from tests.vocabularies.corpus import write_gpt2_files, write_rank_json, write_sentence_piece, write_tokenizer_json


def test_every_type(tmp_path: Path) -> None:
    model = write_sentence_piece(tmp_path)
    vocabulary, merges = write_gpt2_files(tmp_path)
    built = {
        "ByteLevelTokenizer": build_tokenizer("ByteLevelTokenizer"),
        "GPT2BPETokenizer": build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges),
        "HuggingFaceTokenizer": build_tokenizer("HuggingFaceTokenizer", write_tokenizer_json(tmp_path)),
        "NullTokenizer": build_tokenizer("NullTokenizer", vocab_size=7),
        "TikTokenizer": build_tokenizer("TikTokenizer", write_rank_json(tmp_path), tiktoken_pattern="v1"),
    }
    for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        built[name] = build_tokenizer(name, model)
    assert set(built) == set(tokenizer_kinds())
    ids = built["SentencePieceTokenizer"].tokenize("the cat")
    assert built["Llama2Tokenizer"].tokenize("the cat") == [1, *ids]
    assert built["NullTokenizer"].vocab_size == 7


def test_unknown_type_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-type Tik is not supported; supported: .*NullTokenizer.*Tik"):
        build_tokenizer("Tik")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("HuggingFaceTokenizer", "--tokenizer-model"),
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("GPT2BPETokenizer", "--vocab-file and --merge-file"),
        ("NullTokenizer", "--vocab-size"),
        ("TikTokenizer", "--tokenizer-model"),
    ],
)
def test_missing_setting_names_the_flag(name: str, flags: str) -> None:
    with pytest.raises(ConfigError, match=f"--tokenizer-type {name} needs {flags}"):
        build_tokenizer(name)


@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_missing_and_broken_model_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*absent.*no (such )?file"):
        build_tokenizer(name, tmp_path / "absent")
    broken = tmp_path / "broken"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*broken is not a"):
        build_tokenizer(name, broken)


def test_missing_and_broken_gpt2_files(tmp_path: Path) -> None:
    vocabulary, merges = write_gpt2_files(tmp_path)
    with pytest.raises(ConfigError, match=r"--merge-file .*absent: no such file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=tmp_path / "absent")
    vocabulary.write_text("[]")
    with pytest.raises(ConfigError, match=r"--vocab-file .*are not a BPE vocabulary"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)


def test_folder_of_a_sentence_piece_model_names_the_other_type(tmp_path: Path) -> None:
    write_sentence_piece(tmp_path).rename(tmp_path / "tokenizer.model")
    with pytest.raises(ConfigError, match="--tokenizer-type SentencePieceTokenizer --tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path)


def test_llama2_needs_a_begin_of_sentence_piece(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no begin-of-sentence piece"):
        build_tokenizer("Llama2Tokenizer", write_sentence_piece(tmp_path, bos=-1))


def test_vocab_size_must_hold_every_token() -> None:
    assert build_tokenizer("ByteLevelTokenizer", vocab_size=300).vocab_size == 257
    with pytest.raises(ConfigError, match="--vocab-size 200 is smaller than the tokenizer's 257"):
        build_tokenizer("ByteLevelTokenizer", vocab_size=200)


def test_from_configuration() -> None:
    assert tokenizer_of(DataConfig()) is None
    assert tokenizer_of(DataConfig(tokenizer_type="NullTokenizer", vocab_size=9)).vocab_size == 9


def test_tiktoken_from_configuration(tmp_path: Path) -> None:
    path = str(write_rank_json(tmp_path))
    data = DataConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=path,
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=5,
        vocab_size=300,
    )
    built = tokenizer_of(data)
    assert built.vocab_size == 300 and built.tokenize("a") == [5 + ord("a")]
    expected = TokenizerFiles("TikTokenizer", path, None, None, 300, "v1", 5).load()
    assert built.fingerprint() == expected.fingerprint()
