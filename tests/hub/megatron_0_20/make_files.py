"""Run Megatron-LM's pretrain_gpt.py on a CPU to create the files in this folder.

MEGATRON=FOLDER RECORD=tokens.jsonl python make_files.py FLAGS   (under torchrun for two ranks; gloo)

FOLDER is a clone of Megatron-LM with its compiled datasets helper. The process needs PyTorch, psutil and einops. The
common FLAGS of all files are ``COMMON``; add ``--save`` and the flags of the table in README.md. RECORD receives the
tokens and the loss of every micro-batch. The archive of a file has iter_0000003 without its tokenizer folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import multiprocessing
import os
import runpy
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.output_code
import typing_extensions

COMMON = [
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "64",
    "--make-vocab-size-divisible-by",
    "8",
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--lr",
    "0.01",
    "--min-lr",
    "0.001",
    "--lr-decay-style",
    "constant",
    "--clip-grad",
    "1.0",
    "--weight-decay",
    "0.1",
    "--train-iters",
    "6",
    "--eval-iters",
    "0",
    "--eval-interval",
    "1000",
    "--log-interval",
    "1",
    "--save-interval",
    "3",
    "--transformer-impl",
    "local",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--num-workers",
    "0",
    "--distributed-backend",
    "gloo",
    "--attention-backend",
    "unfused",
    "--disable-jit-fuser",
]
CPU = torch.device("cpu")


class Idle:
    """A stream or event without work."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *a, **k: None

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


class Generators(list[Any]):
    """The default generator for every device."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU, which may be a number."""
    return CPU if type(device) is int or "cuda" in str(device) else device


def without(function: Callable[..., Any], *names: str, **fixed: Any) -> Callable[..., Any]:
    """``function`` without the keyword arguments ``names``, with others ``fixed`` and every device the CPU."""

    def call(*args: Any, **given: Any) -> Any:
        kept = {name: value for name, value in given.items() if name not in names}
        if kept.get("device") is not None:
            kept["device"] = on_cpu(kept["device"])
        return function(*args, **(kept | fixed))

    return call


def patch_cuda() -> None:
    """Let ``torch.cuda`` describe the CPU."""
    cuda: Any = torch.cuda
    values = {"current_device": CPU, "is_available": True, "device_count": 8, "is_initialized": True, "init": None}
    values |= {"memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0}
    values |= {"get_device_capability": (9, 0), "get_device_name": "cpu", "mem_get_info": (1 << 34, 1 << 34)}
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1)
    values |= {"get_device_properties": properties, "memory_stats": MagicMock(), "_lazy_init": None}
    for name, value in values.items():
        setattr(cuda, name, lambda *a, value=value, **k: value)
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *a, **k: None)
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    for name in ("current_device", "get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, getattr(cuda, name))
    cuda.Stream = cuda.Event = Idle
    cuda.current_stream = cuda.default_stream = Idle
    cuda.stream = cuda.device = lambda *a, **k: contextlib.nullcontext()
    cuda.nvtx, cuda.default_generators = MagicMock(), Generators()
    kinds = {"FloatTensor": torch.float32, "LongTensor": torch.int64, "IntTensor": torch.int32}
    for name, dtype in (kinds | {"ByteTensor": torch.uint8, "DoubleTensor": torch.float64}).items():
        setattr(cuda, name, lambda data, dtype=dtype: torch.tensor(data, dtype=dtype))


def patch_tensors() -> None:
    """Create tensors for a GPU on the CPU, and report types of a GPU."""
    tensor: Any = torch.Tensor
    names = ["empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like", "eye"]
    for name in (*names, "as_tensor", "randint", "linspace", "tril", "ones_like", "full_like"):
        setattr(torch, name, without(getattr(torch, name), "pin_memory"))
    to, kind = tensor.to, tensor.type
    named = (str, torch.device)
    tensor.to = lambda self, *a, **k: without(to)(self, *(on_cpu(x) if isinstance(x, named) else x for x in a), **k)
    tensor.cuda = tensor.pin_memory = lambda self, *a, **k: self
    tensor.type = lambda self, *a, **k: kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    tensor.record_stream = lambda *a: None
    setattr(torch.nn.Module, "cuda", lambda self, *a, **k: self)  # noqa: B010
    setattr(torch, "compile", lambda f=None, *a, **k: f if f is not None else lambda g: g)  # noqa: B010


def patch_distributed() -> None:
    """Use gloo, and fork the processes that write."""
    dist: Any = torch.distributed
    dist.barrier = without(dist.barrier, "device_ids")
    dist.init_process_group = without(dist.init_process_group, "device_id", backend="gloo")
    dist.new_group = without(dist.new_group, "pg_options", "device_id", backend="gloo")
    module: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    module.get_write_results_queue.__wrapped__.__defaults__ = ("fork",)
    multiprocessing.set_start_method("fork", force=True)


def record(path: Path) -> None:
    """Append tokens, labels and loss of every call of the model to ``path``."""
    model: Any = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    forward = model.forward

    def recorded(self: Any, input_ids: Any, *args: Any, **given: Any) -> Any:
        losses = forward(self, input_ids, *args, **given)
        if input_ids is not None and given.get("labels") is not None:
            values = {"tokens": input_ids.tolist(), "labels": given["labels"].tolist(), "loss": losses.mean().item()}
            with path.open("a") as file:
                file.write(json.dumps(values) + "\n")
        return losses

    model.forward = recorded


def main() -> None:
    """Patch functions that need a GPU, then run the training."""
    for name in ("triton", "triton.language"):
        module: Any = MagicMock(name=name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        module.__version__ = "3.0.0"
        sys.modules[name] = module
    setattr(typing, "override", typing_extensions.override)  # noqa: B010
    folder = Path(os.environ["MEGATRON"])
    sys.path.insert(0, str(folder))
    patch_cuda()
    patch_tensors()
    patch_distributed()
    record(Path(os.environ["RECORD"] + "." + os.environ.get("RANK", "0")))
    sys.argv = ["pretrain_gpt.py", *COMMON, *sys.argv[1:]]
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
