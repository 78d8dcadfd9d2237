"""Byte-pair ranks with tiktoken: both file formats, Megatron's ids, and an error for each fault."""

import base64
import json
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import build_tokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer
from tests.vocabularies.corpus import TEXTS, make_ranks, write_rank_json, write_rank_lines

# The two published patterns, each in one piece.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS = [
    *TEXTS,
    "the theTHE thETHe\n\n\n // the/\n\nat 12345 at!?\n",
    "  \u0301a\u0301 Ünder_the-hat's ",
    "\r\n \t\r\nx",
]


def encode_by_definition(text: str, ranks: dict[bytes, int], pattern: str, first: int) -> list[int]:
    """Words by the pattern; in each, the adjacent pair of lowest rank is merged until none is left."""
    ids = []
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode("utf-8")]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [first + ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_ids_are_those_of_the_definition(pattern: str, tmp_path: Path) -> None:
    ranks = {token: rank for rank, token in enumerate(make_ranks())}
    tokenizer = TikTokenizer(write_rank_json(tmp_path), pattern, num_special_tokens=10)
    for text in WORDS:
        ids = tokenizer.tokenize(text)
        assert ids == encode_by_definition(text, ranks, PATTERNS[pattern], 10)
        assert tokenizer.detokenize(ids) == text
    assert max(i for text in WORDS for i in tokenizer.tokenize(text)) >= 10 + 256  # some pair was merged


def test_the_patterns_differ_and_v2_is_the_default(tmp_path: Path) -> None:
    path = write_rank_json(tmp_path)
    v1, v2, unsaid = (TikTokenizer(path, pattern) for pattern in ("v1", "v2", None))
    assert v1.tokenize("heTH") != v2.tokenize("heTH") == unsaid.tokenize("heTH")
    assert unsaid.fingerprint() == v2.fingerprint() != v1.fingerprint()


def test_both_files_give_one_tokenizer(tmp_path: Path) -> None:
    first, second = TikTokenizer(write_rank_json(tmp_path)), TikTokenizer(write_rank_lines(tmp_path))
    assert first.tokenize_batch(TEXTS) == second.tokenize_batch(TEXTS)
    assert first.fingerprint() == second.fingerprint()
    assert second.files() == [tmp_path / "ranks.tiktoken"]


def test_special_tokens_come_first(tmp_path: Path) -> None:
    tokenizer = TikTokenizer(write_rank_json(tmp_path))
    assert tokenizer.vocab_size == 1000 + len(make_ranks())
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, 4)
    assert tokenizer.detokenize([0, 1, 2, 3, 4, 5, 6, 7, 999]) == (
        "<unk><s></s><mask><pad><cls><sep><SPECIAL_7><SPECIAL_999>"
    )
    assert tokenizer.tokenize("a") == [1000 + ord("a")]
    # Written in the text they are ordinary text.
    assert min(tokenizer.tokenize("</s><SPECIAL_7>")) >= 1000
    few = TikTokenizer(write_rank_json(tmp_path), num_special_tokens=3)
    assert few.pad is None and few.tokenize("a") == [3 + ord("a")]


def test_vocab_size_keeps_the_lowest_ranks(tmp_path: Path) -> None:
    path = write_rank_json(tmp_path)
    cut = build_tokenizer("TikTokenizer", path, vocab_size=261, tiktoken_num_special_tokens=4, tiktoken_pattern="v1")
    whole = TikTokenizer(path, "v1", num_special_tokens=4)
    assert cut.vocab_size == 261 and cut.fingerprint() != whole.fingerprint()
    ranks = {token: rank for rank, token in enumerate(make_ranks()[:257])}
    assert cut.tokenize("the the") == encode_by_definition("the the", ranks, PATTERNS["v1"], 4)
    assert build_tokenizer("TikTokenizer", path, vocab_size=5000).vocab_size == 1000 + len(make_ranks())


def test_a_cut_that_would_leave_a_byte_out_is_an_error(tmp_path: Path) -> None:
    tokens = [b"ab", *(bytes([i]) for i in range(256))]
    path = tmp_path / "late.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    assert TikTokenizer(path, num_special_tokens=3).tokenize("ab\xff") == [3, 4 + 0xC3, 4 + 0xBF]
    with pytest.raises(ConfigError, match="no token for the single byte 0xff among its first 256 ranks"):
        TikTokenizer(path, num_special_tokens=3, vocab_size=259)


def test_a_long_file_is_cut_to_megatrons_size(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"%d" % i for i in range(1_000_000, 1_131_000)]
    path = tmp_path / "long.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    assert TikTokenizer(path).vocab_size == 2**17


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert TikTokenizer(write_rank_json(tmp_path)).tokenize("the cat")


def test_a_text_that_tiktoken_cannot_cut_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    tokenizer = TikTokenizer(write_rank_json(tmp_path))
    with pytest.raises(DataError, match=r"2000001 characters .*run of spaces: shorten or remove the document"):
        tokenizer.tokenize_batch(["fine", " " * 2_000_000 + "x"])


Edit = Callable[[list[dict]], object]
FAULTS: dict[str, tuple[Edit, str]] = {
    "key": (lambda v: v[3].pop("token_str"), r"entry 3 has rank, token_bytes; give a JSON list of"),
    "no object": (lambda v: v.__setitem__(0, 5), r"entry 0 has int; give a JSON list"),
    "rank": (lambda v: v[7].update(rank=8), r"entry 7 has rank 8, expected 7"),
    "base64": (lambda v: v[2].update(token_bytes="?"), r"entry 2 has no base64 text"),
    "number": (lambda v: v[2].update(token_bytes=4), r"entry 2 has no base64 text"),
    "twice": (lambda v: v[9].update(token_bytes=v[4]["token_bytes"]), r"entry 9 has the token .* already has rank 4"),
    "empty": (lambda v: v[300].update(token_bytes=""), r"entry 300 has an empty token"),
    "byte": (lambda v: v[65].update(token_bytes="AQID"), r"no token for the single byte 0x41"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_json_file_is_named(name: str, tmp_path: Path) -> None:
    path = write_rank_json(tmp_path)
    vocabulary = json.loads(path.read_text())
    edit, sentence = FAULTS[name]
    edit(vocabulary)
    path.write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match=rf"--tokenizer-model .*ranks\.json,? {sentence}|ranks\.json has {sentence}"):
        TikTokenizer(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[1, ", r"begins with \[ but is not JSON"),
        (b"", "no token for the single byte 0x00"),
        (b"AA== 0\nAQ== one\n", "line 2 is not `base64 rank`"),
        (b"AA== 0\n\nAQ== 2\n", "line 3 has rank 2, expected 1"),
        (b'{"model": 1}', "line 1 has rank|line 1 is not"),
    ],
)
def test_a_fault_of_another_file_is_named(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        TikTokenizer(path)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = write_rank_json(tmp_path)
    with pytest.raises(ConfigError, match="--tiktoken-pattern v3 is not supported; supported: v1, v2"):
        TikTokenizer(path, "v3")
    with pytest.raises(ConfigError, match="--tiktoken-num-special-tokens 2 leaves out"):
        TikTokenizer(path, num_special_tokens=2)
    with pytest.raises(ConfigError, match=r"--vocab-size 1255 is too small: .* make 1256"):
        TikTokenizer(path, vocab_size=1255)
    with pytest.raises(ConfigError, match="leaves no room for the 256 bytes"):
        TikTokenizer(path, num_special_tokens=2**17)
    with pytest.raises(ConfigError, match=r"absent: no such file; give a JSON list"):
        TikTokenizer(tmp_path / "absent")
