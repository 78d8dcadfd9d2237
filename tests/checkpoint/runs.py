"""Small training runs that save and load, and a separate reader of checkpoints for comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_128

from megatron_core.checkpoint import TensorBox, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.parallel import World
from megatron_core.reports.checks import RunChecks
from megatron_core.training.setup import Run, set_up
from megatron_core.training.state import optimizer_pieces, weight_pieces
from megatron_core.training.step import train_step

SMALL = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "init_method_std": 0.1,
    "make_vocab_size_divisible_by": 8,
    "vocab_size": 101,  # not a multiple of any other size
    "seq_length": 8,
    "mock_data": True,
    "global_batch_size": 4,
    "train_iters": 20,
    "lr": 1e-2,
    "adam_eps": 1e-4,
    "fp64": True,
}
MODERN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 32,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def start(settings: dict[str, Any]) -> Run:
    """A run of this process in its world."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = RunConfig.from_flat(SMALL | settings)
    check(config, size)
    return set_up(config, World(rank, size, local_rank=0, device=torch.device("cpu")))


def train(run: Run, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the next steps."""
    results = [train_step(run) for _ in range(steps)]
    run.data_parallel.finish_param_sync()
    return [(result.loss, result.grad_norm) for result in results]


def save_run(run: Run) -> Path:
    """Write a checkpoint and return its folder."""
    RunChecks(run).compare()
    run.saver.save(run.state)
    return Path(run.config.checkpoint.save) / f"iter_{run.state.iteration:07d}"


def pieces(run: Run) -> Iterator[TensorBox]:
    """All state of this rank: whole parameters, its shard of the weights, its optimizer state."""
    for stage in run.stages.values():
        named = list(stage.named_global_parameters())
        whole = run.data_parallel.reading([parameter for _, parameter in named])
        for (name, _), parameter in zip(named, whole, strict=True):
            yield from parameter_pieces([(name, parameter)])
    for bucket in run.data_parallel.buckets:
        yield from weight_pieces(bucket)
    yield from optimizer_pieces(run.optimizer)


def stored(folder: Path) -> dict[str, Tensor]:
    """All whole tensors of a checkpoint, assembled only from its manifest and files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    tensors = {}
    for name, entry in manifest["tensors"].items():
        parts = [(box, files[box["file"]][box["key"]]) for box in entry["boxes"]]
        full = torch.zeros(entry["shape"], dtype=parts[0][1].dtype)
        written = torch.zeros(entry["shape"], dtype=torch.int64)
        for box, values in parts:
            where = tuple(slice(a, b) for a, b in zip(box["start"], box["stop"], strict=True))
            full[where] = values
            written[where] += 1
        assert (written == 1).all(), f"{name} is not stored exactly once"
        tensors[name] = full
    return tensors


def sign(text: bytes) -> bytes:
    """A manifest's ``text`` with a correct checksum."""
    text = text.rpartition(b',\n "checksum": "')[0] or text.rstrip().removesuffix(b"}").rstrip()
    return text + b',\n "checksum": "' + xxh3_128(text).hexdigest().encode() + b'"\n}'


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's content and update its checksum."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    path.write_bytes(sign(json.dumps(content, indent=1).encode()))


def compare(run: Run, tensors: dict[str, Tensor], tolerance: float = 0.0) -> set[str]:
    """Assert that all state of this rank equals the stored one; returns the compared names."""
    seen = set()
    for piece in pieces(run):
        where = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        expected = tensors[piece.name][where]
        if tolerance:
            scale = tensors[piece.name].abs().max().clamp_min(1e-12)
            assert (piece.memory - expected).abs().max() <= tolerance * scale, f"{piece.name} differs"
        else:
            assert torch.equal(piece.memory, expected), f"{piece.name} at {piece.box} differs"
        seen.add(piece.name)
    return seen
