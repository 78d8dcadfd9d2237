"""Forward and backward of all micro-batches; one function runs every layout, over the engine's ``run_plan``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core import parallel_state
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.ops.rows import wide
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.pipeline_parallel.messages import MessageFormat
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules import forward_only as forward_only_plan
from megatron_core.schedules import interleaved
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan
from megatron_core.training.driver import PipelineRank, run_plan

ForwardStepFunction = Callable[[Any, nn.Module], tuple[Tensor, Callable[..., Any]]]


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """Return ``forward_backward``, which is the same function for every layout; ``pp_size`` is checked."""
    actual = parallel_state.get_pipeline_model_parallel_world_size()
    if pp_size is not None and pp_size != actual:
        raise ConfigError(f"pp_size={pp_size}, but the current groups have {actual} pipeline ranks; remove it")
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStepFunction,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list[Any]:
    """Run forward, and unless ``forward_only`` backward, of all micro-batches; return one report per micro-batch.

    ``forward_step_func(data_iterator, model)`` returns ``(output, loss_func)``. On the last stage ``loss_func(output)``
    returns one of two forms:

    - ``(loss, report)``: backward starts from loss x context-parallel size / num_microbatches (Megatron's rule:
      gradients are averaged over data- and context-parallel ranks).
    - ``(loss_sum, num_tokens, report)``: backward starts from loss_sum / num_tokens / num_microbatches. With
      ``config.calculate_per_token_loss`` it starts from loss_sum, and ``config.finalize_model_grads_func(model,
      num_tokens)`` receives the sum of tokens to divide by (0 on ranks without the last stage, as in Megatron).

    With interleaving ``model`` and ``data_iterator`` are lists with one entry per chunk. Models need
    the method ``set_input_tensor``. Other supported fields of ``config``: ``grad_scale_func``, ``no_sync_func``,
    ``variable_seq_lengths`` (the shape is sent before each message). The returned list is empty on ranks without the
    last stage.
    """
    # Refuse unsupported arguments.
    if decoder_seq_length not in (None, seq_length):
        raise ConfigError(
            f"decoder_seq_length={decoder_seq_length} differs from seq_length={seq_length}: not supported"
        )
    if adjust_tensor_shapes_fn is not None or p2p_communicator is not None:
        raise ConfigError("adjust_tensor_shapes_fn and p2p_communicator are not supported; remove them")
    # Run the plan of the current layout.
    iterators, chunks = (list(each) if isinstance(each, list | tuple) else [each] for each in (data_iterator, model))
    step = _Step(forward_step_func, iterators, chunks, num_microbatches, forward_only, collect_non_loss_data)
    return step.run(seq_length, micro_batch_size)


forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward


@cache
def _plan(ranks: int, chunks: int, num_microbatches: int, *, forward_only: bool) -> Plan:
    plan = (forward_only_plan if forward_only else interleaved)(ranks, chunks, num_microbatches)
    return check_plan(plan, num_microbatches, forward_only=forward_only)


@dataclass
class _Step:
    """One call of ``forward_backward``."""

    forward_step_func: ForwardStepFunction
    iterators: list[Any]
    chunks: list[Any]
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool

    def __post_init__(self) -> None:
        if len(self.iterators) != len(self.chunks):
            raise ConfigError(
                f"{len(self.iterators)} data iterators for {len(self.chunks)} model chunks; give one each"
            )
        self.groups = parallel_state.current()
        self.plan = _plan(
            self.groups.size("pp"), len(self.chunks), self.num_microbatches, forward_only=self.forward_only
        )
        # If a rank's stages have no parameters, torch's default device and dtype apply.
        like = next((p for chunk in self.chunks for p in chunk.parameters()), torch.empty(0))
        self.device, self.dtype = like.device, like.dtype
        self.tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        self.reports: list[Any] = []
        self.no_sync: dict[int, ExitStack] = {}

    def run(self, seq_length: int, micro_batch_size: int) -> list[Any]:
        """Run the plan and ``finalize_model_grads_func``; return the reports."""
        if not self.forward_only:
            self._suspend_sync()
            self._scale_auxiliary_losses()
        message = self._message(seq_length, micro_batch_size)
        p2p = PipelineP2P(self.groups)
        p2p.warm_up(self.device, self.plan.stage_to_rank)
        listener = Listener(on_last_backward=self._resume_sync)
        run_plan(PipelineRank(p2p=p2p, message=message), self.plan, self.forward, listener=listener)
        finalize = self._setting("finalize_model_grads_func")
        if finalize is not None and not self.forward_only:
            finalize(self.chunks, self.tokens if self._setting("calculate_per_token_loss") else None)
        return self.reports

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        """Run the forward of one stage and micro-batch."""
        chunk = stage // self.groups.size("pp")
        _unwrapped(self.chunks[chunk]).set_input_tensor(hidden)
        output, loss_func = self.forward_step_func(self.iterators[chunk], self.chunks[chunk])
        if stage < self.plan.num_stages - 1:
            return output
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        loss = self._loss(*loss_func(output))
        scale = self._setting("grad_scale_func")
        return loss if scale is None or self.forward_only else scale(loss)

    def _loss(self, loss: Tensor, *rest: Any) -> Tensor:
        """Normalise the loss according to the form of ``loss_func``'s result, and store its report."""
        self.reports.append(rest[-1])
        if len(rest) == 1:
            return loss * (self.groups.size("cp") / self.num_microbatches)
        tokens = torch.as_tensor(rest[0], device=self.device)
        self.tokens = self.tokens + tokens
        if self._setting("calculate_per_token_loss"):
            return loss
        return loss / tokens.clamp_min(1) / self.num_microbatches

    def _scale_auxiliary_losses(self) -> None:
        """Scale auxiliary losses of layers by the same factor as the main loss (``_loss`` and ``forward``)."""
        factor, scale = torch.ones((), dtype=torch.float64, device=self.device), self._setting("grad_scale_func")
        if not self._setting("calculate_per_token_loss"):
            factor = factor * (self.groups.size("cp") / self.num_microbatches)
        for model in (module for chunk in self.chunks for module in chunk.modules()):
            if hasattr(model, "auxiliary_loss_scale"):
                model.auxiliary_loss_scale = factor if scale is None else scale(factor)

    def _message(self, seq_length: int, micro_batch_size: int) -> MessageFormat:
        dtype = self._setting("pipeline_dtype") or self.dtype
        if self._setting("fp32_residual_connection"):
            dtype = wide(dtype)
        split = SequenceSplit.of(self.groups, sequence_parallel=bool(self._setting("sequence_parallel")))
        shape = (split.message_length(seq_length), micro_batch_size, self._setting("hidden_size"))
        return MessageFormat(shape, dtype, self.device, variable=bool(self._setting("variable_seq_lengths")))

    def _suspend_sync(self) -> None:
        """Enter the data-parallel wrapper's no-sync context for each chunk, until its last backward."""
        functions = self._setting("no_sync_func")
        if functions is None:
            return
        functions = functions if isinstance(functions, list | tuple) else [functions] * len(self.chunks)
        for chunk, function in enumerate(functions):
            self.no_sync[chunk] = ExitStack()
            self.no_sync[chunk].enter_context(function())

    def _resume_sync(self, stage: int) -> None:
        chunk = stage // self.groups.size("pp")
        if chunk in self.no_sync:
            self.no_sync.pop(chunk).close()

    def _setting(self, name: str) -> Any:
        """Return a field of the model's ``config``, or None if it has no such field."""
        return getattr(getattr(_unwrapped(self.chunks[0]), "config", None), name, None)


