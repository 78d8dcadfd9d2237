"""Wrong data on links: every kind of damage on every axis is found in its step and named, and sound runs are silent."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.parallel import World
from megatron_core.resilience.faults import Faults
from megatron_core.resilience.link_checks import LinkChecks
from megatron_core.resilience.links.faults import LinkFault
from megatron_core.resilience.links.recorder import LINKS
from megatron_core.resilience.settings import LINK_DAMAGES
from megatron_core.training.callbacks import Callback, Callbacks
from megatron_core.training.loop import train
from megatron_core.training.parts import build_parts
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, run_simulated
from tests.runs import tiny_config, tiny_run

ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_param_gather": True, "overlap_grad_reduce": True}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
EP = {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}
SOUND: dict[str, dict[str, Any]] = {
    "dp2 zero1, overlap": ZERO | OVERLAP,
    "dp2 zero3, overlap, bf16": {"zero_stage": 3, "bf16": True} | OVERLAP,
    "dp2, gradients in bf16": ZERO | {"bf16": True, "grad_reduce_in_bf16": True, "overlap_grad_reduce": True},
    "dp2, powersgd": {"grad_compression": "powersgd", "grad_compression_warmup_iters": 1},
    "dp2, onebit": {
        "grad_compression": "onebit-adam", "grad_compression_warmup_iters": 1, "optimizer": "adam", "weight_decay": 0.0,
    },
    "tp2 sp, fp16": TP | {"sequence_parallel": True, "fp16": True},
    "cp2 ring": {"context_parallel_size": 2},
    "cp2 heads": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
    "ep2, overlap": EP | OVERLAP | ZERO,
    "pp2 zb_v": PP | {"pipeline_schedule": "zb_v", "num_layers": 4},
    "pp2 x 2 chunks, bf16": PP | {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4, "bf16": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Forked ranks must not inherit a pool of threads."""
    torch.set_num_threads(1)


def outcome(**settings: Any) -> tuple[str, str]:
    """Train 3 steps; the error's message, and the lines on standard error."""
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        try:
            train(tiny_run(**({"eval_iters": 0, "train_iters": 3} | settings)), [])
        except MegatronError as error:
            return str(error), told.getvalue()
    assert not LINKS.active
    return "", told.getvalue()


