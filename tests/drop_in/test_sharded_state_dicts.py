"""Factories, objects and parts of tensors in sharded state dicts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    replace_prefix_for_sharding,
)
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron_core import parallel_state
from megatron_core.errors import CheckpointError, LayoutError
from megatron_core.verify.ranks import run_ranks


def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> dict[str, ShardedTensor]:
    """A gate and a value that are saved under two keys, each split over two ranks."""
    rank = torch.distributed.get_rank()
    parts = zip(("gate", "value"), data.chunk(2), strict=True)
    return {
        name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, (0, rank, 2), replica_id=replica_id)
        for name, part in parts
    }


def state(fill: float, notes: str | None) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    data = torch.arange(4.0) + 10 * rank if fill else torch.zeros(4)
    return {
        "fused": ShardedTensorFactory("fused", data, halves, lambda x: torch.cat([x["gate"], x["value"]])),
        "note": ShardedObject("note", notes and f"{notes}{rank}", (2,), (rank,)),
        "same": ShardedObject("same", notes, (1,), (0,), replica_id=rank),
        "lr": 0.5,
    }


def written_and_read(folder: str) -> Any:
    parallel_state.initialize_model_parallel(2)
    dist_checkpointing.save(state(1.0, "n"), folder, TorchDistSaveShardedStrategy("torch_dist", 1))
    back = dist_checkpointing.load(state(0.0, None), folder)
    with pytest.raises(CheckpointError, match=r"no object note/shard_0_3"):
        dist_checkpointing.load({"note": ShardedObject("note", None, (3,), (0,))}, folder)
    return back["fused"].tolist(), back["note"], back["same"], back["lr"]


def test_factories_and_objects_of_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, partial(written_and_read, str(tmp_path)))
    assert found == [([0.0, 1.0, 2.0, 3.0], "n0", "n", 0.5), ([10.0, 11.0, 12.0, 13.0], "n1", "n", 0.5)]


def stacked(fill: float) -> dict[str, Any]:
    """A gated matrix as saved by Megatron Core's factory, in two parts of one tensor, and layers under one key."""
    rank = torch.distributed.get_rank()

    def gated(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        gate, value = data.chunk(2)
        both = (gate, (0, rank, 4)), (value, (0, rank + 2, 4))
        return [ShardedTensor.from_rank_offsets(key, part, place, replica_id=replica_id) for part, place in both]

    fused = (torch.arange(4.0) + 10 * rank) * fill
    rows, place = [torch.full((2,), fill * (i + 1)) for i in range(3)], (1, rank, 2)
    layers = [
        ShardedTensor.from_rank_offsets("layers.w", row, (0, i, 3), place, prepend_axis_num=1)
        for i, row in enumerate(rows)
    ]
    return {
        "fused": ShardedTensorFactory("fused", fused, gated, torch.cat),
        "layers": layers,
        "mixed": ({"t": torch.full((2,), fill)}, [ShardedObject("o", rank if fill else None, (2,), (rank,)), fill]),
        "plain": [[1, 2], {"a": [3]}],
    }


def lists_written_and_read(folder: str) -> Any:
    parallel_state.initialize_model_parallel(2)
    dist_checkpointing.save(stacked(1.0), folder)
    back = dist_checkpointing.load(stacked(0.0), folder)
    whole = ShardedTensor.from_rank_offsets("fused", torch.zeros(8))
    layers = ShardedTensor.from_rank_offsets("layers.w", torch.zeros(3, 4))
    dist_checkpointing.load({"both": [whole, layers]}, folder)
    mixed, (o, number) = back["mixed"]
    return (
        back["fused"].tolist(),
        [layer.tolist() for layer in back["layers"]],
        (mixed["t"].tolist(), o, number),
        back["plain"],
        whole.data.tolist(),
        layers.data.tolist(),
    )


def test_lists_of_tensors_objects_and_factories(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, lists_written_and_read, str(tmp_path))):
        fused, layers, mixed, plain, whole, rows = found
        assert fused == [10.0 * rank + i for i in range(4)]
        assert layers == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert mixed == ([1.0, 1.0], rank, 1.0)
        assert plain == [[1, 2], {"a": [3]}]
        assert whole == [0.0, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0]  # all gates before all values
        assert rows == [[i + 1.0] * 4 for i in range(3)]


