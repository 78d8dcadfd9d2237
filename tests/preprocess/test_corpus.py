"""Statistics of a corpus: those of an independent count, and the same bytes however the work is divided."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_core.commands.corpus_report import CorpusReportFlags, corpus_report
from megatron_core.data_parts.manifest import PartEntry, PartList
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess import corpus
from tests.datasets.files import write

Documents = list[list[int]]
LIMIT = 50


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Documents]:
    """Two pairs of different dtypes and a list of three parts, with duplicates inside and between them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "TASK_BYTES", 4000)
    monkeypatch.setattr(corpus, "TASK_INDEX_BYTES", 3000)
    monkeypatch.setattr(corpus, "BUCKET_DOCUMENTS", 300)
    monkeypatch.setattr(corpus, "READ_TOKENS", 100)
    chance = random.Random(1)
    made = [[chance.randrange(500) for _ in range(chance.randrange(70))] for _ in range(400)]
    web = [*made[:200], [], [7] * 900, [], *made[50:80]]
    books = made[180:300] + [made[0]] * 9
    code = made[300:] + made[10:12]
    write(tmp_path / "web", web, np.int32)
    write(tmp_path / "books", books, np.uint16)
    entries = []
    for number, part in enumerate((code[:30], [], code[30:])):
        write(tmp_path / f"part{number}", part, np.uint16)
        entries.append(PartEntry(f"part{number}", len(part), len(part), sum(map(len, part))))
    (tmp_path / "code.parts.json").write_bytes(PartList("uint16", tuple(entries)).encoded())
    return {"web": web, "books": books, "code": code}


def report(path: str, **changes: object) -> bytes:
    """The report of the three sources."""
    flags = {"input": ("web", "books", "code"), "output": path, "longer_than": LIMIT, "workers": 1, **changes}
    corpus_report(CorpusReportFlags(**flags))
    return Path(path).read_bytes() if Path(path).exists() else b""


def test_counts_are_those_of_an_independent_count(sources: dict[str, Documents]) -> None:
    result = json.loads(report("out.json", png="out.png"))
    seen: Counter[tuple[int, ...]] = Counter()
    for source, (name, documents) in zip(result["sources"], sources.items(), strict=True):
        lengths = np.array([len(document) for document in documents])
        repeated = []
        for document in map(tuple, documents):
            if document and seen[document]:
                repeated.append(document)
            seen[document] += 1
        expected = {
            "name": name,
            "documents": len(documents),
            "tokens": lengths.sum(),
            "empty": (lengths == 0).sum(),
            "too long": (lengths > LIMIT).sum(),
            "tokens beyond": np.maximum(lengths - LIMIT, 0).sum(),
            "duplicates": len(repeated),
            "duplicate tokens": sum(map(len, repeated)),
            "shortest": lengths.min(),
        }
        assert {key: source[key] for key in expected} == expected
        assert source["longest"]["tokens"] == lengths.max()
        assert abs(source["50%"] / np.quantile(lengths, 0.5) - 1) < 0.06
        assert sum(documents for _, documents, _ in source["lengths"]) == len(documents)
    whole = [document for documents in sources.values() for document in documents]
    assert result["corpus"]["documents"] == len(whole) and result["corpus"]["longest"]["tokens"] == 900
    assert result["corpus"]["longest"] == result["sources"][0]["longest"] | {"file": "web", "document": 201}
    del seen[()]
    times = [number for _, number in seen.most_common() if number > 1]
    assert [group["times"] for group in result["most frequent documents"]] == times[:20]
    assert result["most frequent documents"][0] == {
        "times": 10,
        "file": "web",
        "document": 0,
        "tokens": len(whole[0]),
    }
    assert len(result["samples"]) == 5
    for sample in result["samples"]:
        parts = {"part0": sources["code"][:30], "part2": sources["code"][30:]}
        document = (sources | parts)[sample["file"]][sample["document"]]
        assert sample["text"] == " ".join(map(str, document[:200])) and sample["tokens"] == len(document)
    assert Path("out.png").read_bytes().startswith(b"\x89PNG") and not Path("out.json.parts").exists()


def partitions(path: str) -> bytes:
    """The report by three partitions, of which one is computed twice."""
    for part in (3, 1, 2, 1):
        assert report(path, partition=f"{part}/3") == b""
    return report(path, join_partitions=True)


@pytest.mark.every_case
@pytest.mark.parametrize("divided", [lambda path: report(path, workers=3), partitions], ids=["workers", "partitions"])
def test_the_same_bytes_however_the_work_is_divided(
    sources: dict[str, Documents], divided: Callable[[str], bytes]
) -> None:
    assert divided("divided.json") == report("one.json")


def test_whole_files_and_one_range_of_hashes_give_the_same(
    sources: dict[str, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    divided = report("divided.json")
    for name in ("TASK_BYTES", "TASK_INDEX_BYTES", "BUCKET_DOCUMENTS", "READ_TOKENS"):
        monkeypatch.setattr(corpus, name, 1 << 26)
    assert report("whole.json") == divided


def test_files_without_closed_documents_are_counted_by_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "closed", [[1, 2], [3], [1, 2]])
    content = bytearray((tmp_path / "closed.idx").read_bytes())
    content[26:34] = (1).to_bytes(8, "little")  # entries of the document index
    (tmp_path / "open.idx").write_bytes(content[: -8 * 3])
    (tmp_path / "open.bin").write_bytes((tmp_path / "closed.bin").read_bytes())
    corpus_report(CorpusReportFlags(input=("open",), output="out.json", workers=1))
    result = json.loads(Path("out.json").read_bytes())["corpus"]
    assert (result["documents"], result["tokens"], result["duplicates"]) == (3, 5, 1)


def test_documents_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty", [[], []])
    write(tmp_path / "some", [[], [5], []])
    corpus_report(CorpusReportFlags(input=("empty", "some"), output="out.json", png="out.png", workers=1))
    result = json.loads(Path("out.json").read_bytes())
    assert [(s["documents"], s["empty"], s["duplicates"]) for s in result["sources"]] == [(2, 2, 0), (3, 2, 0)]
    assert result["corpus"]["mean"] == 0.2 and len(result["samples"]) == 1


def test_faults_are_named(sources: dict[str, Documents]) -> None:
    with pytest.raises(ConfigError, match="--input has web twice"):
        report("out.json", input=("web", "web"))
    for flags, said in (
        ({"partition": "3/2"}, r"--partition 3/2 must be I/N"),
        ({"partition": "1/2", "engine": "ray"}, "exclude each other"),
        ({"samples": -1}, r"--samples -1 is too small"),
    ):
        with pytest.raises(ConfigError, match=said):
            report("out.json", **flags)
    report("out.json", partition="1/2")
    with pytest.raises(DataError, match=r"has \d+ of \d+ parts; the first missing one is of web.bin, byte"):
        report("out.json", join_partitions=True)
    damaged = next(path for path in Path("out.json.parts").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:100])
    report("out.json", partition="2/2")
    with pytest.raises(DataError, match=rf"{damaged.name} .*remove it, and run the command again"):
        report("out.json", join_partitions=True)
