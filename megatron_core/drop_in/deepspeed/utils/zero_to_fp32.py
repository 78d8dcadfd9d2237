"""Float32 weights of a checkpoint by DeepSpeed's names; for checkpoints of DeepSpeed and of this project."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from re import split
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.runtime.weights_file import write_weights
from megatron_core.checkpoint import CheckpointReader, find_checkpoint
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.hub.deepspeed import latest_tag, read_deepspeed_checkpoint

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}
"""Names of dtypes of the written weights."""


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return whole float32 weights and the buffers for ``load_state_dict``; no pickled code is run.

    ``lazy_mode`` has no effect: the result has tensors, whose ``contiguous()`` programs call in that mode. Errors:
    ``CheckpointError``.
    """
    folder, frozen = Path(checkpoint_dir), not exclude_frozen_parameters
    inner = latest_tag(folder) if tag is None else tag
    own = find_checkpoint(str(folder if inner is None else folder / inner))
    if own is None:
        found = read_deepspeed_checkpoint(folder, tag)
        kept = {n for n in found.shapes if frozen or found.shared.get(n, n) in found.trained or not found.trained}
        return {**{n: t for n, t in found.weights().items() if n in kept}, **found.buffers}
    with CheckpointReader(own) as reader:
        tensors = reader.manifest.tensors
        trained = {n.split(".", 2)[2] for n in tensors if n.startswith("optimizer.") and ".of." not in n}
        weights: dict[str, Tensor] = {}
        for name in tensors:
            kind, _, rest = name.partition(".")
            if kind == "buffers":
                weights[rest] = reader.read(name)
            elif kind == "model" and (frozen or rest in trained or not trained):
                main = f"optimizer.main.{rest}"
                weights[rest] = reader.read(main if main in tensors else name).float()
        shared = reader.state.get("shared", {})
        return weights | {further: weights[name] for further, name in shared.items() if name in weights}


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of DeepSpeed's files of optimizers in a folder, rank 2 before rank 10.

    ``CheckpointError`` if there is none.
    """
    found = [str(path) for path in Path(checkpoint_dir).glob("*_optim_states.pt")]
    if not found:
        raise CheckpointError(f"{checkpoint_dir} has no file *_optim_states.pt; give the folder of a tag")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in split(r"(\d+)", path)])


def to_torch_tensor(
    state_dict: Mapping[str, Tensor], return_empty_tensor: bool = False, dtype: torch.dtype | str | None = None
) -> dict[str, Tensor]:
    """Return the tensors with floating-point ones in ``dtype``, or empty ones of the same shapes; tied ones once."""
    kind = None if dtype is None else _dtype(dtype)
    made: dict[int, Tensor] = {}
    for tensor in state_dict.values():
        wanted = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=wanted) if return_empty_tensor else tensor.to(wanted)
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def _dtype(value: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(str(value).removeprefix("torch.").lower())
    if found is None:
        raise ConfigError(f"dtype={value!r} must be one of {', '.join(sorted(DTYPES))}")
    return found


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as ``pytorch_model.bin``, or ``model.safetensors`` with ``safe_serialization``.

    Files are split at ``max_shard_size``, such as ``5GB``. Errors: ``CheckpointError``.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    weights = to_torch_tensor(weights, dtype=dtype)
    if safe_serialization:  # safetensors refuses tensors that share memory
        unique = {id(tensor): name for name, tensor in reversed(weights.items())}
        weights = {name: tensor.contiguous() for name, tensor in weights.items() if unique[id(tensor)] == name}
    name, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    files, index = {f"{name}.{suffix}": list(weights)}, None
    if max_shard_size is not None:
        from huggingface_hub import split_torch_state_dict_into_shards

        pattern = f"{name}{{suffix}}.{suffix}"
        parts = split_torch_state_dict_into_shards(weights, filename_pattern=pattern, max_shard_size=max_shard_size)
        files = dict(parts.filename_to_tensors)
        if parts.is_sharded:
            index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in files.items():
            write_weights({each: weights[each] for each in names}, folder / file)
        if index is not None:
            (folder / f"{name}.{suffix}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}; give another folder") from error


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """As ``convert_zero_checkpoint_to_state_dict`` with float32; the other arguments follow ``dtype`` there."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *args, **kwargs)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the float32 weights into ``model``, on the CPU, and return it; tensors without a counterpart are kept."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
