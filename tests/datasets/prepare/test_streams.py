"""Packed files are read to their very end, and one that is cut off is an error."""

import gzip
import random
from pathlib import Path

import pytest
import zstandard

from megatron_core.datasets.prepare.inputs import describe
from megatron_core.datasets.prepare.streams import Stream
from megatron_core.errors import DataError

DATA = random.Random(0).randbytes(600_000) + b"end\n"


def packed(kind: str, *pieces: bytes) -> bytes:
    """The pieces, each packed by itself."""
    pack = {"gz": gzip.compress, "zst": zstandard.compress, "txt": bytes}[kind]
    return b"".join(pack(piece) for piece in pieces)


def stream_of(path: Path, data: bytes) -> Stream:
    """A stream over a file with the data."""
    path.write_bytes(data)
    return Stream(describe(path))


@pytest.mark.parametrize("kind", ["gz", "zst", "txt"])
def test_members_are_read_one_after_the_other(kind: str, tmp_path: Path) -> None:
    stream = stream_of(tmp_path / f"a.{kind}", packed(kind, DATA[:10], b"", DATA[10:300_000], DATA[300_000:]))
    assert stream.read(7) == DATA[:7]
    stream.skip_to(400_000)
    assert (stream.position, stream.read(5)) == (400_000, DATA[400_000:400_005])
    stream.skip_to(600_000)
    assert stream.readline(100) == b"end\n" and stream.read(1) == b"" and stream.position == len(DATA)
    assert stream.raw == (tmp_path / f"a.{kind}").stat().st_size


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("cut", [1, 5, 100_000])
def test_a_cut_file_is_named(kind: str, cut: int, tmp_path: Path) -> None:
    data = packed(kind, DATA[:1000], DATA[1000:])
    stream = stream_of(tmp_path / f"a.{kind}", data[:-cut])
    with pytest.raises(DataError, match=rf"a\.{kind} is cut off.*copy or make it again"):
        while stream.read(1 << 16):
            pass


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    for data in (b"no packed data at all", packed(kind, DATA)[:1000] + bytes(2000)):
        with pytest.raises(DataError, match=rf"a\.{kind} is (damaged|cut off)"):
            stream = stream_of(tmp_path / f"a.{kind}", data)
            while stream.read(1 << 16):
                pass


def test_an_empty_packed_file_is_empty(tmp_path: Path) -> None:
    assert stream_of(tmp_path / "a.gz", b"").read(1) == b""
    assert stream_of(tmp_path / "a.zst", b"").read(1) == b""
    assert stream_of(tmp_path / "b.zst", packed("zst", b"", b"")).read(1) == b""
