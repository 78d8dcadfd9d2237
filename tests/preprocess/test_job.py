"""A whole run: every kind of input, any number of workers, and its messages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_core.datasets import IndexedDataset, read_header
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess import Limits, find_inputs, preprocess, read_texts
from megatron_core.preprocess.worker import sentence_splitter
from megatron_core.tokenizers import ByteLevelTokenizer, Tokenizer
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer
from tests.preprocess.corpora import SMALL, outcome, sequences, settings, texts, write_jsonl, write_packed
from tests.vocabularies.corpus import (
    DROPPED_TEXTS,
    MISSING,
    write_gpt2_files,
    write_rank_json,
    write_sentence_piece,
    write_tokenizer_json,
)


def check(prefix: Path, tokenizer: Tokenizer, documents: list[str], eod: bool) -> None:
    """Compare token files with the definition."""
    dataset = IndexedDataset(str(prefix))
    expected, index = sequences(tokenizer, documents, eod)
    assert [sequence.tolist() for sequence in dataset[:]] == expected
    assert dataset.document_indices.tolist() == index


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("workers", [1, 3])
def test_json_lines(suffix: str, workers: int, tmp_path: Path) -> None:
    documents = texts(90)
    for n in range(3):
        write_jsonl(tmp_path / f"{n}.jsonl{suffix}", documents[30 * n : 30 * n + 30])
    outcome(tmp_path, input=(str(tmp_path / "*.jsonl*"),), workers=workers, append_eod=True)
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), documents, eod=True)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_plain_text(suffix: str, tmp_path: Path) -> None:
    documents = texts(40)
    folder = tmp_path / "in"
    folder.mkdir()
    for n, text in enumerate(documents):
        write_packed(folder / f"{n:02d}.txt{suffix}", text.encode())
    outcome(tmp_path, input=(str(folder),))
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), documents, eod=False)
    joined = write_packed(tmp_path / f"all.md{suffix}", "\n\t".join([*documents, "end"]).encode())
    outcome(tmp_path, input=(str(joined),), document_separator=r"\n\t")
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), [*documents, "end"], eod=False)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parquet(suffix: str, tmp_path: Path) -> None:
    rows = [text or None for text in texts(40)]
    plain = tmp_path / "plain"
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), plain, row_group_size=7)
    write = write_packed(tmp_path / f"a.parquet{suffix}", plain.read_bytes())
    outcome(tmp_path, input=(str(write),), workers=3)
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), [row or "" for row in rows], eod=False)


def test_workers_parts_and_limits_change_no_byte(tmp_path: Path) -> None:
    documents = texts(200)
    write_jsonl(tmp_path / "a.jsonl", documents)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": \n\n[1]\n{"text": "last"}')
    write_jsonl(tmp_path / "b.jsonl.gz", documents)
    given = {"input": (str(tmp_path / "*.jsonl*"),), "append_eod": True}
    first = outcome(tmp_path, Limits(), workers=1, **given)
    assert set(first) == {"_text_document.bin", "_text_document.idx", "_text_document.json", "_problems.txt"}
    for limits in (SMALL, Limits(part_bytes=5000, batch_bytes=33)):
        for workers in (1, 2, 4):
            assert outcome(tmp_path, limits, workers=workers, **given) == first
    assert outcome(tmp_path, Limits(), workers=3, **given) == first


def test_broken_and_empty_documents_are_named_by_line(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    documents = [json.dumps({"text": text}) for text in texts(100)]
    documents[50], documents[77], documents[99] = "{", "", '{"text": 3}'
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("\n".join(documents))
    problems = outcome(tmp_path)["_problems.txt"].decode().splitlines()
    broken = [n for n in range(1, 101) if n in (51, 100)]
    empty = [n for n in range(1, 101) if (n - 1) % 6 == 0 and n not in (78,)]
    found = {
        kind: [int(re.search(r"line (\d+)", x)[1]) for x in problems if x.startswith(kind)]
        for kind in ("broken", "empty")
    }
    assert found == {"broken": broken, "empty": empty}
    printed = capfd.readouterr()
    assert f"broken: {corpus}, line 51 is not JSON" in printed.err
    assert (
        f"2 broken documents omitted, {len(empty)} empty texts kept; all listed in {tmp_path}/out_problems.txt"
        in printed.out
    )
    with pytest.raises(DataError, match=r"a\.jsonl, line 51 is not JSON .*\(--strict\)"):
        preprocess(settings(tmp_path, strict=True, output_prefix=str(tmp_path / "strict")), SMALL)
    assert not list(tmp_path.glob("strict*"))
    write_jsonl(corpus, ["good"])
    assert "_problems.txt" not in outcome(tmp_path)


def test_null_is_an_empty_text_in_json_and_parquet_alike(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", None, "", "b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [outcome(tmp_path, input=(str(tmp_path / name),)) for name in ("a.jsonl", "a.parquet")]
    assert found[0]["_text_document.idx"] == found[1]["_text_document.idx"]
    for problems, word in ((found[0]["_problems.txt"], "jsonl, line"), (found[1]["_problems.txt"], "parquet, row")):
        assert [line.split("a.")[1] for line in problems.decode().splitlines()] == [
            f"{word} {number} has no text under 'text'" for number in (2, 3)
        ]
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), ["a", "", "", "b"], eod=False)


def test_a_document_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["a", "x" * 100, "b"])
    written = outcome(tmp_path, Limits(document_bytes=60, batch_bytes=30))
    check(tmp_path / "out_text_document", ByteLevelTokenizer(), ["a", "b"], eod=False)
    assert b"a.jsonl, line 2 has more than 60 bytes; split it" in written["_problems.txt"]


def test_only_the_first_broken_ones_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text("[]\n" * 50 + '{"text": "a"}\n')
    assert outcome(tmp_path)["_problems.txt"].count(b"\n") == 50
    assert capfd.readouterr().err.count("broken:") == 5


def test_several_keys_stay_aligned(tmp_path: Path) -> None:
    rows = [{"text": text, "title": text[:3]} for text in texts(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + '\n{"text": "no title"}\n' for row in rows))
    outcome(tmp_path, json_keys=("text", "title"))
    for key in ("text", "title"):
        check(tmp_path / f"out_{key}_document", ByteLevelTokenizer(), [row[key] for row in rows], eod=False)


@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_bytes_that_the_tokenizer_drops_are_counted(
    backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Printed once for the whole run, even if several workers find it."""
    model = write_tokenizer_json(tmp_path, without=MISSING)
    documents = [*texts(60), *DROPPED_TEXTS * 3]
    write_jsonl(tmp_path / "a.jsonl", documents)
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model), "tokenization_backend": backend}
    outcome(tmp_path, **flags)
    check(tmp_path / "out_text_document", HuggingFaceTokenizer(model), documents, eod=False)
    printed = capfd.readouterr()
    assert printed.out.count("33 bytes of text omitted: the tokenizer has no token for them") == 1
    assert f"tokenization backend: {backend}" in printed.err


