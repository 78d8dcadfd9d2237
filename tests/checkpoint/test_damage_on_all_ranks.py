"""Damage that only one rank can see is an error on all ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.checkpoint import hashes, one_pass, open_newest, reader
from megatron_core.errors import CheckpointError
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import save_run, start, train
from tests.checkpoint.test_damage import ONE_LAYER

NAME = "rank_00000.safetensors"
UNHASHED = ONE_LAYER | {"verify_checkpoint": False}


def _save(folder: Path) -> None:
    run = start(ONE_LAYER | {"save": str(folder)})
    train(run, 1)
    save_run(run)
    parallel_state.destroy_model_parallel()


HEADERS: dict[str, Callable[[dict], str]] = {
    "metadata is a text": lambda header: json.dumps(header | {"__metadata__": "x"}),
    "nested deeply": lambda header: "[" * 5000,
    "an entry is a list": lambda header: json.dumps({name: [] for name in header} | _metadata(header)),
    "an offset is a fraction": lambda header: json.dumps(
        {
            name: entry | {"data_offsets": [float(at) for at in entry["data_offsets"]]}
            for name, entry in header.items()
            if name != "__metadata__"
        }
        | _metadata(header)
    ),
    "one offset": lambda header: json.dumps(
        {name: entry | {"data_offsets": [1]} for name, entry in header.items() if name != "__metadata__"}
        | _metadata(header)
    ),
}


def _metadata(header: dict) -> dict:
    return {"__metadata__": header["__metadata__"]}


def _refused(folder: Path) -> str:
    """The error of this rank, each on a host of its own."""
    with mock.patch.object(one_pass, "page_cache_of", lambda _: str(dist.get_rank())):
        try:
            start(UNHASHED | {"load": str(folder)})
        except CheckpointError as error:
            return str(error)
    return ""


def _all_refused(root: Path) -> list[str]:
    return [_refused(root / str(number)) for number in range(len(HEADERS))]


def test_a_header_of_wrong_types_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    _save(tmp_path / "saved")
    for number, change in enumerate(HEADERS.values()):
        folder = Path(shutil.copytree(tmp_path / "saved" / "iter_0000001", tmp_path / str(number) / "iter_0000001"))
        data = (folder / NAME).read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = change(json.loads(data[8 : 8 + length])).encode()
        (folder / NAME).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    first, second = run_ranks(2, _all_refused, tmp_path)
    assert first == second
    for change, told in zip(HEADERS, first, strict=True):
        assert f"{NAME} cannot be read: " in told, f"{change}: {told}"


def _linked(folder: Path) -> str:
    """The error of this rank if the file becomes a link after its header has been read."""
    told = one_pass.OnePass._tell

    def then_linked(self: one_pass.OnePass, needs: object) -> None:
        told(self, needs)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.move(folder / NAME, folder.parent / NAME)
            (folder / NAME).symlink_to(folder.parent / NAME)
        dist.barrier()

    with mock.patch.object(one_pass.OnePass, "_tell", then_linked):
        try:
            start(UNHASHED | {"load": str(folder)})
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_file_that_becomes_a_link_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    _save(tmp_path)
    first, second = run_ranks(2, _linked, tmp_path / "iter_0000001")
    assert first == second and "goes through a symbolic link" in first


def _missing_on_the_second_host(folder: Path) -> str:
    rank = dist.get_rank()
    with (
        mock.patch.object(reader, "page_cache_of", lambda _: str(rank)),
        mock.patch.object(hashes, "_wrong_size", lambda path, _: f"{path} is missing" if rank else None),
    ):
        try:
            open_newest(str(folder), None, hash_later=True, device=torch.device("cpu"))
        except CheckpointError as error:
            return str(error)
    return ""


def test_each_host_compares_the_sizes_of_its_files(tmp_path: Path) -> None:
    """Before the model is built."""
    _save(tmp_path)
    file = tmp_path / "iter_0000001" / NAME
    for told in run_ranks(2, _missing_on_the_second_host, file.parent):
        assert told.startswith(f"{file} is missing")