def split_and_read(folder: str) -> Any:
    """Save a gated matrix and a projection of two pieces; read them, and what they are in the file."""
    parallel_state.initialize_model_parallel(2)
    rank = torch.distributed.get_rank()

    def parts(fill: float) -> dict[str, ShardedTensorFactory]:
        rows = (torch.arange(4.0) + 10 * rank) * fill
        # With the number of a layer as a leading dimension, and without.
        layer = ShardedTensor.from_rank_offsets("w", rows, (0, 0, 1), (1, rank, 2), prepend_axis_num=1)
        plain = ShardedTensor.from_rank_offsets("p", rows, (0, rank, 2))
        return {
            "gated": apply_swiglu_sharded_factory(layer, [(0, 0, 1)]),
            "apart": apply_swiglu_sharded_factory(plain, (), singleton_local_shards=True),
            "pieces": _split_tensor_factory(plain, [1, 3], ["x", "z"], 0),
        }

    dist_checkpointing.save(parts(1.0), folder)
    back = dist_checkpointing.load(parts(0.0), folder)
    keys = {"w": (1, 8), "p_w": (4,), "p_v": (4,), "p.x": (2,), "p.z": (6,)}
    whole = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(shape)) for key, shape in keys.items()}
    dist_checkpointing.load(dict(whole), folder)
    return {name: value.tolist() for name, value in back.items()}, {k: t.data.tolist() for k, t in whole.items()}


def test_matrices_are_stored_in_parts(tmp_path: Path) -> None:
    """Gates and inputs of two ranks are whole matrices in the file, as in Megatron Core's checkpoints."""
    (first, stored), (second, _) = run_ranks(2, partial(split_and_read, str(tmp_path)))
    assert first == {key: [0.0, 1.0, 2.0, 3.0] for key in ("gated", "apart", "pieces")}
    assert second == {key: [10.0, 11.0, 12.0, 13.0] for key in ("gated", "apart", "pieces")}
    assert stored == {
        "w": [[0.0, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0]],
        "p_w": [0.0, 1.0, 10.0, 11.0],
        "p_v": [2.0, 3.0, 12.0, 13.0],
        "p.x": [0.0, 10.0],
        "p.z": [1.0, 2.0, 3.0, 11.0, 12.0, 13.0],
    }


def test_factories_in_nested_dicts() -> None:
    def doubled(key: str, data: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        return [data, 2 * data]

    factory = ShardedTensorFactory("a", torch.ones(2), doubled, lambda x: x[1] - x[0])
    nested = {"x": [{"y": factory}], "z": 3}
    parts: dict[str, Any] = dict(nested)
    apply_factories(parts)
    assert [part.tolist() for part in parts["x"][0]["y"]] == [[1.0, 1.0], [2.0, 2.0]]
    merged = apply_factory_merges(parts, nested)
    assert (merged["x"][0]["y"].tolist(), merged["z"]) == ([1.0, 1.0], 3)
    with pytest.raises(CheckpointError, match=r"no x\.0\.y"):
        apply_factory_merges({"x": [{}], "z": 3}, nested)
    with pytest.raises(CheckpointError, match="global_offset"):
        ShardedObject("o", 1, (2, 2), (0,))


def test_parts_of_parts() -> None:
    whole = ShardedTensor.from_rank_offsets("k", torch.ones(1, 3, 7), (0, 0, 10), (2, 3, 6))
    whole.validate_metadata_integrity()
    (narrow,) = whole.narrow(2, 3, 2)
    assert (narrow.local_shape, narrow.global_shape, narrow.global_offset) == ((1, 3, 2), (10, 3, 12), (0, 0, 6))
    whole.local_shape, whole.global_offset = (1, 3, 7), (0, 0, 21)
    for name in ("local_shape", "global_offset"):
        with pytest.raises(CheckpointError, match=f"{name}=.* differs from"):
            setattr(whole, name, (0, 1, 0))
    whole.data = torch.ones(1, 2, 7)
    with pytest.raises(LayoutError, match=r"has the shape \(1, 2, 7\)"):
        whole.validate_metadata_integrity()


def test_prefixes_of_keys() -> None:
    note, tensor = ShardedObject("m.note", "n", (1,), (0,)), ShardedTensor.from_rank_offsets("m.w", torch.ones(2))
    factory = ShardedTensorFactory("m.f", torch.ones(2), halves, torch.cat)
    nested = {"a": [note, {"b": tensor}], "c": factory, "d": 3}
    replace_prefix_for_sharding(nested, "m.", "model.")
    assert [each.key for each in (note, tensor, factory)] == ["model.note", "model.w", "model.f"]
    with pytest.raises(CheckpointError, match=r"model\.w does not begin with old_prefix='model\.n'"):
        replace_prefix_for_sharding(nested, "model.n", "x")
    apply_prefix_mapping(nested, {"model.w": "v", "model.": "", "v": "never"})
    add_prefix_for_sharding(nested, "p.")
    assert [each.key for each in (note, tensor, factory)] == ["p.note", "p.v", "p.f"]
