"""Chunks of a model, wrapped in 16-bit and data-parallel modules."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megatron.core.tensor_parallel
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (  # type: ignore[import-not-found]
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import get_shared_capture_stream  # type: ignore[import-not-found]
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import utils as pipeline
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, get_pg_rank

logger = logging.getLogger(__name__)
tensor_parallel: Any = megatron.core.tensor_parallel

HAVE_FSDP2 = True
"""Whether torch has it; ``TorchFullyShardedDataParallel`` says that it is not supported here."""
Wrapper = Callable[[Any, Any], Any]


def unimodal_build_distributed_models(
    build_model_func: Callable[..., Any],
    transformer_config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    ddp_config: DistributedDataParallelConfig | None = None,
    overlap_param_gather_with_optimizer_step: bool = False,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    wrap_with_ddp: bool = True,
    data_parallel_random_init: bool = False,
    mixed_precision_wrapper: Wrapper | None = Float16Module,
    pre_wrap_hook: Callable[[list[Any]], list[Any] | None] | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> list[Any]:
    """Build this rank's chunks with ``build_model_func(pg_collection, pre_process=, post_process=, vp_stage=)``.

    ``pre_wrap_hook`` may replace the list of chunks; ``prepare_existing_model_chunks_for_distributed_training`` wraps
    them. Raises ValueError if ``wrap_with_ddp`` has no ``ddp_config`` and TypeError if the hook is not a function.
    """
    _check_ddp(wrap_with_ddp, ddp_config)
    chunks = transformer_config.virtual_pipeline_model_parallel_size
    with torch.device("meta" if transformer_config.init_model_with_meta_device else torch.get_default_device()):
        models = build_virtual_pipeline_stages(build_model_func, pg_collection, chunks, model_type)
    if pre_wrap_hook is not None:
        if not callable(pre_wrap_hook):
            raise TypeError(f"pre_wrap_hook={pre_wrap_hook!r} is not a function; compose_hooks makes one of a list")
        changed = pre_wrap_hook(models)
        if changed is None:
            logger.warning("pre_wrap_hook returned None: the chunks remain; let it return their list")
        models = models if changed is None else changed
    return prepare_existing_model_chunks_for_distributed_training(
        models,
        transformer_config,
        pg_collection,
        ddp_config=ddp_config,
        overlap_param_gather_with_optimizer_step=overlap_param_gather_with_optimizer_step,
        use_megatron_fsdp=use_megatron_fsdp,
        use_torch_fsdp2=use_torch_fsdp2,
        wrap_with_ddp=wrap_with_ddp,
        data_parallel_random_init=data_parallel_random_init,
        mixed_precision_wrapper=mixed_precision_wrapper,
    )


def prepare_existing_model_chunks_for_distributed_training(
    model_list: list[Any],
    transformer_config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    ddp_config: DistributedDataParallelConfig | None = None,
    overlap_param_gather_with_optimizer_step: bool = False,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    wrap_with_ddp: bool = True,
    data_parallel_random_init: bool = False,
    mixed_precision_wrapper: Wrapper | None = Float16Module,
) -> list[Any]:
    """Move chunks to the GPU and wrap them in ``mixed_precision_wrapper`` and data parallelism.

    Chunks on the meta device are allocated, with undefined values.
    """
    _check_ddp(wrap_with_ddp, ddp_config)
    for model in model_list:
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    _print_num_params(model_list, pg_collection=pg_collection)
    meta = transformer_config.init_model_with_meta_device
    if torch.cuda.is_available() and not (use_torch_fsdp2 or transformer_config.use_cpu_initialization or meta):
        for model in model_list:
            model.cuda(torch.cuda.current_device())
    model_list = _wrap_with_mp_wrapper(model_list, transformer_config, mixed_precision_wrapper)
    if meta and not use_torch_fsdp2 and not use_megatron_fsdp:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model_list = [to_empty_if_meta_device(model, device=device) for model in model_list]
    if wrap_with_ddp:
        assert ddp_config is not None, "checked above"
        model_list = _ddp_wrap(
            model_list,
            data_parallel_random_init,
            ddp_config,
            overlap_param_gather_with_optimizer_step,
            use_megatron_fsdp=use_megatron_fsdp,
            use_torch_fsdp2=use_torch_fsdp2,
            pg_collection=pg_collection,
        )
    return model_list


def _check_ddp(wrap_with_ddp: bool, ddp_config: Any) -> None:
    if wrap_with_ddp and not ddp_config:
        raise ValueError("wrap_with_ddp=True needs ddp_config; pass a DistributedDataParallelConfig or False")


def _print_num_params(model: list[Any], pg_collection: Any) -> None:
    """Print the number of this rank's parameters on the first data- and context-parallel rank."""
    if pg_collection.dp.rank() == 0 and pg_collection.cp.rank() == 0:
        ranks = pg_collection.tp.rank(), get_pg_rank(pg_collection.gtp_remat), pg_collection.pp.rank()
        count = sum(parameter.nelement() for each in model for parameter in each.parameters())
        where = "(tensor, gtp_remat, pipeline) model parallel rank"
        print(f" > number of parameters on {where} ({', '.join(map(str, ranks))}): {count}")


