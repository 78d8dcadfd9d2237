"""Bytes sent and pairs computed in training equal the formulas, and reproduce published figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.features.context_parallelism import attention, exchange
from megatron_core.parallel import collectives
from megatron_core.parallel.groups import Group
from megatron_core.planner.context import attention_flops, layer_pairs, layer_traffic, traffic
from megatron_core.reports.meter import METER
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, this_world
from tests.parity.context_rows import CP4, GATHER, HEADS, NESTED
from tests.parity.recurrent_rows import DELTA
from tests.parity.rows import BASE, GQA1, GQA2, SDPA, WINDOW

SETTINGS = BASE | SDPA | {"num_layers": 2, "global_batch_size": 1, "micro_batch_size": 1}


def _nbytes(x: Tensor) -> float:
    return x.numel() * x.element_size()


def _counted(settings: dict) -> tuple[float, int]:
    """One step of one micro-batch: bytes that this rank sends for attention, and pairs of its tiles."""
    sent, pairs = [0.0], [0]

    def counting(module: Any, name: str, size: Callable[[Tensor, int], float]) -> None:
        plain = getattr(module, name)

        def count(x: Tensor, group: Group, *args: Any) -> Any:
            sent[0] += size(x, group.size()) if group.size() > 1 else 0.0
            return plain(x, group, *args)

        setattr(module, name, count)

    counting(exchange, "start_ring_shift", lambda x, size: _nbytes(x))
    counting(exchange, "start_gather_sequence", lambda x, size: _nbytes(x) * (size - 1))
    counting(exchange, "start_reduce_scatter_sequence", lambda x, size: _nbytes(x) * (size - 1) / size)
    counting(collectives, "_all_to_all", lambda x, size: _nbytes(x) * (size - 1) / size)
    collectives.COLLECTIVES["all_to_all"] = collectives._all_to_all
    plain = attention.tiles

    def tiles(*given: Any) -> Any:
        pairs[0] += sum(tile.pairs for tile in plain(*given))
        return plain(*given)

    attention.tiles = tiles
    train_step(set_up(RunConfig.from_flat(SETTINGS | settings), this_world()))
    return sent[0], pairs[0]


@pytest.mark.parametrize(
    "settings",
    [CP4 | GQA2 | WINDOW, CP4 | GATHER | {"fp64": False}, CP4 | HEADS | GQA1, CP4 | NESTED | GQA1 | {"fp64": False}],
    ids=["p2p", "all_gather", "a2a", "a2a+p2p"],
)
def test_bytes_and_work_are_those_of_the_formulas(settings: dict) -> None:
    config = RunConfig.from_flat(SETTINGS | settings)
    expected = traffic(config, range(2))
    for rank, (sent, pairs) in enumerate(run_ranks(4, _counted, settings)):
        assert sent == expected.forward + expected.backward
        if settings.get("cp_comm_type") != ("a2a",):  # its attention is that of one process
            heads = config.parallel.a2a_size
            # Once forward, once backward.
            assert pairs == 2 * heads * sum(layer_pairs(config, layer, rank) for layer in range(2))


def _gathered(settings: dict) -> float:
    """Bytes that a rank sends to gather the states of recurrent layers and scatter their gradients, in one step."""
    run = set_up(RunConfig.from_flat(SETTINGS | settings), this_world())
    METER.start(run.groups, run.world.device)
    train_step(run)
    found = METER.take().traffic
    METER.stop()
    return sum(each.bytes for name, each in found.items() if name in ("cp all_gather", "cp reduce_scatter"))


def test_bytes_of_states_do_not_depend_on_the_length() -> None:
    sent = set()
    for length in (32, 64):
        settings = CP4 | DELTA | {"linear_attention_freq": (1, 1), "global_batch_size": 1, "seq_length": length}
        expected = traffic(RunConfig.from_flat(SETTINGS | settings), range(2))
        assert run_ranks(4, _gathered, settings) == [expected.forward + expected.backward] * 4
        sent.add(expected)
    assert len(sent) == 1


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_work_is_the_same_on_every_rank(size: int) -> None:
    config = RunConfig.from_flat({"seq_length": 131072, "context_parallel_size": size})
    work = [attention_flops(config, range(2), rank) for rank in range(size)]
    assert max(work) * size / sum(work) == 1.0
    alone = replace(config, parallel=replace(config.parallel, context_parallel_size=1))
    assert sum(work) == attention_flops(alone, range(2), 0)


def _llama3_8b(**layout: Any) -> RunConfig:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "group_query_attention": True}
    return RunConfig.from_flat(sizes | {"num_layers": 32, "bf16": True, "micro_batch_size": 1} | layout)


def test_by_hand() -> None:
    """Llama 3 8B in bf16, 32,768 tokens over 4 ranks: 8,192 tokens, 1,024 channels of keys, as many of values."""
    block = 8192 * 2 * 1024
    config = _llama3_8b(seq_length=32768, context_parallel_size=4)
    ring = layer_traffic(config, 0)
    assert (ring.forward, ring.backward) == (3 * block * 2, 3 * block * 2 + 4 * block * 4)
    heads = layer_traffic(_llama3_8b(seq_length=32768, **CP4, **HEADS), 0)
    assert heads.forward == heads.backward == 3 / 4 * (2 * 4096 + 2 * 1024) * 8192 * 2


def test_exchanged_heads_send_less_the_more_ranks_there_are() -> None:
    """Jacobs et al. 2023: at a given number of tokens a rank, exchanged heads send a constant number of bytes (4 s h /
    P elements), the sequence parallelism of that time, which gathers whole sequences, P times as many: more than 10 x
    on 64 ranks."""
    sent = {
        size: layer_traffic(
            RunConfig.from_flat(
                {
                    "hidden_size": 8192,
                    "num_attention_heads": 64,
                    "seq_length": 4096 * size,
                    "context_parallel_size": size,
                    "bf16": True,
                    **HEADS,
                }
            ),
            0,
        ).forward
        for size in (2, 16, 64)
    }
    for size, forward in sent.items():
        assert forward == 4 * 4096 * 8192 * 2 * (size - 1) / size
        gathered = 2 * (size - 1) * 4096 * 8192 * 2  # an all-gather and a reduce-scatter of s x h
        assert gathered / forward == size / 2
    assert sent[64] / sent[2] < 2


def test_a_ring_is_hidden_behind_long_parts() -> None:
    """Liu et al. 2023, section 3: computing with a block takes as long as its successor's way where a rank has as many
    tokens as it does FLOPs for each byte that it can send: 312 TFLOP/s over 300 GB/s ask for 1,040 tokens."""
    for tokens in (256, 1040, 8192):
        config = RunConfig.from_flat(
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "seq_length": 8 * tokens,
                "context_parallel_size": 8,
                "bf16": True,
                "num_layers": 1,
            }
        )
        # A step of a ring without causal mask: 4 d c^2 FLOPs a head, 4 d c bytes.
        flops = 4 * 4096 * tokens**2
        step = layer_traffic(config, 0).forward / 7
        assert step == 4 * 4096 * tokens
        assert (flops / 312e12 >= step / 300e9) == (tokens >= 1040)
        assert attention_flops(config, [0], 0) == pytest.approx(8 * flops / 2, rel=2 / tokens)  # the mask spares half
