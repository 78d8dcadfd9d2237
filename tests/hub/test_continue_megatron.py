"""Checkpoints that Megatron Core writes here continue in other layouts with the losses of Megatron Core itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.megatron_peer import MEGATRON
from megatron_core.datasets.base import Sample
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_megatron
from megatron_core.hub.megatron_lm import MegatronReader, flat_buffers
from megatron_core.hub.megatron_lm.format import megatron_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.hub import megatron_training as theirs

pytestmark = pytest.mark.skipif(not MEGATRON.is_dir(), reason="megatron-core is not installed (make install-test)")
BEFORE, AFTER = 3, 4
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DP2, ZERO1 = {"use_distributed_optimizer": False}, {"use_distributed_optimizer": True}
ZERO3 = {"use_distributed_optimizer": False, "zero_stage": 3}


@dataclass(frozen=True)
class Case:
    """A training of Megatron Core, its format, and our layout that continues it."""

    shape: dict[str, Any]
    ranks: int = 1
    layout: str = ""
    how: str = "fully_reshardable"
    """``--ckpt-format torch``, or how ``torch_dist`` stores the optimizer's state."""
    ours: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    our_ranks: int = 2
    """Number of ranks that continue with ``ours``."""
    after: int = AFTER
    """Number of steps that are compared."""


