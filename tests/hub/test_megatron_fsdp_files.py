"""Checkpoints with ``--ckpt-format fsdp_dtensor``: a state dict of DTensors under Megatron-FSDP's keys."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_megatron
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.parallel.boxes import Box
from megatron_core.verify.ranks import run_ranks
from tests.hub.megatron_files import FUSED
from tests.hub.test_megatron_checkpoints import (
    EXPERTS,
    GPT,
    LLAMA,
    assert_same,
    imported,
    make_model,
    named,
    weights_of,
)

STATE = {"exp_avg": lambda weight: 2 * weight, "exp_avg_sq": torch.square}
"""Adam's state in the files, as functions of the weight."""
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt": (GPT, "fused"),
    "llama": (LLAMA, "float16"),
    "grouped experts": (EXPERTS, "grouped"),
    "sequential experts": (EXPERTS, "sequential"),
}


def theirs(weights: dict[str, Tensor], how: str, gated: bool) -> dict[str, Tensor]:
    """The weights under the names of Megatron-FSDP's state dict, without its prefixes."""
    found: dict[str, Tensor] = {}
    for name, whole in weights.items():
        for ours, fused in FUSED.items() if how == "fused" else ():
            name = name.replace(ours, fused)
        each = {name: whole}
        if ".experts.linear" in name and how == "grouped":
            each = {f"{name}{number}": matrix for number, matrix in enumerate(whole)}
        elif ".experts.linear" in name:
            local = name.replace("experts.linear", "experts.local_experts.{}.linear")
            each = {local.format(number): matrix for number, matrix in enumerate(whole)}
        for key, values in each.items():
            if gated and "linear_fc1." in key and "layer_norm" not in key:
                found |= dict(zip((f"{key}_w", f"{key}_v"), values.chunk(2), strict=True))
            else:
                found[key] = values
    return found


def write(folder: Path, weights: dict[str, Tensor], args: argparse.Namespace, how: str) -> None:
    """Write a checkpoint on this rank; each tensor is split over the ranks by its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named_weights = theirs(weights, how, args.swiglu)
    inner = "module.module." if how == "float16" else "module."
    model = {f"{inner}{name}": distribute_tensor(values, mesh, [Shard(0)]) for name, values in named_weights.items()}
    model[f"{inner}decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    state = {
        f"module.{inner}{name}": {kind: distribute_tensor(of(values), mesh, [Shard(0)]) for kind, of in STATE.items()}
        for name, values in named_weights.items()
    }
    group = {"lr": 0.1, "step": 5, "betas": (0.9, 0.95)}
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"state": state, "param_to_group_meta": dict.fromkeys(state, group)},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 24},
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
    save(content, checkpoint_id=folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def read(reader: MegatronReader, name: str, shape: torch.Size) -> Tensor:
    """A whole tensor of a checkpoint."""
    memory = torch.full(shape, torch.nan)
    reader.fill([TensorBox(name, tuple(shape), Box((0,) * len(shape), tuple(shape)), memory, owned=False)])
    return memory


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_weights_and_state_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, how = CASES[name]
    model = make_model(settings, biases=settings is GPT)
    weights, further = weights_of(model), {"consumed_train_samples": 28}
    args = named(settings, model, monkeypatch, **further)
    run_ranks(2, write, tmp_path, weights, args, how, backend="gloo")
    import_megatron(tmp_path, tmp_path / "ours", step=7)
    assert_same(model, imported(tmp_path / "ours"))

    reader = MegatronReader(tmp_path)
    for each, weight in weights.items():
        for kind, of in STATE.items():
            assert torch.equal(read(reader, f"optimizer.{kind}.{each}", weight.shape), of(weight)), (each, kind)
    progress = reader.progress()
    assert (progress.iteration, progress.consumed_samples, progress.optimizer_steps) == (7, 28, 5)
    assert progress.skipped_samples == 4


def test_a_state_dict_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(GPT, biases=True)
    path = tmp_path / "iter_0000007"
    save({"args": named(GPT, model, monkeypatch), "iteration": 7}, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointError, match="do not agree; missing: decoder") as found:
        import_megatron(path, tmp_path / "ours")
    assert "\n" not in str(found.value)


def test_a_state_dict_of_another_program_is_refused(tmp_path: Path) -> None:
    save({"model": {"layer.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    with pytest.raises(CheckpointError, match="another program than Megatron-LM wrote it; convert") as found:
        MegatronReader(tmp_path / "iter_0000007")
    assert "\n" not in str(found.value)


WEIGHT, SCHEDULED = "model.module.module.decoder.layers.0.mlp.linear_fc2.weight", "opt_param_scheduler.num_steps"
"""Keys of tensors in the files that are spoiled."""


def only_place(metadata: Any, name: str) -> Any:
    """The place of a tensor of one chunk."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def another_place(metadata: Any) -> None:
    place, other = only_place(metadata, WEIGHT), only_place(metadata, WEIGHT.replace("weight", "bias"))
    place.offset, place.length = other.offset, other.length


def edit(name: str, **values: Any) -> Callable[[Any], None]:
    """Set attributes of the only chunk of a tensor."""
    return lambda metadata: vars(metadata.state_dict_metadata[name].chunks[0]).update(values)


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a chunk in another place": (another_place, r"a chunk of model\..*fc2\.weight has the shape \[\d+\], its metadata"),
    "offsets of another rank": (
        edit(WEIGHT, offsets=torch.Size([0])),
        r"cannot be read: .*fc2\.weight with .* at \[0\]",
    ),
    "a size of another rank": (
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "size", torch.Size([64])),
        r"cannot be read: .*fc2\.weight with the shape \[64\]",
    ),
    "a key that is not a string": (
        lambda m: m.state_dict_metadata.update({5: m.state_dict_metadata[WEIGHT]}),
        "cannot be read: the name 5 is not a string",
    ),
    "a tensor without chunks": (
        lambda m: m.state_dict_metadata[SCHEDULED].chunks.clear(),
        rf"metadata lists no part of {SCHEDULED}; copy",
    ),
    "a huge length": (lambda m: setattr(only_place(m, WEIGHT), "length", 2**62), "is truncated: .* is incomplete"),
    "a negative offset": (lambda m: setattr(only_place(m, WEIGHT), "offset", -5), r"fc2\.weight' has bytes -5 to -5"),
    "no chunk of a weight": (
        lambda m: m.state_dict_metadata[WEIGHT].chunks.clear(),
        r"missing: decoder.*fc2\.weight",
    ),
    "a short chunk": (
        edit(WEIGHT, offsets=torch.Size([1, 0]), sizes=torch.Size([31, 128])),
        r": 3968 of 4096 elements of decoder.*fc2\.weight are stored",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_metadata_is_one_sentence(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = make_model(GPT, biases=True), tmp_path / "iter_0000007"
    weights = {f"module.module.{name}": weight for name, weight in theirs(weights_of(model), "fused", False).items()}
    content = {"args": named(GPT, model, monkeypatch), "iteration": 7, "model": weights}
    save(content | {"opt_param_scheduler": {"num_steps": torch.tensor([24])}}, checkpoint_id=path, no_dist=True)
    metadata = FileSystemReader(path).read_metadata()
    spoil, message = FAULTS[fault]
    spoil(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message) as found:
        import_megatron(path, tmp_path / "ours")
    assert "\n" not in str(found.value)