def _wrap_with_mp_wrapper(
    model_list: list[Any],
    transformer_config: TransformerConfig,
    mixed_precision_wrapper: Wrapper | None = Float16Module,
) -> list[Any]:
    """Wrap 16-bit models; modules that keep a bias of experts in float32 do so again."""
    if mixed_precision_wrapper is None or not (transformer_config.fp16 or transformer_config.bf16):
        return model_list
    wrapped = [mixed_precision_wrapper(transformer_config, model) for model in model_list]
    for module in (each for model in wrapped for each in model.modules()):
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return wrapped


def _ddp_wrap(
    model: list[Any],
    data_parallel_random_init: bool,
    ddp_config: DistributedDataParallelConfig,
    overlap_param_gather_with_optimizer_step: bool,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    *,
    pg_collection: Any,
) -> list[Any]:
    """Wrap each chunk; only the first has several buckets.

    On a GPU the wrappers are made on a stream of their own, because torch keeps the stream of its gradient nodes.
    """
    if use_megatron_fsdp and use_torch_fsdp2:
        raise ValueError("use_megatron_fsdp and use_torch_fsdp2 exclude each other; leave one of them out")
    assert HAVE_FSDP2 or not use_torch_fsdp2, "Torch FSDP2 needs torch >= 2.4; leave use_torch_fsdp2 out"
    kind: Any = DistributedDataParallel
    if use_megatron_fsdp:
        kind = FullyShardedDataParallel
    if use_torch_fsdp2:
        kind = TorchFullyShardedDataParallel
    else:
        _set_bucket_size(model, ddp_config, pg_collection)
    groups = {} if use_torch_fsdp2 else {"pg_collection": pg_collection}

    def wrap() -> list[Any]:
        found = []
        for index, chunk in enumerate(model):
            whole = index > 0 or overlap_param_gather_with_optimizer_step
            layout = _layout(kind, chunk, whole, ddp_config, pg_collection)
            config = get_model_config(chunk)
            found.append(
                kind(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=whole, **groups, **layout)
            )
        return found

    if torch.cuda.is_available():
        whole = get_model_config(model[0]).cuda_graph_impl == "full_iteration"
        stream: Any = get_shared_capture_stream() if whole else torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wrapped = wrap()
        torch.cuda.current_stream().wait_stream(stream)
    else:
        wrapped = wrap()
    for each in wrapped if data_parallel_random_init else ():
        each.broadcast_params()
    return wrapped


def _set_bucket_size(model: list[Any], ddp_config: Any, pg_collection: Any) -> None:
    """Set the elements of a bucket: by ``num_buckets``, or max(40,000,000, 1,000,000 x ranks); None without overlap."""
    if ddp_config.num_buckets is not None:
        count = sum(parameter.nelement() for each in model for parameter in each.parameters())
        ddp_config.bucket_size = count // ddp_config.num_buckets
    if ddp_config.bucket_size is None:
        ddp_config.bucket_size = max(40_000_000, 1_000_000 * pg_collection.dp_cp.size())
    if not ddp_config.overlap_grad_reduce:
        ddp_config.bucket_size = None


def _layout(kind: Any, chunk: Any, whole: bool, ddp_config: Any, pg_collection: Any) -> dict[str, Any]:
    """Return the argument with the layout of buffers, if the wrapper takes it: one bucket in later stages."""
    if not ddp_config.use_distributed_optimizer or kind is not DistributedDataParallel:
        return {}
    shards, expert_shards = (
        getattr(pg_collection, f"intra_{name}", None) or getattr(pg_collection, name) for name in ("dp_cp", "expt_dp")
    )
    layout = DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        None if whole or pg_collection.pp.rank() > 0 else ddp_config.bucket_size,
        shards.size(),
        ddp_config,
        expert_data_parallel_world_size=expert_shards.size(),
    )
    return {"full_param_layout": layout}


def build_virtual_pipeline_stages(
    build_model_func: Callable[..., Any],
    pg_collection: ProcessGroupCollection,
    vp_size: int | None,
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> list[Any]:
    """Build ``vp_size`` chunks, or one stage without interleaving or without a pipeline."""
    group: Any = pg_collection.pp
    first, last = pipeline.is_pp_first_stage(group), pipeline.is_pp_last_stage(group)
    if vp_size is None or group.size() == 1:
        models = [build_model_func(pg_collection, pre_process=first, post_process=last)]
    else:
        models = [
            build_model_func(
                pg_collection,
                pre_process=first and pipeline.is_vp_first_stage(vp_stage=chunk, vp_size=vp_size),
                post_process=last and pipeline.is_vp_last_stage(vp_stage=chunk, vp_size=vp_size),
                vp_stage=chunk,
            )
            for chunk in range(vp_size)
        ]
    for model in models:
        model.model_type = model_type
    return models


def to_empty_if_meta_device(module: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
    """Move a module to ``device``; tensors on the meta device are allocated there, with undefined values.

    Unlike ``nn.Module.to_empty`` it keeps the values of the others, such as precomputed buffers.
    """

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    return module._apply(moved, recurse=recurse)
