"""The trained weights under the names of Hugging Face, for programs that sample with them."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.checkpoint.writer import write_safetensors
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.hub.adapter_export import MergedReader
from megatron_core.hub.hugging_face import MTP_PREFIX, architecture_for
from megatron_core.hub.hugging_face.files import INDEX
from megatron_core.hub.hugging_face.writer import stored_tensors
from megatron_core.models.build import global_shapes
from megatron_core.parallel.texts import all_agree
from megatron_core.post_training.weights import LiveWeights
from megatron_core.training.setup import Run

NamedTensor = tuple[str, Tensor]


def hugging_face_weights(run: Run, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
    """Yield the name and the whole tensor of each weight, as ``transformers`` loads them; one tensor at a time.

    All ranks iterate together, and each of them receives every tensor. Adapters are merged. ``dtype`` defaults to the
    dtype of training. Errors: ``ConfigError`` if no architecture of transformers has the settings of the model.
    """
    config = run.config
    architecture = architecture_for(config.model, config.checkpoint.hf_model_type)
    live = LiveWeights(run.data_parallel, run.vocab_size, run.world.device)
    has_adapters = config.optional("lora_rank") is not None
    reader = MergedReader(live, live, config) if has_adapters else live
    shapes = global_shapes(config.with_section(TuningConfig()), run.vocab_size)
    dtype = live.dtype_of() if dtype is None else dtype
    for name, shape in shapes.items():
        if name.startswith(MTP_PREFIX):
            continue
        keys = architecture.source(name).stored_shapes(config.model, shape)
        yield from zip(keys, stored_tensors(reader, architecture, config.model, name, shape, dtype), strict=True)
    for key, value in architecture.constants(config.model).items():
        yield key, torch.tensor(value, dtype=dtype)


def in_buckets(weights: Iterator[NamedTensor], bucket_bytes: int) -> Iterator[Sequence[NamedTensor]]:
    """Group weights into buckets of at most ``bucket_bytes``, or one larger tensor, as rollout programs load them."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def save_weights(run: Run, folder: Path, source: Path, file_bytes: int = 4 * 10**9) -> None:
    """Write the present weights to ``folder`` for ``transformers``; a collective call.

    ``source``: the folder from which the model was loaded; its settings and its tokenizer are copied.
    """
    is_first = run.world.rank == 0
    weight_map: dict[str, str] = {}
    size = 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model", ".py") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    for number, bucket in enumerate(in_buckets(hugging_face_weights(run), file_bytes), 1):
        if is_first:
            name = f"model-{number:05d}.safetensors"
            entries = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in bucket]
            write_safetensors(folder / name, entries, (tensor for _, tensor in bucket), {"format": "pt"})
            weight_map |= dict.fromkeys((key for key, _ in bucket), name)
            size += sum(tensor.nbytes for _, tensor in bucket)
    if is_first:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    # No rank must tell others about files that rank 0 is writing.
    all_agree(True, run.world.device)
