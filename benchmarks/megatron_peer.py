"""Training steps of Megatron Core on a CPU over gloo, for ``bench_peers --megatron`` and ``bench_moe --megatron``.

CUDA's functions are replaced by no-ops. The model is that of Megatron's local specification (without Transformer
Engine), under its DistributedDataParallel and its schedules; experts are sequential products (``SequentialMLP``),
because the grouped product needs a GPU. The optimizer is torch's fused AdamW on ``main_grad`` with torch's clipping,
because Megatron's only accepts CUDA tensors.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import typing
from contextlib import nullcontext
from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.torch_peers import Shape, Step, batches_of
from megatron_core.errors import ConfigError

MEGATRON = Path(sys.prefix).resolve() / "megatron-core"
"""The folder into which ``make install-test`` installs Megatron Core."""


class _Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Triton kernels that are imported but not run."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_triton = name.split(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_triton else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    __version__ = "3.5.0"
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def megatron_version(folder: Path) -> str:
    """Name and version of the package in ``folder``."""
    info = (folder / "megatron" / "core" / "package_info.py").read_text()
    return "Megatron Core " + ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info, re.MULTILINE))


def import_megatron(folder: Path) -> None:
    """Make ``megatron.core`` of ``folder`` usable on a CPU."""
    if not (folder / "megatron" / "core").is_dir():
        raise ConfigError(f"--megatron {folder} has no folder megatron/core; install megatron-core there or clone it")
    import_module("torch._inductor.compile_fx")  # needs the real triton
    # The drop-in, which has precedence over other copies, may be imported already.
    if "megatron_core.drop_in" in sys.modules:
        sys.modules["megatron_core.drop_in"].deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Triton())

    # Replace streams by no-ops and the device by the CPU.
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda event=event: event, wait_stream=lambda other: None)
    torch.cuda.Stream = lambda *args, **kwargs: stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *args: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args: None
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))
    used = Path(import_module("megatron.core").__file__ or "")
    assert folder.resolve() in used.resolve().parents, f"{used} is not of {folder}"
    norms: Any = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    norms.__new__ = partial(_norm, norms.__new__)
    dist.all_to_all_single = partial(_with_numbers, dist.all_to_all_single)
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    vars(moe_utils).setdefault("te_general_gemm", None)  # undefined without Transformer Engine


def _norm(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Make torch's norm with sequence parallelism too, for which Megatron sums the marked parameters' gradients."""
    own = copy(config)
    own.sequence_parallel = False
    norm: nn.Module = make(cls, own, *args, **kwargs)
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return norm


def _with_numbers(exchange: Any, *args: Any, **kwargs: Any) -> Any:
    """Call with the sizes of parts as numbers; Megatron converts only those on a GPU."""
    given = {
        key: each.tolist() if isinstance(each, Tensor) and "sizes" in key else each for key, each in kwargs.items()
    }
    return exchange(*args, **given)


def _on_cpu(make: Any, *args: Any, **kwargs: Any) -> Tensor:
    return make(*args, **(kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {})))


def megatron_step(folder: Path, shape: Shape, layout: dict[str, Any], micro_batches: int) -> Step:
    """A step of Megatron's GPT in ``layout``, settings of this framework with the same names as Megatron's."""
    import_megatron(folder)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = nullcontext  # without dropout no random numbers are drawn
    parallel_state.initialize_model_parallel(**{name: layout.get(name, 1) for name in sizes})
    config = _transformer_config(shape, layout)
    model = _model(config, shape)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = batches_of(shape, micro_batches)
    run, mask = get_forward_backward_func(), torch.ones(batches[0].shape)

    def forward(data: Any, model: nn.Module) -> Any:
        batch = next(data)
        positions = torch.arange(batch.shape[1]).expand_as(batch)
        losses = model(batch, positions, None, labels=batch)
        return losses, lambda output: ((output * mask).sum() / mask.sum(), {})

    def step() -> None:
        model.zero_grad_buffer()
        run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=micro_batches,
            seq_length=shape["seq_length"],
            micro_batch_size=shape["micro_batch_size"],
            forward_only=False,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        _clip(model, parallel_state.get_model_parallel_group())
        optimizer.step()

    return step


def _clip(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Clip by the norm over the model-parallel ranks, at the same cost as Megatron; replicas count once per rank."""
    squares = torch.stack(torch._foreach_norm([parameter.grad for parameter in model.parameters()])).square().sum()
    dist.all_reduce(squares, group=group)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())


def _transformer_config(shape: Shape, layout: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = "swiglu" in shape
    of_experts = {key: value for key, value in shape.items() if key.startswith("moe_")}
    if of_experts:
        of_experts |= {"num_moe_experts": shape["num_experts"], "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        ffn_hidden_size=shape.get("ffn_hidden_size", 4 * shape["hidden_size"]),
        normalization=shape.get("normalization", "LayerNorm"),
        gated_linear_unit=gated,
        activation_func=nn.functional.silu if gated else partial(nn.functional.gelu, approximate="tanh"),
        add_bias_linear=not gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        **of_experts,
        **layout,
    )


def _model(config: Any, shape: Shape) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    rotary = shape.get("position_embedding_type") == "rope"
    spec = get_gpt_layer_local_spec(num_experts=shape.get("num_experts"), normalization=config.normalization)
    return GPTModel(
        config,
        spec,
        shape["vocab_size"],
        shape["seq_length"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not shape.get("untie_embeddings_and_output_weights"),
        position_embedding_type="rope" if rotary else "learned_absolute",
    )