@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken", "auto"])
def test_back_ends_give_the_tokenizers_own_tokens(backend: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    documents = [*texts(60), "<|endoftext|>", "a <|endoftext|>b"]
    write_jsonl(tmp_path / "a.jsonl", documents)
    vocabulary, merges = write_gpt2_files(tmp_path)
    model = write_tokenizer_json(tmp_path)
    for flags in (
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merges)},
    ):
        given = settings(tmp_path, append_eod=True, tokenization_backend=backend, **flags)
        preprocess(given, SMALL)
        tokenizer = given.tokenizer_files.load()
        check(tmp_path / "out_text_document", tokenizer, documents, eod=True)
        header = read_header(str(tmp_path / "out_text_document"))
        assert header.fingerprint == tokenizer.fingerprint() and header.documents == len(documents)
        used = "tokenizers" if backend == "tokenizers" else "gigatoken"
        printed = capfd.readouterr()
        assert f"tokenization backend: {used}, 2 workers" in printed.err and f"by {used}" in printed.out


def test_a_back_end_that_cannot_serve_is_told(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    outcome(tmp_path)
    assert "backend: tokenizers (gigatoken does not support a ByteLevelTokenizer), 2 workers" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"does not support a ByteLevelTokenizer; use --tokenization-backend token"):
        preprocess(settings(tmp_path, tokenization_backend="gigatoken", output_prefix=str(tmp_path / "new")))
    assert not list(tmp_path.glob("new*"))
    with pytest.raises(ConfigError, match=r"--tokenization-backend fast is unknown; legal: auto, tokenizers, giga"):
        preprocess(settings(tmp_path, tokenization_backend="fast"))


