"""Hybrid trainings of Megatron Core continue here, and ours in Megatron Core, with the losses of the other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import MegatronReader, tensor_map
from megatron_core.hub.megatron_lm.format import megatron_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.hub import megatron_training as theirs
from tests.hub.megatron_hybrid import CENTERED, DELTA_NETS, HAS_EINOPS, HYBRID, QWEN_EXPERTS, QWEN_NEXT, load_hybrid
from tests.hub.test_continue_megatron import AFTER, BEFORE, EP2, PP2, SHARDED, TP2, Tokens, continued
from tests.hub.test_write_megatron import Case, flat_settings

pytestmark = pytest.mark.skipif(not HAS_EINOPS, reason="megatron-core or einops is not installed (make install-test)")
STAGES = HYBRID | {"hybrid_layer_pattern": "M|*-M"}


EXPERTS = {name: value for name, value in theirs.EXPERTS.items() if name not in theirs.LLAMA}
EXPERTS |= HYBRID | {"hybrid_layer_pattern": "ME*M"}
AHEAD = HYBRID | {"hybrid_layer_pattern": "M*-M/*-/*-", "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.4}
EXPERTS_AHEAD = EXPERTS | {"hybrid_layer_pattern": "M*-M/*E", "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.4}


@dataclass(frozen=True)
class Stored:
    """A training of Megatron Core, how it stores the optimizer's state, and our layout that continues it."""

    shape: dict[str, Any]
    layout: str
    how: str
    ours: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    within: float = 5e-5


COPIES = 2e-4
"""Bound where copies of a delta net's norm differ in Megatron Core, which does not sum its gradients over two ranks."""
READ = {
    "tp2": Stored(HYBRID, "tp2", "", PP2),
    "tp2, flat buffers": Stored(HYBRID, "tp2", "dp_reshardable", PP2, SHARDED),
    "pp2 by the pattern, flat buffers": Stored(STAGES, "pp2", "dp_reshardable", TP2, SHARDED),
    "experts, ep2, flat buffers": Stored(EXPERTS, "ep2", "dp_reshardable", PP2, SHARDED),
    "experts, tp2": Stored(EXPERTS, "tp2", "", EP2),
    "tp2, torch": Stored(HYBRID, "tp2", "torch", PP2),
    "tp2, torch, flat buffers": Stored(HYBRID, "tp2", "torch", {}, SHARDED),
    "experts ahead, ep2, torch": Stored(EXPERTS_AHEAD, "ep2", "torch", TP2 | {"sequence_parallel": True}),
    "pp2 by the pattern, torch": Stored(STAGES, "pp2", "torch", TP2),
    "two tokens ahead, tp2": Stored(AHEAD, "tp2", "", PP2),
    "two tokens ahead, tp2, flat buffers": Stored(AHEAD, "tp2", "dp_reshardable", PP2, SHARDED),
    "experts ahead, ep2": Stored(EXPERTS_AHEAD, "ep2", "", EP2),
    "delta nets, tp2": Stored(DELTA_NETS, "tp2", "", PP2),
    "delta nets, tp2, flat buffers": Stored(DELTA_NETS, "tp2", "dp_reshardable", PP2, SHARDED),
    "delta nets, tp2, torch": Stored(DELTA_NETS, "tp2", "torch", PP2),
    "gpt with delta nets, tp2": Stored(QWEN_NEXT, "tp2", "", PP2, within=COPIES),
    "gpt with delta nets and layer norms": Stored(CENTERED, "", "", TP2),
    "gpt with delta nets and layer norms, flat buffers": Stored(CENTERED, "", "dp_reshardable", PP2, SHARDED),
    "gpt with delta nets, flat buffers": Stored(QWEN_NEXT, "", "dp_reshardable", TP2, SHARDED),
    "gpt with delta nets, tp2, torch": Stored(QWEN_NEXT, "tp2", "torch", PP2, within=COPIES),
    "gpt with delta nets and experts, ep2": Stored(QWEN_EXPERTS, "ep2", "", PP2),
    "gpt with delta nets and experts, ep2, flat buffers": Stored(QWEN_EXPERTS, "ep2", "dp_reshardable", EP2, SHARDED),
    "gpt with delta nets and experts, pp2, torch": Stored(QWEN_EXPERTS, "pp2", "torch", EP2, SHARDED),
    "dp2, gathered": Stored(HYBRID, "", "dp_zero_gather_scatter", TP2, SHARDED),
    "dp2, reshardable": Stored(HYBRID, "", "fully_reshardable", PP2, SHARDED),
}
SWAPPED = "tp2, flat buffers"
WRITTEN = {
    "tp2 to pp2 by the pattern": Case(STAGES, TP2, "pp2"),
    "experts, ep2": Case(EXPERTS, EP2, "ep2"),
    "two tokens ahead, pp2 to tp2": Case(AHEAD, PP2, "tp2"),
    "experts ahead, ep2": Case(EXPERTS_AHEAD, EP2, "ep2"),
    # Not to tp2: Megatron Core does not sum the gradient of the norm of a delta net over tensor-parallel ranks.
    "delta nets, pp2 to dp2": Case(DELTA_NETS, PP2),
    "delta nets, tp2 to pp2, distributed": Case(DELTA_NETS, TP2, "pp2", SHARDED),
    "gpt with delta nets and layer norms, pp2 to dp2": Case(CENTERED, PP2),
    "gpt with delta nets, tp2 to dp2": Case(QWEN_NEXT, TP2, "", SHARDED),
    "gpt with delta nets and experts, ep2": Case(QWEN_EXPERTS, EP2, "ep2"),
    "pp2 to tp2, distributed": Case(HYBRID, PP2, "tp2", SHARDED),
}


