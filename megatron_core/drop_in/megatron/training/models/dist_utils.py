"""Chunks of a model, wrapped in 16-bit and data-parallel modules."""

import logging
from collections.abc import Callable, Sequence
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
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer,
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
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
    **layer_wise: Any,
) -> list[Any]:
    """Build this rank's chunks with ``build_model_func(pg_collection, pre_process=, post_process=, vp_stage=)``.

    ``pre_wrap_hook`` may replace the list of chunks; ``prepare_existing_model_chunks_for_distributed_training`` wraps
    them, with ``layer_wise``. Raises ValueError if ``wrap_with_ddp`` has no ``ddp_config``, and TypeError if the hook
    is not a function.
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
    wrapping = (overlap_param_gather_with_optimizer_step, use_megatron_fsdp, use_torch_fsdp2, wrap_with_ddp)
    modes = (data_parallel_random_init, mixed_precision_wrapper)
    return prepare_existing_model_chunks_for_distributed_training(
        models, transformer_config, pg_collection, ddp_config, *wrapping, *modes, **layer_wise
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
    use_layer_wise_distributed_optimizer: bool = False,
    use_layer_wise_param_layout: bool = True,
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
            use_layer_wise_distributed_optimizer=use_layer_wise_distributed_optimizer,
            use_layer_wise_param_layout=use_layer_wise_param_layout,
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
    **layer_wise: Any,
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
    whole = [index > 0 or overlap_param_gather_with_optimizer_step for index in range(len(model))]
    is_later_stage = not use_torch_fsdp2 and pg_collection.pp.rank() > 0

    def wrap() -> list[Any]:
        return wrap_model_chunks_with_ddp(
            model,
            None,
            ddp_config,
            DP=kind,
            pg_collection=None if use_torch_fsdp2 else pg_collection,
            bucket_sizes=[None if is_one or is_later_stage else ddp_config.bucket_size for is_one in whole],
            disable_bucketing_per_chunk=whole,
            **layer_wise,
        )

    if torch.cuda.is_available():
        is_captured = get_model_config(model[0]).cuda_graph_impl == "full_iteration"
        stream: Any = get_shared_capture_stream() if is_captured else torch.cuda.Stream()
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


def wrap_model_chunks_with_ddp(
    model_chunks: Sequence[Any],
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    use_layer_wise_distributed_optimizer: bool = False,
    use_layer_wise_param_layout: bool = True,
    DP: Any = None,
    pg_collection: Any = None,
    bucket_sizes: Sequence[int | None] | None = None,
    disable_bucketing_per_chunk: Sequence[bool] | None = None,
) -> list[Any]:
    """Wrap each chunk in ``DP``, by default ``DistributedDataParallel``; ``config=None`` is that of each chunk.

    With ``use_layer_wise_distributed_optimizer``, for an optimizer such as Muon, ``ddp_config`` also shards its state,
    and no shard has a part of a hidden matrix, unless ``use_layer_wise_param_layout`` is False. Without it buckets have
    the layout of ``DistributedOptimizer`` if ``ddp_config`` shards the state.
    """
    kind = DP or DistributedDataParallel
    optimizer: Any = DistributedOptimizer
    if use_layer_wise_distributed_optimizer and use_layer_wise_param_layout and kind is DistributedDataParallel:
        ddp_config.use_distributed_optimizer = True
        optimizer = LayerWiseDistributedOptimizer
        tag_params_for_buffer_routing(model_chunks)
    lays_out = kind is DistributedDataParallel and ddp_config.use_distributed_optimizer
    groups = {} if pg_collection is None else {"pg_collection": pg_collection}
    sizes = bucket_sizes or [ddp_config.bucket_size] * len(model_chunks)
    flags = disable_bucketing_per_chunk or [False] * len(model_chunks)
    wrapped = []
    for chunk, size, is_one in zip(model_chunks, sizes, flags, strict=True):
        layout = {"full_param_layout": _layout(optimizer, chunk, size, ddp_config, pg_collection)} if lays_out else {}
        arguments = {"config": config or get_model_config(chunk), "ddp_config": ddp_config, "module": chunk}
        wrapped.append(kind(disable_bucketing=is_one, **arguments, **groups, **layout))
    return wrapped


def _layout(optimizer: Any, chunk: Any, bucket_size: int | None, ddp_config: Any, pg_collection: Any) -> Any:
    """Return the layout of a chunk's buffers."""
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    shards, expert_shards = (
        getattr(groups, f"intra_{name}", None) or getattr(groups, name) for name in ("dp_cp", "expt_dp")
    )
    return optimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        bucket_size,
        shards.size(),
        ddp_config,
        expert_data_parallel_world_size=expert_shards.size(),
    )


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