SHARDED = {"distributed": True}
LAYERS4 = theirs.LLAMA | {"num_layers": 4}
EP2 = {"expert_model_parallel_size": 2}
BIASED = theirs.EXPERTS | {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 1e-2,
    "moe_shared_expert_intermediate_size": 24,
}
CASES = {
    "gpt": Case(theirs.GPT, ours=TP2),
    "llama tp2": Case(theirs.LLAMA, 2, "tp2", ours=PP2),
    "llama tp2, flat buffers": Case(theirs.LLAMA, 2, "tp2", "dp_reshardable", ZERO1, SHARDED),
    "gpt pp2, tied, flat buffers": Case(theirs.GPT, 2, "pp2", "dp_reshardable", TP2, SHARDED),
    "llama dp2, flat buffers": Case(theirs.LLAMA, 2, "", "dp_reshardable", PP2, SHARDED),
    "llama dp2, gathered": Case(theirs.LLAMA, 2, "", "dp_zero_gather_scatter", TP2, SHARDED),
    "llama dp2, reshardable": Case(theirs.LLAMA, 2, "", "fully_reshardable", TP2, SHARDED),
    "experts": Case(theirs.EXPERTS, ours=EP2),
    "experts pp2, flat buffers": Case(theirs.EXPERTS, 2, "pp2", "dp_reshardable", EP2, SHARDED),
    "experts ep2, flat buffers": Case(theirs.EXPERTS, 2, "ep2", "dp_reshardable", PP2, SHARDED),
    "experts with biases ep2": Case(BIASED, 2, "ep2", "fully_reshardable", TP2 | {"sequence_parallel": True}, SHARDED),
    "mla, flat buffers": Case(theirs.MLA, 1, "", "dp_reshardable", TP2, SHARDED),
    "mla tp2, flat buffers": Case(theirs.MLA, 2, "tp2", "dp_reshardable", PP2, SHARDED),
    "sparse attention, pp2": Case(theirs.SPARSE, 2, "pp2", "", TP2 | {"sequence_parallel": True}),
    # Not from tp2, with which Megatron Core, without Transformer Engine, differs from its own losses on one rank.
    "sparse attention, dp2, flat buffers": Case(theirs.SPARSE, 2, "", "dp_reshardable", PP2, SHARDED),
    "sparse attention, pp2, torch": Case(theirs.SPARSE, 2, "pp2", "torch", DP2),
    "decoupled rates, learned positions": Case(theirs.DECOUPLED, ours=TP2),
    "fp16": Case(theirs.GPT | {"initial_loss_scale": 2.0**12}, settings={"fp16": True}),
    "fp16 before the first update": Case(theirs.GPT | {"initial_loss_scale": 2.0**21}, settings={"fp16": True}),
    "fp16 before the first update, torch": Case(
        theirs.GPT | {"initial_loss_scale": 2.0**21}, 1, "", "torch", {}, {"fp16": True}
    ),
    "mup": Case(theirs.MUP, ours=TP2),
    "capacity": Case(theirs.CAPACITY, ours=EP2),
    "quantiles": Case(theirs.QUANTILES, ours=EP2),
    "quantiles, ep2, flat buffers": Case(theirs.QUANTILES, 2, "ep2", "dp_reshardable", PP2, SHARDED),
    "mtp": Case(theirs.MTP, ours=TP2),
    "dense, experts, mtp, pp2, flat buffers": Case(theirs.DENSE_FIRST, 2, "pp2", "dp_reshardable", EP2, SHARDED),
    "latent experts": Case(theirs.LATENT_EXPERTS, ours=EP2),
    "latent experts, ep2, flat buffers": Case(theirs.LATENT_EXPERTS, 2, "ep2", "dp_reshardable", PP2, SHARDED),
    "latent experts, tp2, torch": Case(theirs.LATENT_EXPERTS, 2, "tp2", "torch", PP2),
    "mtp by one layer": Case(theirs.REPEATED, ours=TP2),
    "mtp by one layer, pp2, flat buffers": Case(theirs.REPEATED, 2, "pp2", "dp_reshardable", TP2, SHARDED),
    "mtp pp2, flat buffers": Case(theirs.MTP, 2, "pp2", "dp_reshardable", TP2, SHARDED),
    "llama pp2, 2 chunks, flat buffers": Case(LAYERS4, 2, "pp2", "dp_reshardable", TP2, SHARDED | {"chunks": 2}),
    "llama pp2, 2 chunks, torch": Case(LAYERS4, 2, "pp2", "torch", ZERO1, {"chunks": 2}),
    "llama tp2, torch": Case(theirs.LLAMA, 2, "tp2", "torch", PP2 | {"vocab_size": 64}, {"vocabulary": 61}),
    "llama tp2, torch, flat buffers": Case(theirs.LLAMA, 2, "tp2", "torch", PP2, SHARDED),
    "experts ep2, torch, flat buffers": Case(
        theirs.EXPERTS, 2, "ep2", "torch", TP2 | {"sequence_parallel": True}, SHARDED
    ),
    "layers of different sizes tp2, flat buffers": Case(theirs.HETEROGENEOUS, 2, "tp2", "dp_reshardable", PP2, SHARDED),
    "layers of different sizes, torch": Case(theirs.HETEROGENEOUS, 1, "", "torch", TP2, {}),
    "experts ep2 etp1, torch, flat buffers": Case(theirs.EXPERTS, 2, "tp2 ep2 etp1", "torch", PP2, SHARDED),
    "llama tp2 dp2 on 4 ranks": Case(theirs.LLAMA, 4, "tp2", "dp_reshardable", TP2 | PP2, SHARDED, 4, 7),
    "llama pp2 dp2 on 4 ranks": Case(theirs.LLAMA, 4, "pp2", "fully_reshardable", TP2 | ZERO3, SHARDED, 4, 7),
    "llama tp2 pp2, 2 chunks": Case(LAYERS4, 4, "tp2 pp2", "torch", PP2 | ZERO1, {"chunks": 2}, 4, 7),
    "experts ep2 dp2 on 4 ranks": Case(
        theirs.EXPERTS, 4, "ep2", "dp_reshardable", EP2 | PP2, SHARDED | {"micro_batch": 1}, 4, 7
    ),
    "gpt tp2 pp2, tied": Case(theirs.GPT, 4, "tp2 pp2", "torch", TP2 | ZERO3, {}, 4, 7),
    "a batch that grows": Case(theirs.GROWING_BATCH, ours=TP2, after=7),
    "a batch that grows, dp2, flat buffers": Case(
        theirs.GROWING_BATCH, 2, "", "dp_reshardable", ZERO1, SHARDED | {"micro_batch": 1}, after=7
    ),
    "a batch that grows, fp16 before the first update": Case(
        theirs.GROWING_BATCH | {"initial_loss_scale": 2.0**21}, settings={"fp16": True}
    ),
    "llama bf16": Case(theirs.LLAMA, 1, "", "fully_reshardable", {}, {"bf16": True}),
    "llama bf16, torch": Case(theirs.LLAMA, 1, "", "torch", {}, {"bf16": True}),
}
TOLERANCE = {True: 2e-3, False: 5e-5}
"""Largest difference of a loss in bfloat16 and in float32; with MLA, Adam divides gradients of rounding error."""
READ_AGAIN = "experts ep2, flat buffers"


