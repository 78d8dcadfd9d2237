r"""Print the contents of a checkpoint, verify its files, or compare it with another one tensor by tensor.

megatron-inspect-checkpoint checkpoints

megatron-inspect-checkpoint checkpoints/iter_0001000 --verify --tensors

megatron-inspect-checkpoint checkpoints --hash

megatron-inspect-checkpoint checkpoints --ckpt-step 1000 --diff other_checkpoints
"""

from __future__ import annotations

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("inspect_checkpoint")

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megatron_core.errors import CheckpointError
from megatron_core.terminal import parse_flags

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_core.checkpoint import CheckpointReader
    from megatron_core.checkpoint.manifest import StoredTensor

MOST_LINES = 50
"""Maximum number of listed differences without --tensors."""


@dataclass(frozen=True, kw_only=True)
class InspectCheckpointFlags:
    """Print the contents of a checkpoint, verify its files, or compare it with another one tensor by tensor."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder of checkpoints, or that of one iteration."""
    ckpt_step: int | None = None
    """Iteration to inspect; default: the latest."""
    verify: bool = False
    """First check the size and hash of every file; report all faults and exit with status 1. --diff always does
    this."""
    tensors: bool = False
    """List every tensor, with its shape, dtype and files; with --diff, every difference."""
    hash: bool = False
    """Print hashes of the tensors that do not depend on the layout in which the checkpoint was saved: one of all, one
    of each kind, and with --tensors one of each tensor. Those of weights and optimizer state are the hashes of
    --record-hashes."""
    diff: str | None = None
    """Compare with the checkpoint in this folder, in any layout: settings, names, shapes, dtypes and every bit; exit
    with status 1 if a tensor differs."""


def open_reader(folder: str, step: int | None) -> CheckpointReader:
    """The checkpoint in ``folder``. Errors: ``CheckpointError``."""
    from megatron_core.checkpoint import CheckpointReader, find_checkpoint  # loads torch, which --help does not need

    checkpoint = find_checkpoint(folder, step)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no checkpoint; give a --save folder of a training run")
    return CheckpointReader(checkpoint)


def inspect_checkpoint(settings: InspectCheckpointFlags) -> bool:
    """Print the requested information; returns whether everything that was compared is equal."""
    with open_reader(settings.checkpoint, settings.ckpt_step) as reader:
        if settings.diff is None:
            if settings.verify:
                print(verified(reader), end="\n\n")
            if settings.hash:
                print("\n".join(hash_lines(reader, by_tensor=settings.tensors)))
                return True
            print("\n".join(contents(reader)))
            if settings.tensors:
                print("\n" + "\n".join(tensor_lines(reader)))
            return True
        with open_reader(settings.diff, settings.ckpt_step) as other:
            checked = [verified(compared) for compared in (reader, other)]  # a flipped bit is damage, not a difference
            if settings.verify:
                print("\n\n".join(checked), end="\n\n")
            return compared(reader, other, None if settings.tensors else MOST_LINES)


def verified(reader: CheckpointReader) -> str:
    """Check all files; returns a sentence if they are intact. Errors: ``CheckpointError`` that names damaged ones."""
    faults = reader.verify()
    if faults:
        raise CheckpointError("; ".join(faults))
    files = reader.manifest.files
    size = sum(file.size for file in files.values())
    return f"{reader.folder}: no fault; all {len(files)} files, {size:,} bytes, are intact"


def contents(reader: CheckpointReader) -> list[str]:
    """The state of the run, its layout, and the sizes of tensors and files."""
    from megatron_core.checkpoint.manifest import TORCH_DTYPES

    manifest = reader.manifest
    state = manifest.state
    config = manifest.state.get("config") or {}
    lines = [str(reader.folder), f"  iteration  {manifest.iteration:,}, save {manifest.save_id}"]
    counters = [f"{name} {state[name]:,}" for name in ("consumed_samples", "consumed_tokens") if name in state]
    if counters:
        lines.append(f"  data       {', '.join(counters)}")
    lines.append(
        f"  layout     {state.get('layout') or 'of no training run'}, {len(rank_files(reader))} files of ranks"
    )
    if config:
        names = ("num_layers", "hidden_size", "num_attention_heads", "num_experts", "seq_length")
        shape = ", ".join(f"{name} {config[name]}" for name in names if config.get(name) is not None)
        lines.append(f"  model      {shape}, vocabulary {state.get('vocab_size')}")
    lines += ["", f"{'tensors':<24}{'number':>8}{'elements':>18}{'bytes':>20}  dtypes"]
    for group, tensors in sorted(by_kind(manifest.tensors).items()):
        elements = sum(prod(tensor.shape) for tensor in tensors)
        size = sum(prod(tensor.shape) * TORCH_DTYPES[tensor.dtype].itemsize for tensor in tensors)
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        lines.append(f"{group:<24}{len(tensors):>8,}{elements:>18,}{size:>20,}  {dtypes}")
    lines += ["", f"{'files':<50}{'bytes':>20}"]
    lines += [f"{name:<50}{file.size:>20,}" for name, file in sorted(manifest.files.items())]
    return lines


