"""Notes of runs on GPUs and on several nodes: the kernel and the memory of attention, links between nodes."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend

from megatron_core.config import RunConfig
from megatron_core.config.attention import attention_of
from megatron_core.launcher import read_integer
from megatron_core.parallel.groups import ParallelGroups

WITHIN = 450e9
"""Bytes per second and direction of a GPU to others of its node (NVLink 4)."""
BETWEEN = 50e9
"""Bytes per second and direction of a GPU to other nodes (a port of 400 Gbit/s for each GPU)."""


def ranks_per_node(world_size: int) -> int:
    """Ranks of this job on this node, from the launcher's ``LOCAL_WORLD_SIZE``; all ranks without it."""
    return read_integer("LOCAL_WORLD_SIZE", world_size, least=1)


def nodes_of(ranks: Sequence[int], per_node: int) -> list[int]:
    """Numbers of the nodes of ``ranks``, if launchers number the ranks of a node one after another."""
    return sorted({rank // per_node for rank in ranks})


def tensor_parallel_notes(groups: ParallelGroups, per_node: int, message_bytes: float, messages: int) -> Iterator[str]:
    """Report a tensor-parallel group over several nodes with the time that its messages need there.

    ``message_bytes``: activations of a micro-batch, which each layer reduces ``messages`` times, forward and backward.
    """
    ranks = groups.ranks("tp")
    nodes = nodes_of(ranks, per_node)
    if len(nodes) == 1:
        return
    sent = messages * 2 * (len(ranks) - 1) / len(ranks) * message_bytes
    yield (
        f"tensor_model_parallel_size={len(ranks)} spans {len(nodes)} nodes of {per_node} ranks: each layer and "
        f"micro-batch sends {sent / 2**20:.3g} MiB, {1e3 * sent / BETWEEN:.2g} ms at {BETWEEN / 1e9:.0f} GB/s "
        f"between nodes instead of {1e3 * sent / WITHIN:.2g} ms at {WITHIN / 1e9:.0f} GB/s within one (rates of H100 "
        f"with 400 Gbit/s for each GPU); use at most {per_node}, and pipeline or data parallelism between nodes"
    )


def chosen_kernel(config: RunConfig, device: torch.device) -> str | None:
    """The kernels of causal attention in training, such as ``flash attention; windows: FlexAttention``; None on a CPU.

    See ``transformer.core_attention`` for the choice.
    """
    model = config.model
    if device.type != "cuda":
        return None
    if model.attention_backend == "unfused":
        return "the formula for all queries and keys, as requested"
    blocks = "the formula in blocks of queries"
    if model.attention_dropout:
        return f"{blocks}, because of attention_dropout"
    # Loaded only by runs on GPUs.
    from megatron_core.features.flex_attention.kernels import flex_obstacle, takes_variable_lengths

    flex = blocks if flex_obstacle(device) is not None else "FlexAttention"
    if model.attn_logit_softcapping is not None or model.attention_backend == "flex":
        return flex
    tp = config.parallel.tensor_model_parallel_size
    attention = attention_of(model)
    dtype = getattr(torch, config.training.compute_dtype)
    # Values are padded to the channels of keys (``fused_attention``).
    shape = config.data.seq_length, attention.query_head_size
    query = torch.empty(1, max(model.num_attention_heads // tp, 1), *shape, dtype=dtype, device=device)
    key = torch.empty(1, attention.key_value_heads(tp), *shape, dtype=dtype, device=device)
    choice = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=query.shape[1] != key.shape[1])
    kernels = [SDPBackend(choice).name.lower().replace("_", " ").removesuffix(" attention") + " attention"]
    if model.has_windows:
        kernels.append(f"windows: {flex}")
    if config.data.reset_attention_mask:
        kernels.append(f"documents: {'variable lengths' if takes_variable_lengths(query, key, key) else flex}")
    return "; ".join(kernels)


def dropout_notes(config: RunConfig, device: torch.device) -> Iterator[str]:
    """The cost of attention dropout on a GPU: its mask depends on positions, so that no flash kernel computes it."""
    model = config.model
    parallel = config.parallel
    trains = not config.training.skip_train
    if device.type != "cuda" or model.attention_dropout == 0.0 or model.attention_backend == "unfused" or not trains:
        return
    num_parts = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    dtype = getattr(torch, config.training.compute_dtype)
    weights = config.training.micro_batch_size * model.num_attention_heads * config.data.seq_length**2 // 2 // num_parts
    yield (
        f"attention_dropout={model.attention_dropout} computes attention without flash kernels, and keeps its weights "
        f"for backward: {weights * dtype.itemsize / 2**30:.2g} GiB for each copy, layer and micro-batch; "
        "--attention-dropout 0 keeps none"
    )


def gpu_notes(config: RunConfig, groups: ParallelGroups, device: torch.device) -> Iterator[str]:
    """Notes about attention dropout on a GPU and tensor parallelism between nodes."""
    yield from dropout_notes(config, device)
    dtype = getattr(torch, config.training.compute_dtype)
    tokens = config.training.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size
    size = tokens * config.model.hidden_size * dtype.itemsize
    # Attention and MLP reduce their outputs, and in backward the gradients of their inputs.
    yield from tensor_parallel_notes(groups, ranks_per_node(groups.grid.world_size), size, messages=4)


def gpu_state(device: torch.device) -> dict[str, float]:
    """``reserved``: bytes of torch's allocator; ``fragments``: the share of them without tensors; ``busy``: share of
    time with kernels, if NVML is installed (nvidia-ml-py). Empty on a CPU."""
    if device.type != "cuda":
        return {}
    reserved = torch.cuda.memory_reserved(device)
    state = {"reserved": reserved, "fragments": 1 - torch.cuda.memory_allocated(device) / max(reserved, 1)}
    if find_spec("pynvml") is not None:
        # NVML has errors of its own; a number of a report must not end the training.
        with suppress(Exception):
            state["busy"] = torch.cuda.utilization(device) / 100
    return state


def describe_allocator(device: torch.device) -> str:
    """Memory that torch's allocator holds on a GPU, its unused part, and the allocations that failed at first."""
    stats = torch.cuda.memory_stats(device)
    reserved = stats["reserved_bytes.all.peak"]
    allocated = stats["allocated_bytes.all.peak"]
    retries = stats["num_alloc_retries"]
    text = (
        f"allocator: peak of {reserved / 2**30:.2f} GiB reserved, {1 - allocated / max(reserved, 1):.0%} of it "
        f"fragments; {retries} retries"
    )
    # A retry frees cached memory, which waits for the whole device: also for messages that are posted ahead.
    advice = ", each of which waited for the whole device; use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return text + (advice if retries else "")
