"""CUDA graphs of layers on the simulated GPU: losses, norms and weights of the CPU; reuse of slots and memory."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.features.cuda_graphs import graphs as cuda_graphs
from megatron_core.parallel import World
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.reports.meter import METER
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.defects.plant import planted
from tests.parity import rows
from tests.parity.context_rows import CP2, GATHER, HEADS
from tests.parity.moe_rows import EP2, ETP1, MIXTRAL
from tests.parity.rows import GQA2, MODERN, PP2, SDPA, SP, TP2, V2, ZERO
from tests.runs import tiny_config, tiny_run
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.features import BASE, BF16, OVERLAP
from tests.simulated_gpu.runtime import simulated_gpu
from tests.simulated_gpu.test_training import train

GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
ATTENTION, HALVES = {"cuda_graph_modules": ("attn",)}, {"cuda_graph_modules": ("attn", "mlp")}
FOUR = {"global_batch_size": 8, "num_layers": 4}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}


def captured(settings: dict[str, Any], graphs: dict[str, Any]) -> tuple[float, list[int]]:
    """The largest relative difference from the CPU, the captured pairs of graphs by layer, and the replays."""
    expected, counts = train(settings), []

    def counted(*given: Any, real: Any = cuda_graphs.CallGraph.__init__) -> None:
        counts.append(1)
        real(*given)

    with simulated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs.CallGraph, "__init__", counted)
        found = train(settings | graphs)
        replays = LOG.replays
    bound = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, expected, strict=True))
    return bound if bound == bound else float("inf"), [len(counts), replays]


ONE_RANK: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    # 2 layers; the first step has no graphs, and the 2 micro-batches of the second one replay forward and backward.
    "dense": ({}, GRAPHS, [2, 2 * 2 * 2]),
    "halves": (MODERN | GQA2 | BF16 | SDPA, GRAPHS | HALVES, [4, 4 * 2 * 2]),
    "recomputed": (SELECTIVE | MODERN | {"parallel_residual": True}, GRAPHS | HALVES, [4, 4 * 2 * 2]),
    "experts": (MIXTRAL, GRAPHS | ATTENTION, [2, 2 * 2 * 2]),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ONE_RANK)
def test_graphs_compute_what_the_cpu_computes(name: str) -> None:
    model, graphs, counts = ONE_RANK[name]
    [(difference, found)] = run_ranks(1, captured, model, graphs)
    assert difference < 1e-4
    assert found == counts


TWO_RANKS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    # Micro-batches in flight: 2 on the first rank, 1 on the second; 2 layers each.
    "pp2": (PP2 | FOUR, [[4, 2 * 4 * 2], [2, 2 * 4 * 2]]),
    "dp2 zero1, overlap": (ZERO | OVERLAP, [[2, 2 * 1 * 2], [2, 2 * 1 * 2]]),
    "pp2, 2 chunks": (PP2 | V2 | FOUR | rows.OVERLAP, [[4 + 2, 2 * 4 * 2], [2 + 2, 2 * 4 * 2]]),
    "dp2 ep2": (EP2 | MIXTRAL, [[2, 2 * 1 * 2], [2, 2 * 1 * 2]]),
    "tp2": (TP2 | DROPOUT, [[2, 2 * 2 * 2]] * 2),
    "tp2 sp": (TP2 | SP | MODERN | GQA2 | SELECTIVE, [[2, 2 * 2 * 2]] * 2),
    "tp2 ep2": (TP2 | SP | EP2 | ETP1 | MIXTRAL, [[2, 2 * 2 * 2]] * 2),
    "cp2 gathered": (CP2 | GATHER | MODERN, [[2, 2 * 2 * 2]] * 2),
    "cp2 heads": (CP2 | HEADS | MODERN, [[2, 2 * 2 * 2]] * 2),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_graphs_in_layouts(name: str) -> None:
    layout, counts = TWO_RANKS[name]
    graphs = GRAPHS | (ATTENTION if "num_experts" in layout else {})
    found = run_ranks(2, captured, layout, graphs)
    assert max(difference for difference, _ in found) < 1e-4
    assert [count for _, count in found] == counts


def messages(settings: dict[str, Any]) -> tuple[dict[str, tuple[int, float]], dict[str, int]]:
    """Calls and bytes of the collectives of three steps by name, and the recorded calls by channel."""
    with simulated_gpu():
        world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cuda", 0))
        run = set_up(RunConfig.from_flat(BASE | settings), world)
        METER.start(run.groups, world.device)
        for _ in range(3):
            train_step(run)
        traffic = METER.take().traffic
        METER.stop()
    counts = dict(RECORDER.counts)
    return {name: (each.calls, each.bytes) for name, each in traffic.items()}, counts


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", [TP2 | SP, CP2 | HEADS], ids=["tp2 sp", "cp2 heads"])
def test_messages_of_graphs_are_counted(layout: dict[str, Any]) -> None:
    for found, expected in zip(run_ranks(2, messages, layout | GRAPHS), run_ranks(2, messages, layout), strict=True):
        assert found == expected and sum(calls for calls, _ in found[0].values()) > 50


def planted_messages(place: str, old: str, new: str, settings: dict[str, Any]) -> Any:
    with planted(place, old, new):
        return messages(settings)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [("METER.sent(name, size)", "pass"), ("RECORDER.repeat(self._calls)", "pass")],
    ids=["traffic", "recorder"],
)
def test_finds_messages_that_are_not_counted(old: str, new: str) -> None:
    place, layout = "features.cuda_graphs.graphs:_Graph.replay", TP2 | SP
    assert run_ranks(2, planted_messages, place, old, new, layout | GRAPHS) != run_ranks(2, messages, layout)


def planted_difference(place: str, old: str, new: str, settings: dict[str, Any], graphs: dict[str, Any]) -> float:
    with planted(place, old, new):
        return captured(settings, graphs)[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        ("features.cuda_graphs.graphs:CallGraph.capture_backward", "retain_graph=True", "retain_graph=False"),
        ("features.cuda_graphs.graphs:CallGraph.capture_backward", "total.add_(grad)", "total.copy_(grad)"),
        ("features.cuda_graphs.graphs:CallGraph.run_forward", "_load(mine, theirs)", "pass"),
        ("features.cuda_graphs.graphs:Slot.load", "mine.copy_(theirs)", "pass"),
        (
            "features.cuda_graphs.graphs:StageGraphs.slot_of",
            "self._free.pop(0) if self._free",
            "self._slots[0] if self._slots",
        ),
        ("features.cuda_graphs.graphs:Slot.__init__", "torch.cuda.graph_pool_handle()", "(0, 1)"),
        ("transformer.context:SequenceContext.add_auxiliary_loss", "is not None", "is None"),
    ],
    ids=["freed early", "overwritten gradients", "old input", "old samples", "slot in use", "shared pool", "none"],
)
def test_finds(place: str, old: str, new: str) -> None:
    """Dropout depends on the numbers of the samples; two ranks have two micro-batches in flight."""
    healthy = place.startswith("transformer.context")
    try:
        found = run_ranks(2, planted_difference, place, old, new, PP2 | FOUR, GRAPHS)
    except RankFailure as failure:
        assert not healthy and ("IndexError" in str(failure) or "inplace" in str(failure)), failure
    else:
        assert (max(found) < 1e-4) == healthy


def device_wide_waits(settings: dict[str, Any], plant: tuple[str, str, str] | None) -> dict[str, int]:
    """Device-wide waits of three steps, by line."""
    with planted(*plant) if plant else nullcontext(), simulated_gpu():
        world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cuda", 0))
        run = set_up(RunConfig.from_flat(BASE | PP2 | FOUR | {"global_batch_size": 16} | settings), world)
        LOG.stalls.clear()
        for _ in range(3):
            train_step(run)
        return {line: number for line, number in LOG.stalls.items() if line.endswith(" device")}


def test_all_graphs_are_captured_after_one_wait_between_steps() -> None:
    """A wait for the device within the schedule would include receives that both neighbours have posted ahead."""
    for settings in ({}, V2 | rows.OVERLAP):
        for waits in run_ranks(2, device_wide_waits, GRAPHS | settings, None):
            assert list(waits.values()) == [1] and "cuda_graphs" in next(iter(waits))


PLACE, SWITCH = "pipeline_parallel.executor:Executor.run_action", "METER.switch(PHASES[action.kind], action)"


@pytest.mark.every_case
@pytest.mark.parametrize("wait", ["synchronize", "empty_cache"])
def test_finds_a_device_wide_wait_in_a_schedule(wait: str) -> None:
    with pytest.raises(RankFailure, match="DEADLOCK"):
        run_ranks(2, device_wide_waits, {}, (PLACE, SWITCH, f"{SWITCH}; __import__('torch').cuda.{wait}()"))


def test_no_other_code_waits_for_the_whole_device() -> None:
    """Measurements at the start do, captures between steps, an offload of a trainer, and a recovery whose communicators
    are aborted."""
    package = Path(cuda_graphs.__file__).parents[2]
    wait = re.compile(r"cuda\.(synchronize|empty_cache|ipc_collect)\(|cudaDeviceSynchronize|cudaFree\b")
    sources = (path for path in package.rglob("*.py") if "drop_in" not in path.parts)
    waiting = {str(path.relative_to(package)) for path in sources if wait.search(path.read_text())}
    allowed = {"features/cuda_graphs/graphs.py", "reports/reference_rate.py", "resilience/gpu_groups.py"}
    assert waiting == allowed | {"features/offload/state.py"}
    kernels = [path for path in (package.parent / "csrc" / "cuda").iterdir() if path.suffix in (".cu", ".cuh")]
    assert kernels and not [path for path in kernels if wait.search(path.read_text())]


def test_the_first_step_posts_no_receive_ahead() -> None:
    """Kernels are loaded, and memory and communicators allocated, in the first step; each may wait for the device."""
    wait = f"{SWITCH}; self.p2p.has_run or __import__('torch').cuda.synchronize()"
    for waits in run_ranks(2, device_wide_waits, rows.OVERLAP, (PLACE, SWITCH, wait)):
        assert list(waits.values()) == [2 * 8]
    ahead = "pipeline_parallel.executor:Executor.__init__", "0 if is_first_on_gpu else lookahead", "lookahead"
    with planted(*ahead), pytest.raises(RankFailure, match="DEADLOCK"):
        run_ranks(2, device_wide_waits, rows.OVERLAP, (PLACE, SWITCH, wait))


def test_a_wait_of_the_host_cannot_be_captured() -> None:
    place, old = "transformer.block:TransformerLayer.attention_output", "normed = self.input_layernorm(hidden)"
    with pytest.raises(RankFailure, match="not permitted when the stream is capturing"):
        run_ranks(1, planted_difference, place, old, f"{old}; normed.sum().item()", {}, GRAPHS)


def test_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="cuda_graph_impl=local needs a GPU, and this run is on cpu; remove"):
        tiny_run(cuda_graph_impl="local")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"zero_stage": 2}, "zero_stage=2"),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"}, "pipeline_schedule=zb_h1"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "recompute_gran"),
        ({"compile": True}, "--compile"),
        ({"context_parallel_size": 2}, "cp_comm_type=p2p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_captured_is_refused(settings: dict[str, Any], fault: str) -> None:
    assert not any("cuda_graph" in each for each in problems(tiny_config(**GRAPHS | TP2), 2))
    assert not list(problems(tiny_config(cuda_graph_impl="local", cuda_graph_warmup_steps=0, **TP2), 2))
    found = list(problems(tiny_config(cuda_graph_impl="local", **settings), 2))
    assert any("cuda_graph_impl=local cannot be used with" in each and fault in each for each in found), found