def rank_files(reader: CheckpointReader) -> set[str]:
    """The files that contain tensors."""
    return {box.file for tensor in reader.manifest.tensors.values() for box in tensor.boxes}


def by_kind(tensors: Mapping[str, StoredTensor]) -> dict[str, list[StoredTensor]]:
    """The tensors of ``model``, and those of each state of the optimizer."""
    groups: dict[str, list[StoredTensor]] = {}
    for name, tensor in tensors.items():
        first, _, tail = name.partition(".")
        second = tail.partition(".")[0]
        groups.setdefault(first if first == "model" else f"{first}.{second}", []).append(tensor)
    return groups


def hash_lines(reader: CheckpointReader, *, by_tensor: bool) -> Iterator[str]:
    """The hash of all tensors, of each part of the checkpoint, and with ``by_tensor`` of each tensor."""
    from megatron_core.reports.hash_sums import combined
    from megatron_core.reports.tensor_hashes import checkpoint_hashes

    hashes = checkpoint_hashes(reader)
    sections: dict[str, dict[str, str]] = {}
    for name, value in hashes.items():
        section, _, tail = name.partition(".")
        sections.setdefault(section, {})[tail] = value
    names = {"model": "weights"}
    yield f"{combined(hashes.items())}  {reader.folder}, iteration {reader.manifest.iteration:,}"
    for section, entries in sorted(sections.items()):
        yield f"{combined(entries.items())}    {names.get(section, section)}"
    if by_tensor:
        yield from (f"{value}      {name}" for name, value in hashes.items())


def tensor_lines(reader: CheckpointReader) -> Iterator[str]:
    """A line with the location of every tensor."""
    for name, tensor in reader.manifest.tensors.items():
        files = sorted({box.file for box in tensor.boxes})
        where = f"{len(tensor.boxes)} boxes in {len(files)} files, {files[0]} first" if files else "no box"
        yield f"{name}  {tensor.dtype} {list(tensor.shape)}  {files[0] if len(tensor.boxes) == 1 else where}"


def compared(one: CheckpointReader, other: CheckpointReader, most: int | None) -> bool:
    """Print the differences of two checkpoints, at most ``most`` lines of each kind; returns whether all tensors are
    equal."""
    print(f"- {one.folder}\n+ {other.folder}")
    limited(setting_lines(one, other), most)
    names = one.manifest.tensors.keys(), other.manifest.tensors.keys()
    for sign, mine, theirs in (("-", names[0], names[1]), ("+", names[1], names[0])):
        limited([f"{sign} {name}" for name in sorted(mine - theirs)], most)
    common = sorted(names[0] & names[1])
    different = [line for name in common if (line := difference(name, one, other))]
    limited(different, most)
    alone = len(names[0] ^ names[1])
    print(
        f"{len(common) - len(different)} tensors are bitwise equal, {len(different)} differ, {alone} are in only one "
        "of them"
    )
    return not different and not alone


def limited(lines: list[str], most: int | None) -> None:
    """Print the first ``most`` of ``lines`` and the number of the others."""
    for line in lines[:most]:
        print(line)
    if most is not None and len(lines) > most:
        print(f"  ... and {len(lines) - most} more; --tensors lists them")


def setting_lines(one: CheckpointReader, other: CheckpointReader) -> list[str]:
    """Counters and settings that differ."""

    def flat(state: Any) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name != "config"} | (state.get("config") or {})

    first = flat(one.state)
    second = flat(other.state)
    absent = "(not there)"
    return [
        f"  {name}: {first.get(name, absent)!r} and {second.get(name, absent)!r}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name, absent) != second.get(name, absent)
    ]


def difference(name: str, one: CheckpointReader, other: CheckpointReader) -> str:
    """Describe how the tensor ``name`` differs; empty if every bit is equal."""
    entries = one.manifest.tensors[name], other.manifest.tensors[name]
    if len({(entry.shape, entry.dtype) for entry in entries}) > 1:
        types = " and ".join(f"{entry.dtype} {list(entry.shape)}" for entry in entries)
        return f"  {name}: {types}"
    first = one.read(name)
    second = other.read(name)
    unequal = as_integers(first) != as_integers(second)
    count = int(unequal.sum())
    if not count:
        return ""
    distance = (first.double() - second.double()).abs()
    largest = float(distance[unequal].max())
    scale = float(first.double().abs().max())
    return f"  {name}: {count:,} of {first.numel():,} elements, by up to {largest:.3e}; the largest is {scale:.3e}"


def as_integers(tensor: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals itself and the two zeros differ."""
    import torch

    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def main() -> int:
    """Parse the flags and run; 1 if tensors differ."""
    settings = parse_flags(InspectCheckpointFlags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    return 0 if inspect_checkpoint(settings) else 1
