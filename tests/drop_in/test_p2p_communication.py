"""Messages between stages under Megatron Core's names, and a user-defined schedule of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import p2p_communication as p2p
from megatron.core.pipeline_parallel import schedules, utils
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.verify.ranks import run_ranks

SHAPE = (3, 2, 4)


def settings(**changes: Any) -> Any:
    given = {"pipeline_dtype": torch.float64, "variable_seq_lengths": False}
    return SimpleNamespace(virtual_pipeline_model_parallel_size=None, **given | changes)


def layers() -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]


def inputs(variable: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(3 + i * variable, 2, 4, dtype=torch.float64, generator=draw) for i in range(4)]


def by_functions(ranks: int, variable: bool) -> Tensor:
    """The weight gradient of this rank's layer from a forward and a backward of each micro-batch."""
    parallel_state.initialize_model_parallel(1, ranks)
    config, layer = settings(variable_seq_lengths=variable), layers()[torch.distributed.get_rank()]
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    for x in inputs(variable):
        shape = [()] if variable else SHAPE  # as returned by get_tensor_shapes
        received = p2p.recv_forward(shape, config)
        received = received[0] if variable else received
        source = x if first else received
        output = layer(source).tanh()
        p2p.send_forward(output, config)
        grad = p2p.recv_backward(shape, config)
        grad = grad[0] if variable else grad
        (output.square().sum() if last else (output * grad).sum()).backward()
        p2p.send_backward(source.grad, config)
    return layer.weight.grad


def by_communicator(ranks: int) -> Tensor:
    """The same with the methods that send and receive in one call."""
    parallel_state.initialize_model_parallel(1, ranks)
    layer = layers()[torch.distributed.get_rank()]
    pipeline = p2p.P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), settings())
    first, last = pipeline.is_pp_first_stage, pipeline.is_pp_last_stage
    received = pipeline.recv_forward(SHAPE, first)
    for micro, x in enumerate(inputs(variable=False)):
        source = x if first else received
        output = layer(source).tanh()
        (grad,) = pipeline.send_forward_recv_backward([output], [SHAPE], last)
        (output.square().sum() if last else (output * grad).sum()).backward()
        if micro < 3:
            received = pipeline.send_backward_recv_forward(source.grad, SHAPE, first)
        else:
            pipeline.send_backward(source.grad, first)
    return layer.weight.grad


@pytest.mark.parametrize(("ranks", "variable"), [(2, False), (2, True), (3, True)])
def test_a_pipeline_of_a_callers_own(ranks: int, variable: bool) -> None:
    own = layers()[:ranks]
    for x in inputs(variable):
        for layer in own:
            x = layer(x).tanh()
        x.square().sum().backward()
    found = [run_ranks(ranks, by_functions, ranks, variable)]
    found += [] if variable else [run_ranks(ranks, by_communicator, ranks)]
    for gradients in found:
        for ours, layer in zip(gradients, own, strict=True):
            torch.testing.assert_close(ours, layer.weight.grad, rtol=0, atol=1e-12)


