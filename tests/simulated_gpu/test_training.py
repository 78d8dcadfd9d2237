"""Training on a simulated GPU gives the CPU's numbers, and no operation mixes tensors of both devices."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.inference import Generator, Request, Sampling, generate
from megatron_core.parallel import World
from megatron_core.reports.meter import METER
from megatron_core.training import pretrain
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.defects.plant import planted
from tests.ops import libraries
from tests.parity.context_rows import CP2
from tests.parity.moe_rows import ALL_GATHER, DROP, EP2, MIXTRAL, PADDED
from tests.parity.recurrent_rows import MAMBA
from tests.parity.rows import GQA2, MODERN, PACKED, PP2, SP, TP2, ZERO, ZERO2
from tests.sample import WHOLE_MATRIX
from tests.simulated_gpu import streams
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.features import BASE, BF16, OFFLOAD, ON_DISK, ONE_RANK, OVERLAP, TWO_RANKS
from tests.simulated_gpu.runtime import simulated_gpu

NATIVE = {"kernel_backend": "native"}


@pytest.fixture(autouse=True)
def new_memory_is_not_filled() -> None:
    """The simulation takes memory that torch's deterministic mode fills for memory that the program has changed."""
    torch.use_deterministic_algorithms(False)


def drawn(names: list[str], part: int) -> list[str]:
    """All names in the whole matrix, else one of ``part``."""
    return names if WHOLE_MATRIX else [name for name in names if crc32(name.encode()) % part == 1]


def train(settings: dict) -> list[float]:
    """Losses and gradient norms of two steps, the validation loss, and one number per weight."""
    parallel_state.destroy_model_parallel()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", *[0] * torch.cuda.is_available())
    world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=device)
    run, found = set_up(RunConfig.from_flat(BASE | settings), world), []
    LOG.stalls.clear()
    for _ in range(2):
        result = train_step(run)
        found += [result.loss, result.grad_norm, *result.auxiliary_losses.values()]
    waits = {line: number for line, number in LOG.stalls.items() if line.startswith("megatron_core")}
    found.append(evaluate(run, run.splits.train, 1))
    for stage in run.stages.values():
        found += [
            weight.detach().double().sum().item() for weight in run.data_parallel.reading(list(stage.parameters()))
        ]
    LOG.stalls.clear()
    LOG.stalls.update(waits)
    return found


def compare(every: list[dict]) -> None:
    """Each run on the CPU and on the simulated GPU."""
    for settings in every:
        expected = train(settings)
        with simulated_gpu():
            found = train(settings)
        # Scales of tensors are not powers of two: the last bit of a product may change a rounding to FP8.
        rounded = settings.get("fp8_recipe") in ("tensorwise", "delayed")
        rounded |= (
            settings.get("kernel_backend") == "native"
        )  # sums over rows have as many parts as the GPU has multiprocessors
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-3 if rounded else 1e-7, nan_ok=True), settings


@pytest.mark.drawn(1)
@pytest.mark.parametrize("feature", drawn(list(ONE_RANK), 2))
def test_one_rank(feature: str) -> None:
    run_ranks(1, compare, ONE_RANK[feature])


def test_weights_on_disk_and_in_host_memory(tmp_path: Path) -> None:
    every = [each | {"zero_stage": 3, "zero3_param_offload_dir": str(tmp_path)} for each in ON_DISK]
    in_memory = {**ON_DISK[0], "zero_stage": 3, "zero3_param_cpu_offload": True}
    run_ranks(1, compare, [*every, in_memory] if WHOLE_MATRIX else [*every[:3], in_memory])


@pytest.mark.parametrize("layout", drawn(list(TWO_RANKS), 3))
def test_two_ranks(layout: str) -> None:
    run_ranks(2, compare, [TWO_RANKS[layout]])