def test_a_back_end_that_differs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    import gigatoken

    encode = gigatoken.Tokenizer.encode
    documents = ["plain", "an odd word"] * 30
    write_jsonl(tmp_path / "a.jsonl", documents)
    model = str(write_tokenizer_json(tmp_path))
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": model}
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", lambda self, text: encode(self, text)[: 4 - ("odd" in text)])
    outcome(tmp_path, **flags)
    check(tmp_path / "out_text_document", HuggingFaceTokenizer(model), documents, eod=False)
    assert "backend: tokenizers (gigatoken gives different tokens for the text that begins" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"gives different tokens .*; use --tokenization-backend tokenizers"):
        preprocess(settings(tmp_path, tokenization_backend="gigatoken", **flags))


def test_a_back_end_that_differs_late_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gigatoken

    encode = gigatoken.Tokenizer.encode
    # The sample has some kilobytes after each sixteenth of the corpus: of these, texts 100 to 102.
    documents = ["plain " * 600] * 200
    documents[106] = "an odd word"
    write_jsonl(tmp_path / "a.jsonl", documents)
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(write_tokenizer_json(tmp_path))}
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", lambda self, text: encode(self, text)[("odd" in text) :])
    with pytest.raises(
        DataError,
        match=r"gigatoken and the tokenizer give different tokens .* 'an odd word'; use --tokenization-backend",
    ):
        preprocess(settings(tmp_path, **flags), Limits(part_bytes=4000))
    assert not list(tmp_path.glob("out*"))


def test_sentence_piece(tmp_path: Path) -> None:
    documents = texts(60)
    write_jsonl(tmp_path / "a.jsonl", documents)
    model = str(write_sentence_piece(tmp_path))
    outcome(tmp_path, tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    tokenizer = settings(
        tmp_path, tokenizer_type="SentencePieceTokenizer", tokenizer_model=model
    ).tokenizer_files.load()
    check(tmp_path / "out_text_document", tokenizer, documents, eod=False)


def test_tiktoken(tmp_path: Path) -> None:
    documents = texts(20)
    write_jsonl(tmp_path / "a.jsonl", documents)
    flags = {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": str(write_rank_json(tmp_path)),
        "tiktoken_pattern": "v1",
        "tiktoken_num_special_tokens": 10,
    }
    outcome(tmp_path, append_eod=True, **flags)
    tokenizer = TikTokenizer(flags["tokenizer_model"], "v1", num_special_tokens=10)
    check(tmp_path / "out_text_document", tokenizer, documents, eod=True)
    header = read_header(str(tmp_path / "out_text_document"))
    assert (header.eod, header.bos, header.pad) == (tokenizer.eod, tokenizer.bos, tokenizer.pad)
    assert header.fingerprint == tokenizer.fingerprint() and header.bos is not None


def test_what_a_tokenizer_refuses_is_broken(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["1 2", "three", "", "4"] * 10)
    written = outcome(tmp_path, tokenizer_type="NullTokenizer", vocab_size=70_000, append_eod=True)
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.dtype is np.int32
    assert [sequence.tolist() for sequence in dataset[:2]] == [[1, 2, 69_999], [4, 69_999]]
    assert len(dataset) == 20 and len(dataset.document_indices) == 31
    assert b"line 2 cannot be tokenized: NullTokenizer reads whitespace-separated token ids" in written["_problems.txt"]


@pytest.mark.parametrize("keep", [False, True])
def test_sentences_are_sequences(keep: bool, tmp_path: Path) -> None:
    document = "First one.  Second one!\n\nIs it the third?\n"
    expected = ["First one.  ", "Second one!\n\n", "Is it the third?\n"]
    expected = expected if keep else [sentence.strip() for sentence in expected]
    write_jsonl(tmp_path / "a.jsonl", [document, "", "Alone"] * 5)
    outcome(tmp_path, split_sentences=True, keep_newlines=keep, append_eod=True)
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert dataset.document_indices.tolist()[:4] == [0, 3, 3, 4]
    found = [sequence.tolist() for sequence in dataset[:4]]
    assert [bytes(ids[: len(ids) - (n >= 2)]).decode() for n, ids in enumerate(found)] == [*expected, "Alone"]
    assert [ids[-1] == 256 for ids in found] == [False, False, True, True]
    assert "".join(sentence_splitter(True)(document)) == document


def test_sentences_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_core.preprocess.worker.find_spec", lambda name: None)
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match=r"--split-sentences needs the package nltk.*pip install nltk"):
        preprocess(settings(tmp_path, split_sentences=True))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_cut_file_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", texts(100))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is truncated"):
        preprocess(settings(tmp_path, input=(str(path),)), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]