def in_a_ring(ranks: int) -> None:
    """Both directions at once between all neighbours, including the last and the first stage."""
    parallel_state.initialize_model_parallel(1, ranks)
    rank, config = torch.distributed.get_rank(), settings()
    up, down = torch.full(SHAPE, 10.0 + rank).double(), torch.full(SHAPE, 20.0 + rank).double()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    from_before, from_after = p2p.send_forward_backward_recv_forward_backward(up, down, True, True, SHAPE, config)
    assert (from_before.unique().item(), from_after.unique().item()) == (10.0 + before, 20.0 + after)
    assert from_before.requires_grad
    assert p2p.send_forward_recv_forward(up, True, SHAPE, config).unique().item() == 10.0 + before
    found, handles = p2p.send_backward_recv_backward(down, True, SHAPE, config, overlap_p2p_comm=True)
    for handle in handles:
        handle.wait()
    assert found.unique().item() == 20.0 + after
    with pytest.raises(ConfigError, match="tensor_shape=None: give the shape"):
        p2p.P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config).recv_forward(None, False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_in_a_ring(ranks: int) -> None:
    run_ranks(ranks, in_a_ring, ranks)


def split_pipeline() -> list[bool]:
    parallel_state.initialize_model_parallel(1, 4)
    functions = (
        parallel_state.is_pipeline_stage_before_split,
        parallel_state.is_pipeline_stage_after_split,
        parallel_state.is_pipeline_stage_at_split,
    )
    assert all(each() for each in functions)
    parallel_state.set_pipeline_model_parallel_split_rank(2)
    return [each() for each in functions]


def test_stages_of_encoder_and_decoder() -> None:
    expected = [[True, False, False], [True, False, True], [False, True, False], [False, True, False]]
    assert run_ranks(4, split_pipeline) == expected


def test_memory_is_reused_by_name() -> None:
    memory = parallel_state.get_global_memory_buffer()
    large = memory.get_tensor((3, 4), torch.float32, "a")
    small = memory.get_tensor([2, 2], torch.float32, "a")
    assert (large.shape, small.shape) == ((3, 4), (2, 2))
    assert large.data_ptr() == small.data_ptr()
    others = [memory.get_tensor((2,), dtype, name) for dtype, name in ((torch.int64, "a"), (torch.float32, "b"))]
    assert all(other.data_ptr() != large.data_ptr() for other in others)
    parallel_state.destroy_global_memory_buffer()
    assert not memory.buffer


def test_schedules_as_tables() -> None:
    """The rows are those of Megatron Core's documentation of interleaving."""
    assert schedules.get_schedule_table(4, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert schedules.get_schedule_table(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    stage = SimpleNamespace(current_stage=1, total_stages=4, virtual_pipeline_model_parallel_size=None)
    assert schedules.get_pp_rank_microbatches(8, 1, 4, p2p_communicator=stage) == (8, False, 2, 6)
    assert schedules.get_pp_rank_microbatches(8, 1, 4, forward_only=True, p2p_communicator=stage) == (8, True, 8, 0)
    stage.virtual_pipeline_model_parallel_size = 2  # (4 - 1 - 1) * 2 + (2 - 1) * 4
    assert schedules.get_pp_rank_microbatches(8, 2, 4, p2p_communicator=stage) == (16, False, 8, 8)
    group = SimpleNamespace(size=lambda: 2)
    config = SimpleNamespace(variable_seq_lengths=False, sequence_parallel=True, hidden_size=6)
    given = {"seq_length": 16, "micro_batch_size": 3, "tp_group": group, "cp_group": group}
    assert schedules.get_tensor_shapes(**given, config=config) == [(4, 3, 6)]
    config.variable_seq_lengths = True
    assert schedules.get_tensor_shapes(**given, config=config) == [()]


def test_backward_of_an_output_without_memory() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    output = x.square() * 1.0
    schedules.deallocate_output_tensor([{"a": output}], deallocate_pipeline_outputs=True)
    assert output.numel() == 1
    schedules.custom_backward(output, torch.full((5, 4), 3.0))
    torch.testing.assert_close(x.grad, 6.0 * x.detach())
    with pytest.raises(LayoutError, match="is a view"):
        schedules.deallocate_output_tensor(x[1:], True)
    with pytest.raises(LayoutError, match=r"shape \(5, 4\); call deallocate_output_tensor first"):
        schedules.custom_backward(x * 1.0, None)


def neighbours() -> list[int]:
    parallel_state.initialize_model_parallel(1, 3)
    group = parallel_state.get_pipeline_model_parallel_group()
    functions = (utils.get_pp_first_rank, utils.get_pp_last_rank, utils.get_pp_next_rank, utils.get_pp_prev_rank)
    return [each(group) for each in functions]


def test_ranks_of_stages() -> None:
    assert run_ranks(3, neighbours) == [[0, 2, 1, 2], [0, 2, 2, 0], [0, 2, 0, 1]]


def test_attributes_of_split_parameters() -> None:
    split, other, whole = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    tensor_parallel.set_tensor_model_parallel_attributes(split, True, 0, 1)
    tensor_parallel.copy_tensor_model_parallel_attributes(other, split)
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(whole)
    found = [(p.tensor_model_parallel, p.partition_dim, p.partition_stride) for p in (split, other, whole)]
    assert found == [(True, 0, 1), (True, 0, 1), (False, -1, 1)]
    second = SimpleNamespace(rank=lambda: 1)
    counts = tensor_parallel.param_is_not_tensor_parallel_duplicate
    assert [counts(p, second) for p in (split, whole)] == [True, False]
    assert counts(whole)
    whole.allreduce = False
    assert not counts(whole, None, second)
    with pytest.raises(LayoutError, match="set these attributes once"):
        tensor_parallel.set_tensor_model_parallel_attributes(split, True, 0, 1)