def test_kernels_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native GPU kernels, compiled for the CPU, called as on a GPU."""
    libraries.use(libraries.host_cuda, monkeypatch)
    every = [NATIVE | BF16 | MODERN | GQA2, NATIVE | PACKED, NATIVE | MIXTRAL | BF16]
    run_ranks(1, compare, every if WHOLE_MATRIX else every[:1], timeout=600.0)


def losses_and_norms(settings: dict) -> list[float]:
    with simulated_gpu():
        return train(settings | {"layout_invariant": True})[:4]


@pytest.mark.drawn(0)
def test_equal_bits_in_each_layout() -> None:
    """With --layout-invariant the losses and norms of two steps are those of one rank, to the bit."""
    layouts = [(1, {"micro_batch_size": 4}), (2, TP2 | SP), (2, ZERO2)]
    chosen = layouts if WHOLE_MATRIX else layouts[1:2]
    expected = run_ranks(1, losses_and_norms, {"num_layers": 1}, timeout=600.0)
    for ranks, layout in chosen:
        found = run_ranks(ranks, losses_and_norms, layout | {"num_layers": 1}, timeout=600.0)
        assert found == expected * ranks, layout


def waits(settings: dict) -> int:
    with simulated_gpu():
        train(settings)
        return sum(LOG.stalls.values())


def test_a_step_waits_once() -> None:
    """For loss and norm. Each additional wait would stall a whole pipeline of launched kernels."""
    assert run_ranks(1, waits, {}) == [2]


def waits_of_program(settings: dict, folder: str) -> tuple[dict[str, int], list[int]]:
    """Waits in steps 4 and 5 of a program with all callbacks, by line; numbers of events with times by step."""
    parallel_state.destroy_model_parallel()
    module = sys.modules["megatron_core.training.pretrain"]
    events: list[int] = []
    at_start: list[Counter] = []

    class Steps(Callback):
        def before_step(self) -> None:
            at_start.append(Counter(LOG.stalls))
            events.append(0)

    def recorded(self, *given, real=streams.Event.record) -> None:
        if events and self.timed:
            events[-1] += 1
        real(self, *given)

    world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cuda", 0))
    common = BASE | {"train_iters": 6, "eval_iters": 0, "peak_tflops": 1.0, "log_interval": 100}
    common |= {"metrics_file": f"{folder}/metrics.jsonl"}
    joined = patch.object(module, "start_world", lambda *_, **__: None)  # ``run_ranks`` has joined the ranks
    with simulated_gpu(), joined, patch.object(streams.Event, "record", recorded):
        pretrain(RunConfig.from_flat(common | settings), world, callbacks=[Steps()])
    return dict(at_start[5] - at_start[3]), events


WAITING_ONCE: dict[str, tuple[int, dict]] = {
    "one rank": (1, {}),
    "packed, masks": (1, PACKED | {"attention_backend": "unfused"}),
    "packed, recurrent": (1, MAMBA | PACKED),
    "later tokens": (1, {"mtp_num_layers": 1, "position_embedding_type": "rope"}),
    "cp2, packed": (2, CP2 | PACKED),
    "fp8": (1, BF16 | {"fp8_format": "hybrid", "fp8_recipe": "delayed"}),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("settings", WAITING_ONCE)
def test_a_program_waits_once_for_each_step(settings: str, tmp_path: Path) -> None:
    """The meter reads the events of the interval before: reading the last event would wait for the update. Positions
    and masks of the host are copied from pinned memory."""
    ranks, layout = WAITING_ONCE[settings]
    for found, _ in run_ranks(ranks, waits_of_program, layout, str(tmp_path)):
        assert list(found.values()) == [2] and "driver.py" in next(iter(found))


def test_collectives_have_events_in_sampled_steps_only(tmp_path: Path) -> None:
    settings = TP2 | SP | {"num_layers": 4}
    _, events = run_ranks(2, waits_of_program, settings, str(tmp_path))[0]
    assert max(events[3:]) < 60 < events[1] / 3, "most events of a sampled step are those of collectives"
    lines = [json.loads(line) for line in (tmp_path / "metrics.ranks" / "rank00000.jsonl").read_text().splitlines()]
    for line in (each for each in lines if each["kind"] == "times"):
        exposed = {name: traffic["exposed"] for name, traffic in line["traffic"].items()}
        assert sum(line["phases"].values()) + sum(exposed.values()) == pytest.approx(line["seconds"], rel=1e-2)
        assert min(line["phases"].values()) >= 0.0
        assert any("tp" in name and seconds > 0.0 for name, seconds in exposed.items()), "estimated between samples"


def test_experts_with_biases_wait_no_more() -> None:
    biased = EP2 | MIXTRAL | {"disable_bias_linear": False}
    assert run_ranks(2, waits, biased) == [2 * 2 + 2] * 2


DISPATCHERS: dict[str, tuple[dict, int, int]] = {
    "all-to-all": (MIXTRAL, 1, 0),
    "all-to-all, dropped": (MIXTRAL | DROP, 1, 0),
    "all-to-all, padded": (MIXTRAL | PADDED, 0, 0),
    "all-gather": (MIXTRAL | ALL_GATHER, 1, 1),
    "all-gather, padded": (MIXTRAL | ALL_GATHER | PADDED, 0, 1),
}
"""Waits in each layer, for the numbers of rows unless they are padded, and in each micro-batch, for the largest number
of tokens of a rank."""


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_waits_of_dispatchers(dispatcher: str) -> None:
    """Of 2 layers with one micro-batch in each of 2 steps, besides the wait of each step."""
    settings, of_layer, of_micro_batch = DISPATCHERS[dispatcher]
    assert run_ranks(2, waits, EP2 | settings) == [2 * (2 * of_layer + of_micro_batch) + 2] * 2


def streams_of_times(plant: tuple[str, str, str] | None) -> tuple[bool, int]:
    """Whether all times of a step with experts are recorded in the stream of the computation, and the exchanges."""
    with planted(*plant) if plant else nullcontext(), simulated_gpu():
        world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cuda", 0))
        run = set_up(RunConfig.from_flat(BASE | EP2 | MIXTRAL), world)
        METER.start(run.groups, world.device)
        train_step(run)
        is_one = all(event.stream is None for _, event, _ in METER._marks)
        exchanges = sum(each.calls for name, each in METER.take().traffic.items() if "all_to_all" in name)
        METER.stop()
    return is_one, exchanges


def test_times_are_recorded_in_one_stream() -> None:
    """Events of different streams have no order: time between them could be negative."""
    plant = "features.experts.counts:ArrivingCounts._copy", "work.wait()", "self._handle.wait()"
    # In each of 2 layers: the numbers of rows; rows and their probabilities there, rows back; the same in backward.
    assert run_ranks(2, streams_of_times, None) == [(True, 2 * (1 + 3 + 3))] * 2
    assert run_ranks(2, streams_of_times, plant)[0][0] is False


def test_recurrences_in_deterministic_mode() -> None:
    run_ranks(1, compare, [MAMBA | PACKED | {"deterministic_mode": True, "fp64": True}])


def job(folder: str) -> None:
    settings = BASE | BF16 | OFFLOAD | {"save": folder, "save_interval": 1, "replica_check_interval": 1}
    settings |= {"eval_iters": 0, "peak_tflops": 1.0}  # not measured: a GPU's product takes a CPU minutes
    world = World(0, 1, local_rank=1, device=torch.device("cuda", 1))
    with simulated_gpu():
        torch.cuda.set_device(world.device)
        pretrain(RunConfig.from_flat(settings | {"train_iters": 2}), world)
        again = settings | {"train_iters": 3, "load": folder, "async_save": True, "zero_stage": 3}
        pretrain(RunConfig.from_flat(again), world)


def test_checks_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(1, job, str(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records and (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def train_planted(place: str, old: str, new: str, settings: dict) -> list[float]:
    with planted(place, old, new), simulated_gpu():
        return train(settings)


def test_finds_a_mask_on_the_cpu() -> None:
    settings = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
    settings["attention_backend"] = "unfused"
    mask = "torch.stack(blocks).tril().unsqueeze(1)"
    place = "transformer.context:PackedDocuments.masked", f"to_device({mask}, self.device)", mask
    with pytest.raises(RankFailure, match="on cpu"):
        run_ranks(1, train_planted, *place, settings)


ACTIVATIONS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "num_layers": 4}


@pytest.mark.parametrize(
    ("place", "old", "new", "settings"),
    [
        ("features.offload.pipeline:_Loaded.wait", "_wait(self._waits)", "pass", BF16 | OFFLOAD),
        (
            "features.offload.pipeline:UpdatePipeline.run",
            "_wait(behind)\n    self._sent.clear()",
            "self._sent.clear()",
            BF16 | OFFLOAD,
        ),
        (
            "optimizer.sharded:Optimizer.step",
            "self._updates.settle()\n        return True",
            "return True",
            {"fp16": True, "initial_loss_scale": 2.0**40} | OFFLOAD,
        ),
        (
            "features.offload.transfer:Lane._started",
            "self._stream.wait_stream(torch.cuda.current_stream(self._device))",
            "pass",
            ACTIVATIONS,
        ),
        ("features.offload.activations:_Saved.settle", "self._transfer.wait()", "pass", ACTIVATIONS),
        ("features.offload.activations:_Saved.take", "self.settle()", "pass", ACTIVATIONS),
    ],
    ids=["gradients", "weights", "skipped step", "stream", "freed early", "read early"],
)
def test_finds_transfers_that_are_not_waited_for(place: str, old: str, new: str, settings: dict) -> None:
    try:
        [found] = run_ranks(1, train_planted, place, old, new, settings)
    except RankFailure as failure:
        assert "before the copy in another stream ended" in str(failure) or "does not wait" in str(failure)
    else:
        assert not all(value == value for value in found), "memory was read before the transfer had ended"


CHANGED = "async_op=True)\n        wire.zero_()\n    else"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("place", "old", "new", "settings"),
    [
        ("data_parallel.buffer:Bucket.finish_gather", "self.gathering.wait()", "pass", ZERO | OVERLAP),
        ("data_parallel.buffer:Bucket.finish_reduce", "self._reducing.wait()", "pass", ZERO2),
        ("parallel.collectives:_gather_first", "handle.wait()", "pass", TP2 | SP),
        ("pipeline_parallel.executor:Executor._take_input", "handle.wait()", "pass", PP2),
        (
            "data_parallel.buffer:Bucket.start_reduce",
            "async_op=True)\n    else",
            "async_op=True); wire.zero_()\n    else",
            ZERO,
        ),
    ],
    ids=["gather", "reduction", "sequence", "message", "changed"],
)
def test_finds_a_collective_that_is_not_waited_for(place: str, old: str, new: str, settings: dict) -> None:
    try:
        found = [value for values in run_ranks(2, train_planted, place, old, new, settings) for value in values]
    except RankFailure as failure:
        assert "before the collective was waited for" in str(failure)
    else:
        assert not all(value == value for value in found), "what has not arrived has been read"


def generated() -> list[int]:
    parallel_state.destroy_model_parallel()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run = set_up(RunConfig.from_flat(BASE | {"init_method_std": 0.3}), World(0, 1, 0, device))
    for stage in run.stages.values():
        stage.eval()
    LOG.stalls.clear()
    generator = Generator(run.config, run.groups, run.stages, len(run.layers), run.vocab_size, device)
    sampling = Sampling(temperature=0.8, top_k=5, seed=3)
    return list(generate(generator, Request(prompt=(5, 11, 17), max_new_tokens=6, sampling=sampling)))


def generated_twice() -> tuple[list[int], list[int], list[str]]:
    expected = generated()
    with simulated_gpu():
        return expected, generated(), list(LOG.stalls)


def test_generates_what_the_cpu_generates() -> None:
    [(expected, found, waits)] = run_ranks(1, generated_twice)
    assert found == expected
    assert not any("by a mask" in line for line in waits), "no layer waits for the device"
