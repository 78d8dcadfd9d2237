"""Forward and backward of all micro-batches; one function runs every layout."""

from typing import Any

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.pipeline_parallel.forward_backward import (
    forward_backward,
    get_forward_backward_func,
)

forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """The (micro-batch, chunk) of each forward of an interleaved schedule: every group of micro-batches goes through
    all chunks."""
    size = microbatch_group_size_per_vp_stage
    groups = [range(first, min(first + size, num_microbatches)) for first in range(0, num_microbatches, size)]
    return [(micro, chunk) for group in groups for chunk in range(num_model_chunks) for micro in group]


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: Any = None,
) -> tuple[int, bool, int, int]:
    """Of this rank in Megatron Core's 1F1B schedules: all forwards, whether they all come before the first backward,
    how many do, and the rest."""
    if p2p_communicator is None:
        rank, ranks = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    else:
        rank, ranks = p2p_communicator.current_stage, p2p_communicator.total_stages
        chunks = p2p_communicator.virtual_pipeline_model_parallel_size
    total = num_microbatches * num_model_chunks
    first = ranks - rank - 1
    if chunks is not None and ranks > 1:
        first = 2 * first + (num_model_chunks - 1) * microbatch_group_size_per_vp_stage
        first += overlap_moe_expert_parallel_comm
    first = total if forward_only else min(first, total)
    return total, first == total, first, total - first


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    config: Any,
    tp_group: Any = None,
    cp_group: Any = None,
) -> list[tuple[int, ...]]:
    """The shapes of what stages send, in a list of one; ``()`` with ``variable_seq_lengths``, where shapes are sent."""
    if config.variable_seq_lengths:
        return [()]
    cp = parallel_state.get_context_parallel_world_size() if cp_group is None else cp_group.size()
    tp = parallel_state.get_tensor_model_parallel_world_size() if tp_group is None else tp_group.size()
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // cp
    return [(length // (tp if config.sequence_parallel else 1), micro_batch_size, config.hidden_size)]


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the memory of an output that was sent, or of all in a list or dict; its graph stays, for
    ``custom_backward``. LayoutError for a view, whose memory would stay."""
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, dict | list):
        for each in out.values() if isinstance(out, dict) else out:
            deallocate_output_tensor(each, deallocate_pipeline_outputs)
        return
    if out._base is not None:
        raise LayoutError("deallocate_output_tensor: the output is a view of another tensor, which keeps the memory")
    out.data = torch.empty(1, dtype=out.dtype, device=out.device)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """The backward of an output that ``deallocate_output_tensor`` has freed; torch's own compares the shapes."""
    if output.numel() != 1:
        raise LayoutError(f"custom_backward: the output has the shape {tuple(output.shape)}; deallocate it before")
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tensors=(output,),
        grad_tensors=(torch.ones_like(output) if grad_output is None else grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
