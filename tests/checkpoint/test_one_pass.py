"""Loading in one pass: every byte is read by one rank of the job, and damage is reported on all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import chunks, one_pass
from megatron_core.checkpoint.boxes import Box
from megatron_core.errors import CheckpointError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.runs import MODERN, compare, save_run, start, stored, train
from tests.checkpoint.test_integrity import flip
from tests.defects.plant import planted
from tests.parity.moe_rows import DEEPSEEK, EP2
from tests.parity.rows import TP2, ZERO, ZERO3

EXPERTS = MODERN | DEEPSEEK | {"moe_ffn_hidden_size": 8, "global_batch_size": 4, "qk_layernorm": False}
LAYOUTS = {"dp2": {}, "tp2": TP2, "dp2 zero1": ZERO, "dp2 zero3": ZERO3, "ep2": EXPERTS | EP2}
PAIRS = [*((layout, layout) for layout in LAYOUTS), ("tp2", "dp2 zero1"), ("dp2 zero3", "tp2")]
CHUNK = 4096
"""Small enough for several rounds, and for tensors of several chunks."""


def _save(layout: str, folder: Path, steps: int = 1) -> None:
    run = start(LAYOUTS[layout] | {"save": str(folder)})
    for _ in range(steps):
        train(run, 1)
        save_run(run)


def _load(layout: str, folder: Path, hosts: int, verify: bool = True) -> tuple[dict[str, np.ndarray], int]:
    """Load with small chunks; return how often this rank read each byte of each file, and the loaded iteration."""
    counts = {path.name: np.zeros(path.stat().st_size, np.int64) for path in folder.rglob("*.safetensors")}
    read, rank = one_pass._read_inside, dist.get_rank()

    def counted(source: Path, file: str, first: int, segments: Sequence[torch.Tensor]) -> str:
        counts[Path(file).name][first : first + sum(map(len, segments))] += 1
        return read(source, file, first, segments)

    with (
        mock.patch.object(chunks, "CHUNK_BYTES", CHUNK),
        mock.patch.object(one_pass, "_read_inside", counted),
        mock.patch.object(one_pass, "page_cache_of", lambda _: str(rank % hosts)),
    ):
        run = start(LAYOUTS[layout] | {"load": str(folder), "verify_checkpoint": verify})
    compare(run, stored(folder / f"iter_{run.state.iteration:07d}"))
    return counts, run.state.iteration


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_every_byte_is_read_by_one_rank(saver: str, loader: str, tmp_path: Path) -> None:
    """Ranks on two hosts; in the layout of the saving job each rank reads its own file."""
    run_ranks(2, _save, saver, tmp_path)
    (first, _), (second, _) = run_ranks(2, _load, loader, tmp_path, 2)
    for name in first:
        together = set((first[name] + second[name]).tolist())
        assert together == {1}, f"{name} is read {together} times"
    if saver == loader and saver != "ep2":  # with experts, files have unequal sizes
        assert not first["rank_00001.safetensors"].any() and not second["rank_00000.safetensors"].any()


def test_on_one_host_parts_come_from_the_page_cache(tmp_path: Path) -> None:
    """No messages are sent; without hashes only chunks with needed parts are read."""
    run_ranks(2, _save, "dp2 zero3", tmp_path)
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError):
        for verify in (True, False):
            counts = [each for each, _ in run_ranks(2, _load, "tp2", tmp_path, 1, verify)]
            assert counts[0]["rank_00001.safetensors"].any() and counts[1]["rank_00000.safetensors"].any()


def test_parts_are_read_into_their_memory(tmp_path: Path) -> None:
    """In the layout of the saving job nothing is read into memory of its own first."""
    run_ranks(2, _save, "dp2 zero3", tmp_path)
    with mock.patch.object(chunks.Span, "values", side_effect=AssertionError):
        run_ranks(2, _load, "dp2 zero3", tmp_path, 2)
        with pytest.raises(RankFailure, match="AssertionError"):
            run_ranks(2, _load, "tp2", tmp_path, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_host_reads_a_single_file_for_itself(ranks: int, tmp_path: Path) -> None:
    """As conversions write: ranks on two hosts send each other nothing."""
    settings = LAYOUTS["dp2"] | {"micro_batch_size": 1, "global_batch_size": 6}
    run_ranks(1, _save, "dp2", tmp_path)
    with (
        mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError),
        mock.patch.dict(LAYOUTS, {"dp2": settings}),
    ):
        counts = [each["rank_00000.safetensors"] for each, _ in run_ranks(ranks, _load, "dp2", tmp_path, 2)]
    for host in range(2):
        own = counts[host::2]  # one reads the file, the other its parts from the page cache
        assert {sum(each) for each in zip(*own, strict=True)} == set(range(1, len(own) + 1))
    damaged = tmp_path / "iter_0000001" / "rank_00000.safetensors"
    flip(damaged, 8 * damaged.stat().st_size - 3)
    with pytest.raises(RankFailure, match=r"rank_00000\.safetensors is damaged: its hash differs"):
        run_ranks(2, _load, "dp2", tmp_path / "iter_0000001", 2)


def _most_at_once(folder: Path) -> tuple[int, int, int, int]:
    """Load with each rank on its own host; return the most messages and bytes that were sent, and received, at once."""
    start_messages, now, most = dist.batch_isend_irecv, [0] * 4, [0] * 4

    def counted(operations: list[dist.P2POp]) -> list[mock.Mock]:
        def end(handles: list[dist.Work]) -> None:
            for handle in handles:
                handle.wait()
            now[:] = [a - b for a, b in zip(now, added, strict=True)]

        sent = [each.tensor.nbytes for each in operations if each.op is dist.isend]
        received = [each.tensor.nbytes for each in operations if each.op is dist.irecv]
        added = [len(sent), sum(sent), len(received), sum(received)]
        now[:] = [a + b for a, b in zip(now, added, strict=True)]
        most[:] = map(max, most, now)
        handles = start_messages(operations)
        return [mock.Mock(wait=lambda: end(handles))]

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        _load("dp2 zero1", folder, dist.get_world_size())
    return most[0], most[1], most[2], most[3]


def test_messages_at_once_are_bounded(tmp_path: Path) -> None:
    """With ZeRO 1 and each rank on its own host, every rank needs parts of all files."""
    run_ranks(4, _save, "dp2 zero1", tmp_path)
    with mock.patch.object(chunks, "MESSAGES", 1):
        for sent, sent_bytes, received, received_bytes in run_ranks(4, _most_at_once, tmp_path):
            assert sent == received == 1 and max(sent_bytes, received_bytes) <= 2 * CHUNK


@pytest.mark.parametrize("ranks", [2, 5, 512])
def test_windows_of_a_round(ranks: int) -> None:
    """In a window each rank has at most ``MESSAGES`` partners each way; all windows together have all pairs."""
    few = chunks.MESSAGES
    for rank in (0, ranks // 2, ranks - 1):
        others = [other for other in range(ranks) if other != rank]
        for windows in ([chunks.window_of(rank, other, ranks) for other in others],
                        [chunks.window_of(other, rank, ranks) for other in others]):  # fmt: skip
            assert max(map(windows.count, windows)) <= few and set(windows) == set(range(-(-len(others) // few)))


def test_ranks_that_divide_the_files() -> None:
    """All ranks, unless there are fewer files than hosts; object storage has no hosts."""
    assert chunks.group_of(2, ["a", "a", "b", "b"], 2) == [0, 1, 2, 3]
    assert [chunks.group_of(rank, ["a", "b", "b", "a"], 1) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert chunks.group_of(1, ["", "", ""], 1) == [0, 1, 2]


def test_an_older_checkpoint_replaces_a_damaged_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _save, "dp2 zero1", tmp_path, 2)
    damaged = tmp_path / "iter_0000002" / "rank_00001.safetensors"
    flip(damaged, 8 * damaged.stat().st_size - 3)
    assert [each for _, each in run_ranks(2, _load_newest, tmp_path)] == [1, 1]
    told = capfd.readouterr().out
    assert told.count(f"skipped a damaged checkpoint: {damaged} is damaged: its hash differs") == 1
    with pytest.raises(RankFailure, match=r"rank_00001\.safetensors is damaged: its hash differs"):
        run_ranks(2, _load_newest, tmp_path / "iter_0000002")


def _load_newest(folder: Path) -> tuple[None, int]:
    return None, start(LAYOUTS["dp2 zero1"] | {"load": str(folder)}).state.iteration


def _fail_to_read(folder: Path, dies: bool, told: Path) -> str:
    """Rank 1 cannot read, or dies, in its second chunk; return the error of this rank."""
    read, rank = one_pass._read_inside, dist.get_rank()

    def failing(source: Path, file: str, first: int, segments: Sequence[torch.Tensor]) -> str:
        if rank == 1 and first:
            if dies:
                os._exit(7)
            return "Input/output error"
        return read(source, file, first, segments)

    with (
        mock.patch.object(chunks, "CHUNK_BYTES", CHUNK),
        mock.patch.object(one_pass, "_read_inside", failing),
        mock.patch.object(one_pass, "page_cache_of", lambda _: str(rank)),
    ):
        try:
            start(LAYOUTS["dp2"] | {"load": str(folder / "iter_0000001")})
        except (CheckpointError, RuntimeError) as error:
            (told / f"told_{rank}").write_text(str(error))
            return str(error)
    return ""


def test_a_reader_that_cannot_read_is_named_on_all_ranks(tmp_path: Path) -> None:
    _check_that_all_ranks_name_it(tmp_path, 60.0)


def _check_that_all_ranks_name_it(tmp_path: Path, timeout: float) -> None:
    run_ranks(2, _save, "dp2", tmp_path)
    file = tmp_path / "iter_0000001" / "rank_00001.safetensors"
    first, second = run_ranks(2, _fail_to_read, tmp_path, False, tmp_path, timeout=timeout)
    assert first == second and first.startswith(f"{file} cannot be read: Input/output error; ")


def test_ranks_do_not_wait_for_a_reader_that_died(tmp_path: Path) -> None:
    run_ranks(2, _save, "dp2", tmp_path)
    began = time.monotonic()
    with pytest.raises(RankFailure):
        run_ranks(2, _fail_to_read, tmp_path, True, tmp_path, backend="gloo")
    assert time.monotonic() - began < 20


@pytest.fixture
def small_chunks() -> Iterator[None]:
    with mock.patch.object(chunks, "CHUNK_BYTES", 64):
        yield


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("box", [Box((), ()), Box((2,), (60,)), Box((1, 0), (4, 30)), Box((0, 0, 3), (1, 7, 10))])
def test_blocks_are_consecutive(box: Box) -> None:
    values = torch.arange(box.numel, dtype=torch.float64).view(box.shape)
    blocks = list(chunks.blocks_of(box, 8))
    found = torch.cat([values[block.within(box)].reshape(-1) for block in blocks])
    assert found.tolist() == list(range(box.numel)) and all(8 * block.numel <= 64 for block in blocks)


def test_files_are_spread_over_the_readers() -> None:
    assert list(chunks.readers_of({f"rank_{r}": 100 + r for r in range(8)}, 8).values()) == list(range(8))
    assert set(chunks.readers_of({f"rank_{r}": 5 for r in range(9)}, 3).values()) == {0, 1, 2}
    assert list(chunks.readers_of({"a": 0, "b": 7}, 4).values()) == [0, 2]


DEFECTS = {
    "all messages at once": ("OnePass._exchange", "window_of(self._rank, rank, self._ranks)", "0"),
    "a part goes to the wrong place": ("OnePass._store", "common.within(box)", "common.within(common)"),
    "bytes after a place are read twice": ("segments_of", "end = offset + len(memory)", "end = offset"),
    "hashes are not compared": ("read_chunks", ".hexdigest() != expected.hash", ".hexdigest() == ''"),
    "a fault stays on its rank": ("OnePass.fill", "text in by_rank", "text in by_rank[self._rank : self._rank + 1]"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, old, new = DEFECTS[defect]
    check = {
        "all messages at once": lambda: test_messages_at_once_are_bounded(tmp_path),
        "hashes are not compared": lambda: test_an_older_checkpoint_replaces_a_damaged_one(tmp_path, capfd),
        "a fault stays on its rank": lambda: _check_that_all_ranks_name_it(tmp_path, 5.0),  # rank 0 waits
    }.get(defect, lambda: test_every_byte_is_read_by_one_rank("tp2", "dp2 zero1", tmp_path))
    with planted(f"checkpoint.one_pass:{target}", old, new), pytest.raises((AssertionError, RankFailure)):
        check()
