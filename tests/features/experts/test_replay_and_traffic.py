"""Replayed choices, and bytes sent between the ranks of experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_core.config import ModelConfig
from megatron_core.errors import LayoutError
from megatron_core.features.experts.replay import RouterReplay
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.step import train_step
from megatron_core.transformer.context import ForwardState
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

MODEL = {"num_experts": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True}


def _model(seed: int, **settings: object) -> GPTModel:
    config = ModelConfig(hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2, **MODEL, **settings)
    return GPTModel(config, 61, 16, seed=seed, parallel=ModelParallelConfig(params_dtype=torch.float64))


def test_another_model_repeats_the_choices_with_its_own_probabilities() -> None:
    ids, recompute = torch.randint(0, 61, (2, 16)), {"recompute_granularity": "full", "recompute_method": "uniform",
                                                     "recompute_num_layers": 1}  # fmt: skip
    first, other = _model(1), _model(2, **recompute)
    record, own = RouterReplay(), RouterReplay()
    first(ids, state=ForwardState(router_replay=record))
    other(ids, state=ForwardState(router_replay=own))
    assert record.choices.keys() == {0, 1} and record.choices[0].shape == (16, 2, 2)
    assert any(not torch.equal(own.choices[layer], record.choices[layer]) for layer in (0, 1))
    replay = RouterReplay(record.choices)
    loss = other(ids, labels=ids, state=ForwardState(router_replay=replay)).mean()
    assert all(torch.equal(replay.choices[layer], record.choices[layer]) for layer in (0, 1))
    loss.backward()
    assert all(layer.mlp.router.weight.grad.abs().max() > 1e-6 for layer in other.decoder.layers.values())
    again = RouterReplay(own.choices)
    torch.testing.assert_close(
        other(ids, state=ForwardState(router_replay=again)), other(ids)
    )  # its own choices are not used
    with pytest.raises(LayoutError, match=r"layer 0 chooses \[8, 2, 2\].* shape \[16, 2, 2\] was recorded"):
        other(ids[:, :8], state=ForwardState(router_replay=RouterReplay(record.choices)))


def _bytes_sent(settings: dict) -> tuple[int, int]:
    """Bytes of activation rows that this rank sends to others in a step, and the number of its micro-batches."""
    run, real, sent = tiny_run(**MODEL, moe_router_force_load_balancing=True, **settings), dist.all_to_all_single, []

    def counted(received, x, receive, send, group, async_op):
        if x.dim() == 2 and x.shape[1] >= run.config.model.hidden_size:
            mine = sum(send[: group.rank()]), sum(send[: group.rank() + 1])
            sent.append(x.nbytes - x[slice(*mine)].nbytes)
        return real(received, x, receive, send, group=group, async_op=async_op)

    dist.all_to_all_single = counted
    size = train_step(run).size
    return sum(sent), size.num_microbatches


@pytest.mark.parametrize(
    ("ep", "formats"),
    [(2, {}), (4, {}), (2, {"moe_dispatch_fwd_dtype": "mxfp8"}), (2, {"moe_combine_bwd_dtype": "mxfp8"})],
)
def test_bytes_of_the_all_to_all(ep: int, formats: dict) -> None:
    """T k h bytes (EP - 1) / EP for each of: dispatch and return, forward and backward, layers and micro-batches.

    With MXFP8 a row of 32 channels has 33 bytes instead of 64 in bfloat16."""
    tokens, k, hidden, layers = 2 * 16, 2, 32, 2
    found = run_ranks(ep, _bytes_sent, {"expert_model_parallel_size": ep, "bf16": True, **formats})
    rows = [33] * len(formats) + [2 * hidden] * (4 - len(formats))
    for sent, micros in found:
        assert sent == tokens * k * sum(rows) * (ep - 1) // ep * layers * micros