def _unwrapped(model: Any) -> Any:
    """Return the module inside wrappers such as ``DistributedDataParallel``."""
    while not hasattr(model, "set_input_tensor") and hasattr(model, "module"):
        model = model.module
    return model


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) of each forward of an interleaved schedule.

    Each group of micro-batches passes through all chunks before the next group starts.
    """
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
    """Return the numbers of forwards of this rank in Megatron Core's 1F1B schedules.

    They are: all forwards, whether all of them precede the first backward, the forwards before the first backward, and
    the forwards after it.
    """
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
    """Return a list with the shape of the messages between stages, or ``()`` for ``variable_seq_lengths``."""
    if config.variable_seq_lengths:
        return [()]
    cp = parallel_state.get_context_parallel_world_size() if cp_group is None else cp_group.size()
    tp = parallel_state.get_tensor_model_parallel_world_size() if tp_group is None else tp_group.size()
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // cp
    return [(length // (tp if config.sequence_parallel else 1), micro_batch_size, config.hidden_size)]


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the memory of an output that was sent, or of all outputs in a list or dict, but keep the autograd graph.

    ``custom_backward`` runs the backward of a freed output. Errors: LayoutError for a view, whose memory
    cannot be freed.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, dict | list):
        for each in out.values() if isinstance(out, dict) else out:
            deallocate_output_tensor(each, deallocate_pipeline_outputs)
        return
    if out._base is not None:
        raise LayoutError("deallocate_output_tensor: the output is a view of another tensor; pass a copy")
    out.data = torch.empty(1, dtype=out.dtype, device=out.device)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Run the backward of an output that ``deallocate_output_tensor`` has freed.

    ``Tensor.backward`` refuses a gradient of another shape than the output's.
    """
    if output.numel() != 1:
        raise LayoutError(
            f"custom_backward: the output has shape {tuple(output.shape)}; call deallocate_output_tensor first"
        )
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