def test_an_empty_plain_file_is_told_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").touch()
    problems = outcome(tmp_path, input=(str(tmp_path / "*.txt"),))["_problems.txt"].decode()
    assert problems.endswith("b.txt, document 1 has no text\n")


def test_texts_for_other_tools(tmp_path: Path) -> None:
    documents = texts(30)
    write_jsonl(tmp_path / "a.jsonl.zst", documents, key="body")
    paths = find_inputs([str(tmp_path)])
    found = list(read_texts(paths, ["body"]))
    assert [text for some, _, _ in found for text in some] == documents
    assert sum(size for _, size, _ in found) == paths[0].stat().st_size
    broken = [sentence for *_, some in read_texts(paths, ["text"]) for sentence in some]
    assert len(broken) == 30 and broken[0].endswith(
        "a.jsonl.zst, line 1 has no key 'text'; its keys: body, n; choose with --json-keys"
    )


PEAK = """
import resource, sys
from tests.preprocess.corpora import settings
from megatron_core.preprocess import Limits, preprocess
from pathlib import Path
preprocess(settings(Path(sys.argv[1]), input=(sys.argv[2],), tokenization_backend="tokenizers"),
        Limits(part_bytes=200_000, batch_bytes=50_000, save_seconds=0.05))
# Of this process, not by getrusage, which counts what the process was before it became another program.
parent = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(parent, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_input(name: str, tmp_path: Path) -> None:
    peaks = []
    for documents in (4_000, 40_000):
        path = write_jsonl(tmp_path / name, [f"{n} " + "words " * 10 for n in range(documents)])
        command = [sys.executable, "-c", PEAK, str(tmp_path), str(path)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        peaks.append([int(word) for word in done.stdout.split("\n")[-2].split()])
    # Kilobytes; 6 MB of text became 30 times as many bytes of Python integers, one batch at a time.
    for small, large in zip(*peaks, strict=True):
        assert large < small + 6_000, peaks


def test_output_of_an_earlier_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    first = outcome(tmp_path, overwrite=False)
    for _ in range(2):  # the first error leaves no progress to resume
        with pytest.raises(ConfigError, match=r"out_text_document\.bin already exists; .*--overwrite"):
            preprocess(settings(tmp_path, overwrite=False))
        assert not (tmp_path / "out.work").exists()
    write_jsonl(tmp_path / "a.jsonl", texts(10))
    assert outcome(tmp_path)["_text_document.bin"] != first["_text_document.bin"]


def test_documents_without_an_end_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, if the tokenizer has an end-of-document id that --append-eod would put after documents."""
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    for flags, told in (({}, 1), ({"append_eod": True}, 0)):
        outcome(tmp_path, tokenizer_type="ByteLevelTokenizer", overwrite=True, **flags)
        assert capsys.readouterr().err.count("note: without --append-eod nothing marks the end") == told
