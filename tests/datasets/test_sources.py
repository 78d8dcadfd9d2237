"""Records of a run's data in checkpoints, and messages of a resumed run if the data has changed."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_core.config import DataConfig, RunConfig
from megatron_core.datasets import sources
from megatron_core.datasets.sources import describe_changes, is_record, record_sources
from megatron_core.training.data import file_reader
from tests.datasets.files import splits_of, write, write_counting

AGAIN = "from sample 40 on, samples have new boundaries and a new order, so in this epoch some text may be repeated"
REREAD = "from sample 40 on, each file continues at a different sample"
REPLACED = "the order of samples is the same, and from sample 40 on they have the new text"


def record(*data_path: str, **settings: object) -> list[dict]:
    """The records as restored from a checkpoint's JSON."""
    config = RunConfig.from_flat({"data_path": data_path, **settings})
    found = json.loads(json.dumps(record_sources(config.data, file_reader(config))))
    assert all(map(is_record, found))
    return found


def changed(before: list[dict], now: list[dict]) -> str:
    """The messages of a resume at sample 40."""
    return " | ".join(describe_changes(before, now, 40))


def test_a_record_has_the_counts_of_the_files(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", [[1, 2], [], [3]]), write(tmp_path / "b", [[7] * 5])
    found = record("3", first, "1", second)
    shown = [tuple(each[n] for n in ("use", "path", "weight", "documents", "sequences", "tokens")) for each in found]
    assert shown == [("all", first, 3.0, 3, 3, 3), ("all", second, 1.0, 1, 1, 5)]
    assert changed(found, record("3", first, "1", second)) == ""
    assert not is_record({**found[0], "tokens": "3"}) and not is_record({"use": "all"})
    assert record_sources(DataConfig(mock_data=True)) == []


def samples(prefix: str, order: str) -> np.ndarray:
    """The first 20 samples of the training split."""
    settings = {"data_path": (prefix,), "seq_length": 8, "split": "1,0,0", "data_order": order}
    train = splits_of(**settings, train_samples=20, global_batch_size=1).train
    return np.stack([train[number]["tokens"] for number in range(20)])


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_what_a_rewritten_file_does_to_the_order_is_said_and_true(order: str, tmp_path: Path) -> None:
    lengths = [9, 30, 11, 50, 40, 41]
    prefix = write_counting(tmp_path / "a", lengths)
    before, old = record(prefix), samples(prefix, order)
    write_counting(tmp_path / "a", lengths, start=1000)
    told = changed(before, record(prefix))
    assert f"{prefix} has different tokens in sequences of the same lengths" in told and REPLACED in told
    np.testing.assert_equal(samples(prefix, order), old + 1000)
    write_counting(tmp_path / "a", [*lengths, 8])
    told = changed(before, record(prefix))
    assert "had 6 documents, 6 sequences and 181 tokens, now 7 documents, 7 sequences and 189 tokens" in told
    assert AGAIN in told and (samples(prefix, order) != old).any()
    write_counting(tmp_path / "a", lengths[::-1])
    assert "as many tokens, but sequences of different lengths" in changed(before, record(prefix))


def test_blends_are_compared_by_path_and_share(tmp_path: Path) -> None:
    a, b, c = (write_counting(tmp_path / name, [20, 30], start) for name, start in (("a", 0), ("b", 100), ("c", 200)))
    before = record("3", a, "1", b)
    assert changed(before, record("0.75", a, "0.25", b)) == ""
    told = changed(before, record("1", a, "1", b))
    assert f"{a} had 75.0000% of its blend, now 50.0000%" in told and REREAD in told
    told = changed(before, record("3", a, "1", c))
    assert f"{b} is no longer read; {c} is new, with 2 documents, 2 sequences and 50 tokens: {REREAD}" in told
    assert f"the order of the files changed: {REREAD}" in changed(before, record("1", b, "3", a))
    assert "75.0000% of its blend, now a share by size" in changed(before, record(a, b))


def test_a_moved_file_is_recognised(tmp_path: Path) -> None:
    prefix, copy = write_counting(tmp_path / "a", [20, 30]), write_counting(tmp_path / "copy", [20, 30])
    told = changed(record(prefix), record(copy))
    assert told == f"the data has not changed since the checkpoint: {prefix} was renamed to {copy}"


def test_splits_and_phases_are_compared_apart(tmp_path: Path) -> None:
    a, b = write_counting(tmp_path / "a", [20, 30]), write_counting(tmp_path / "b", [20, 30], 100)
    own = {"train_data_path": (a,), "valid_data_path": (b,)}
    before = record(**own)
    write_counting(tmp_path / "b", [20])
    told = changed(before, record(**own))
    assert told.count("has changed") == 1 and "the losses of this evaluation are not comparable" in told
    phases = tmp_path / "phases.yaml"
    phases.write_text(f"[{{samples: 10, data_path: [{a}]}}, {{data_path: [{a}]}}]")
    assert [each["use"] for each in record(data_phases=str(phases))] == ["phase 1", "phase 2"]


def test_conversations_count_lines(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": []}\n\n{"messages": []}')
    before = record(str(path), sft=True)
    path.write_text('{"messages": []}\n\n{"messages":[ ]}')
    assert f"{path} has different text in as many lines: {REPLACED}" in changed(before, record(str(path), sft=True))
    path.write_text('{"messages": []}\n')
    assert f"{path} had 2 lines, now 1 lines: {AGAIN}" in changed(before, record(str(path), sft=True))


def test_a_large_file_is_hashed_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size, the first and the last block are hashed; between them only some blocks."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 8)
    path = tmp_path / "tokens"
    content = bytes(1000)

    def digest(at: int | None = None) -> str:
        path.write_bytes(content if at is None else content[:at] + b"\1" + content[at + 1 :])
        return sources._hash_blocks(path, 1000)

    starts = [992 * n // 15 for n in range(16)]
    covered = {at for start in starts for at in range(start, start + 8)}
    assert {at for at in range(1000) if digest(at) != digest()} == covered
    assert sources._hash_blocks(path, 999) != digest()