def outcomes(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The outcome of each case, one after the other on the same ranks."""
    return [outcome(**case) for case in cases]


def with_faults(settings: dict[str, Any], axis: str, step: int = 2) -> list[dict[str, Any]]:
    """A run for each damage of a tensor that rank 1 receives over ``axis``."""
    return [settings | {"inject_fault": (f"{axis}-{damage}@1:{step}",)} for damage in LINK_DAMAGES]


AXES = {
    "tp": (TP | {"sequence_parallel": True}, "over tp"),
    "dp": (ZERO, "over dp"),
    "cp": ({"context_parallel_size": 2}, "over cp"),
    "ep": (EP, "over .*ep"),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("axis", AXES)
def test_each_damage_is_found_and_named(axis: str) -> None:
    settings, where = AXES[axis]
    cases = with_faults(settings | {"link_check_interval": 2}, axis)
    by_rank = run_ranks(2, outcomes, cases, backend="gloo" if axis in ("dp", "ep") else "auto")
    for (first, _), (second, told) in zip(*by_rank, strict=True):
        assert first == second  # all ranks end together
        assert re.search(rf"step 2: rank 1 received wrong values.* {where}.*\(ranks 0, 1\)", first), first
        assert "rank 0 received" not in first
        assert first.count("step 2: ") == 1  # one damaged tensor is one finding
        assert "injected fault" in told


@pytest.mark.parametrize("settings", [{"link_check_interval": 2}, {"check_pipeline_messages": True}], ids=str)
def test_damaged_messages_between_stages_are_found_and_named(settings: dict[str, Any]) -> None:
    for messages in run_ranks(2, outcomes, with_faults(PP | settings, "pp")):
        for message, _ in messages:
            assert "step 2: rank 1 received a wrong message of [16, 2, 32] float32 from rank 0 over pp" in message


def test_moved_data_names_its_sender() -> None:
    """With four ranks the part of one sender is damaged, and only that one is named."""
    case = {"link_check_interval": 1, "inject_fault": ("dp-flipped@2:2",)} | ZERO | OVERLAP
    case |= {"overlap_grad_reduce": False, "num_distributed_optimizer_instances": 1}
    gathers = {"zero_stage": 3} | case
    message, _ = run_ranks(4, outcome_of, gathers)[0]
    assert re.search(r"rank 2 received wrong values from rank 0 in all-gather .*over dp.*\(ranks 0, 1, 2, 3\)", message)


def outcome_of(settings: dict[str, Any]) -> tuple[str, str]:
    """``outcome`` with its settings in a dict."""
    return outcome(**settings)


class FaultInUpdate(Callback):
    """A bit is flipped in the first tensor that rank 1 receives over dp in the update of step 2."""

    priority = LinkChecks.priority - 1  # after the comparison of this step

    def __init__(self, run: Run) -> None:
        self.run = run
        LINKS.faults.name_groups(run.groups)

    def before_update(self) -> None:
        if self.run.state.iteration == 1 and self.run.world.rank == 1:
            LINKS.faults.arm(LinkFault("dp", "flipped"))


def _faults_in_update(cases: list[dict[str, Any]]) -> list[str]:
    return [_error_of_steps(case, FaultInUpdate, steps=3) for case in cases]


def test_a_fault_in_an_update_is_found_before_the_next_one() -> None:
    """The check of the next step keeps the records of this one's update."""
    settings = {"zero_stage": 1, "link_check_interval": 1}
    cases = [settings, settings | OVERLAP, settings | {"link_check_interval": 2}]
    by_rank = run_ranks(2, _faults_in_update, cases)
    assert by_rank[0] == by_rank[1]
    for message in by_rank[0]:
        found = r"step 2: rank 1 received wrong values from rank 0 in all-gather .* over dp.*\(ranks 0, 1\)"
        assert re.search(found, message), message
        assert "Steps from step 2 on may be wrong" in message


def test_sound_runs_are_silent() -> None:
    cases = [case | {"link_check_interval": 1} for case in SOUND.values()]
    cases.append(SOUND["pp2 zb_v"] | {"check_pipeline_messages": True})
    for message, told in run_ranks(2, outcomes, cases)[0]:
        assert message == ""
        assert "wrong" not in told


def _stepped(cases: list[dict[str, Any]]) -> list[str]:
    """The error of two steps of each case, without the callbacks that need a process."""
    return [_error_of_steps(case) for case in cases]


def _error_of_steps(settings: dict[str, Any], faults: Callable[[Run], Callback] = Faults, steps: int = 2) -> str:
    run = tiny_run(**settings)
    called = Callbacks(run, [LinkChecks(run), faults(run)])
    try:
        with called.running():
            for _ in range(steps):
                called.call("before_step")
                called.call("after_step", train_step(run, hooks=called.step_hooks))
    except MegatronError as error:
        return str(error)
    return ""


def test_simulated_worlds() -> None:
    settings = TP | PP | {"link_check_interval": 1, "sequence_parallel": True}
    cases = [settings, *with_faults(settings, "tp")[-2:], *with_faults(settings, "pp")[-1:]]
    sound, *damaged = run_simulated(4, _stepped, cases).result[0]
    assert sound == ""
    assert all("step 2: rank 1 received wrong values in reduce-scatter" in message for message in damaged[:2]), damaged
    assert "over tp (ranks 0, 1)" in damaged[0]
    assert "step 2: rank 1 received a wrong message of [8, 2, 32] float32 from rank 3 over pp" in damaged[2]


def test_damage_between_checks_is_not_found() -> None:
    """The check reads the steps that are due, and without another check the run continues with wrong weights."""
    settings = TP | {"link_check_interval": 3, "replica_check_interval": None}
    assert [message for message, _ in run_ranks(2, outcomes, with_faults(settings, "tp"))[1]] == [""] * 4


def test_a_fault_without_a_tensor_is_reported() -> None:
    _, told = run_ranks(2, outcome_of, {"inject_fault": ("tp-zeros@0:2",)})[0]
    assert "note: [pp0 dp0 tp0] tp-zeros in step 2 has not happened" in told


def _bits(settings: dict[str, Any]) -> list[bytes]:
    run = tiny_run(**({"eval_iters": 0, "train_iters": 3} | settings))
    with contextlib.redirect_stdout(io.StringIO()):
        train(run, [])
    states = [stage.state_dict() for stage in run.stages.values()]
    return [each.reshape(-1).view(torch.uint8).numpy().tobytes() for state in states for each in state.values()]


@pytest.mark.parametrize("settings", [PP | {"bf16": True}, ZERO | OVERLAP], ids=str)
def test_checks_change_no_bit(settings: dict[str, Any]) -> None:
    checked = settings | {"link_check_interval": 1, "check_pipeline_messages": bool(settings.keys() & PP.keys())}
    assert run_ranks(2, _bits, settings | {"link_check_interval": None}) == run_ranks(2, _bits, checked)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, 1),
        ({"link_check_interval": None}, 0),
        ({"cuda_graph_impl": "none"}, 0),
        ({"tensor_model_parallel_size": 1}, 0),
    ],
    ids=str,
)
def test_unchecked_collectives_in_cuda_graphs_are_noted(settings: dict[str, Any], told: int) -> None:
    # Graphs need a GPU: only the settings of this run have them.
    config = tiny_config(**(TP | {"cuda_graph_impl": "local"} | settings))
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    groups = SimpleNamespace(ranks=lambda group: [0], grid=SimpleNamespace(world_size=1))
    run = SimpleNamespace(config=config, stages={}, world=world, groups=groups, loaded=False)
    parts = build_parts(config, run)
    found = [note for part in parts for note in part.notes() if "inside CUDA graphs" in note]
    assert len(found) == told
    assert all(note.startswith("link_check_interval=100 ") for note in found)


def test_settings() -> None:
    assert tiny_config().value("link_check_interval") == 100
    with pytest.raises(ConfigError, match="inject_fault=tp-torn@0:1 is not a fault"):
        check(tiny_config(inject_fault=("tp-torn@0:1",)), 2)