def _write(folder: Path, names: list[str]) -> None:
    """Train each case, save, and record the next losses."""
    for name in names:
        case = CASES[name]
        training = theirs.Training(case.shape, case.layout, **case.settings)
        for _ in range(BEFORE):
            training.step()
        if case.how == "torch":
            training.save_rank_files(folder / name)
        else:
            training.save(folder / name, case.how)
        losses = [training.step() for _ in range(case.after)]
        (folder / name / "losses.json").write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the cases in this run of the tests."""
    made = tmp_path_factory.mktemp("megatron")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")} | {READ_AGAIN}
    by_ranks = {ranks: [name for name in CASES if name in names and CASES[name].ranks == ranks] for ranks in (1, 2, 4)}
    calls = {ranks: (_write, made, of_ranks) for ranks, of_ranks in by_ranks.items() if of_ranks}
    theirs.ranks_of_megatron(theirs.load_megatron, calls)
    return made


class Tokens:
    """The tokens of the trainings of Megatron Core, as a data set."""

    sequence_length = theirs.LENGTH

    def __getitem__(self, index: int) -> Sample:
        row = theirs.tokens_of(1 + index // theirs.BATCH)[index % theirs.BATCH].numpy()
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": np.ones(self.sequence_length, np.float32)}


def continued(
    load: str, settings: dict[str, Any], steps: int = AFTER, consumed: int = BEFORE * theirs.BATCH
) -> list[float]:
    """The losses of the steps after the checkpoint, which ``consumed`` samples precede."""
    run = start(settings | {"load": load, "mock_data": True, "eval_iters": 0})
    assert (run.state.iteration, run.state.consumed_samples) == (BEFORE, consumed)
    assert run.optimizer.steps_taken == BEFORE - run.state.skipped_iterations
    run.train_loader = run.loader(Tokens())
    return [loss for loss, _ in train(run, steps)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CASES)
def test_training_continues_with_the_losses_of_megatron(name: str, folder: Path) -> None:
    case, stored = CASES[name], folder / name
    settings = megatron_config(stored / f"iter_{BEFORE:07d}").flat() | case.ours
    consumed = BEFORE * case.shape.get("global_batch_size", theirs.BATCH)
    losses = run_ranks(case.our_ranks if case.ours else 1, continued, str(stored), settings, case.after, consumed)[0]
    expected = json.loads((stored / "losses.json").read_text())
    assert losses == pytest.approx(expected, abs=TOLERANCE[case.settings.get("bf16", False)])
    assert len({round(loss, 3) for loss in expected}) > case.after // 2, "the losses do not change"


def test_a_converted_checkpoint_continues(folder: Path, tmp_path: Path) -> None:
    said = import_megatron(folder / READ_AGAIN, tmp_path / "ours", optimizer=True)
    assert said == f"weights and optimizer state of iteration {BEFORE}"
    settings = megatron_config(folder / READ_AGAIN / f"iter_{BEFORE:07d}").flat()
    losses = run_ranks(1, continued, str(tmp_path / "ours"), settings)[0]
    assert losses == pytest.approx(json.loads((folder / READ_AGAIN / "losses.json").read_text()), abs=TOLERANCE[False])


def test_another_order_in_flat_buffers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of equal size in each other's place: the main weights there are not the weights."""
    swap = {"input_layernorm": "pre_mlp_layernorm", "pre_mlp_layernorm": "input_layernorm"}
    orders = tuple([swap.get(name, name) for name in order] for order in flat_buffers.ORDERS)
    settings = megatron_config(folder / READ_AGAIN / f"iter_{BEFORE:07d}").flat()
    monkeypatch.setattr(flat_buffers, "ORDERS", orders)
    with pytest.raises(CheckpointError, match=r"has no state of --optimizer adam \(exp_avg, exp_avg_sq\)") as found:
        continued(str(folder / READ_AGAIN), settings)
    assert "\n" not in str(found.value)


def test_a_difference_behind_the_compared_parameters_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = MegatronReader(folder / READ_AGAIN)
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    part = reader._optimizer["exp_avg"][name][-1]
    monkeypatch.setattr(flat_buffers.FlatState, "_agrees", lambda self, place: False)
    with pytest.raises(CheckpointError, match="the order of the parameters is unknown"):
        part.read()


def test_a_schedule_of_other_steps_is_refused(folder: Path) -> None:
    settings = megatron_config(folder / READ_AGAIN / f"iter_{BEFORE:07d}").flat()
    with pytest.raises(CheckpointError, match=r"lr_one_step_later was True and is False .*add --lr-one-step-later"):
        continued(str(folder / READ_AGAIN), settings | {"lr_one_step_later": False})