def _write(folder: Path, names: list[str]) -> None:
    """Train in Megatron Core, save, and record the next losses."""
    for name in names:
        case = READ[name]
        training = theirs.Training(case.shape, case.layout, **case.settings)
        for _ in range(BEFORE):
            training.step()
        if case.how == "torch":
            training.save_rank_files(folder / name)
        else:
            training.save(folder / name, case.how)
        (folder / name / "losses.json").write_text(json.dumps([training.step() for _ in range(AFTER)]))


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of Megatron Core for the cases in this run of the tests."""
    made = tmp_path_factory.mktemp("hybrid")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")} | {SWAPPED}
    theirs.ranks_of_megatron(load_hybrid, {2: (_write, made, [name for name in READ if name in names])})
    return made


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", READ)
def test_it_continues_here(name: str, stored: Path) -> None:
    folder = stored / name
    settings = megatron_config(folder / f"iter_{BEFORE:07d}").flat() | READ[name].ours
    losses = run_ranks(2, continued, str(folder), settings)[0]
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), abs=READ[name].within)


def test_pieces_in_another_order_are_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main weights in flat buffers are then not the weights."""
    folder = stored / SWAPPED
    settings = megatron_config(folder / f"iter_{BEFORE:07d}").flat()
    usual = tensor_map.StoredMixer.pieces

    def in_our_order(mixer: tensor_map.StoredMixer, model: ModelConfig) -> tensor_map.MixerPieces:
        pieces = usual(mixer, model)
        return pieces._replace(order={"in_proj": (0, 3, 1, 2, 4), "conv1d": pieces.order["conv1d"]})

    monkeypatch.setattr(tensor_map.StoredMixer, "pieces", in_our_order)
    with pytest.raises(CheckpointError, match=r"has no state of --optimizer adam \(exp_avg, exp_avg_sq\)"):
        continued(str(folder), settings)


def _train(folder: Path, case: Case) -> list[float]:
    """Train here and save as torch_dist; return the next losses."""
    saved = {"save": str(folder), "ckpt_format": "torch_dist", "ckpt_format_interval": BEFORE, "eval_iters": 0}
    run = start(flat_settings(case) | saved)
    run.train_loader = run.loader(Tokens())
    train(run, BEFORE)
    run.saver.save(run.state)
    run.saver.close()
    return [loss for loss, _ in train(run, AFTER)]


def _continue(folder: Path, case: Case) -> list[float]:
    training = theirs.Training(case.shape, case.layout, **case.settings)
    training.load(folder / "torch_dist" / f"iter_{BEFORE:07d}")
    return [training.step() for _ in range(AFTER)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", WRITTEN)
def test_it_continues_in_megatron(name: str, tmp_path: Path) -> None:
    ours = run_ranks(2, _train, tmp_path, WRITTEN[name])[0]
    found = theirs.ranks_of_megatron(load_hybrid, {2: (_continue, tmp_path, WRITTEN[name])})[2][0]
    assert found == pytest.approx(ours, abs=5e-6)
    with MegatronReader(tmp_path / "torch_dist" / f"iter_{BEFORE:07d}") as reader:
        shape = WRITTEN[name].shape
        assert reader.arguments["linear_attention_freq"] == shape.get("linear_attention_freq")
        pattern = shape.get("hybrid_layer_pattern")
        assert reader.arguments["hybrid_layer_pattern"] == (pattern and pattern.replace("|", ""))
