"""Runs in FP8: state restored by a resume, state that evaluation must not change, and messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.features.fp8.amax_history import AmaxHistories
from megatron_core.features.fp8.casts import WHOLE
from megatron_core.features.fp8.part import FP8Part, FP8Statistics
from megatron_core.features.fp8.rules import describe_fp8
from megatron_core.training.pretrain import notes
from megatron_core.training.setup import Run
from megatron_core.training.state import open_checkpoint
from megatron_core.training.step import evaluate
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import save_run, start, stored, train
from tests.parity.rows import PP2, SP, TP2, ZERO3

DELAYED = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 3,
    "fp8_amax_compute_algo": "max",
    "num_layers": 2,
}
NAME = "fp8.amax_history.decoder.layers.1.mlp.linear_fc2"


def histories_of(run: Run) -> AmaxHistories:
    """The amax histories of a run in FP8."""
    part = run.part(FP8Part)
    assert part is not None
    return part.histories


def test_fp8_with_float64_is_noted() -> None:
    """Layouts are compared with both settings; a note says that both are on."""
    told = [note for note in notes(start(DELAYED)) if "fp64" in note]
    assert len(told) == 1 and told[0].startswith("fp8_format=hybrid rounds the matrices of linear layers to FP8")
    assert not [note for note in notes(start(DELAYED | {"fp64": False})) if "fp64" in note]


def _save(folder: Path) -> list[tuple[float, float]]:
    run = start(DELAYED | {"save": str(folder)})
    train(run, 2)
    save_run(run)
    return train(run, 2)


def _load(layout: dict, folder: Path) -> list[tuple[float, float]]:
    return train(start(DELAYED | layout | {"load": str(folder)}), 2)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("size", "layout"), [(1, {}), (2, TP2 | SP), (2, PP2), (2, ZERO3)], ids=["1", "tp2", "pp2", "zero3"]
)
def test_histories_are_saved_and_resumed_in_any_layout(size: int, layout: dict, tmp_path: Path) -> None:  # C49
    (expected,) = run_ranks(1, _save, tmp_path)
    history = stored(tmp_path / "iter_0000002")[NAME]
    assert history.shape == (3, 3) and (history[:2] > 0).all() and not history[2].any()
    found = run_ranks(size, _load, layout, tmp_path)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    if size == 1:
        assert found == expected


def test_a_history_of_another_length_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _save(tmp_path)
    run = start(DELAYED | {"load": str(tmp_path), "fp8_amax_history_len": 5})
    assert "no amax histories of this length" in capsys.readouterr().out
    assert histories_of(run).histories() == {}


def test_evaluation_and_recomputation_leave_histories_alone() -> None:
    run = start(DELAYED | {"eval_iters": 1})
    train(run, 1)
    before = {name: history.clone() for name, history in histories_of(run).histories().items()}
    evaluate(run, RaggedDataset(run.vocab_size, run.config.data.seq_length), 1)
    assert not any(layer.recorded.any() for layer in histories_of(run).layers.values())
    again = start(DELAYED | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
    train(again, 1)
    assert all(torch.equal(history, histories_of(again).histories()[name]) for name, history in before.items())


def test_a_step_that_overflows_leaves_the_last_scales() -> None:
    run = start(DELAYED)
    train(run, 1)
    name, layer = next(iter(histories_of(run).layers.items()))
    before = layer.history.clone()
    layer.recorded.copy_(torch.tensor([torch.inf, torch.nan, 2.0]))
    histories_of(run).update()
    assert torch.equal(histories_of(run).histories()[name][0], torch.tensor([before[0, 0], before[0, 1], 2.0]))
    assert torch.equal(histories_of(run).histories()[name][1], before[0])


def test_what_was_zeros_alone_leaves_the_last_scales() -> None:
    """An expert without tokens has no amax: a scale of 1 would round the next step's gradients to 0."""
    run = start(DELAYED)
    train(run, 1)
    name, layer = next(iter(histories_of(run).layers.items()))
    before = layer.history.clone()
    layer.recorded.copy_(torch.tensor([0.0, 3.0, 0.0]))
    histories_of(run).update()
    assert torch.equal(histories_of(run).histories()[name][0], torch.tensor([before[0, 0], 3.0, before[0, 2]]))


def _back_to_the_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Histories one step after a rollback to a checkpoint, and one step after a resume."""
    narrow = DELAYED | {"bf16": True, "fp64": False, "fp8_param_gather": True, "use_distributed_optimizer": True}
    run = start(narrow | {"save": str(folder)})
    train(run, 1)
    save_run(run)
    train(run, 2)
    resumed = start(narrow | {"load": str(folder)})
    reader, _ = open_checkpoint(resumed.config)
    assert reader is not None
    run.state = run.load(resumed.config, reader)
    found = []
    for each in (run, resumed):
        train(each, 1)
        found.append({name: history.numpy() for name, history in histories_of(each).histories().items()})
    return found[0], found[1]


def test_a_run_that_goes_back_records_what_it_has_loaded(tmp_path: Path) -> None:
    """Not the amaxes of the previous weights, and not empty because a gather in FP8 recorded theirs."""
    for back, resumed in run_ranks(2, _back_to_the_checkpoint, tmp_path):
        assert back.keys() == resumed.keys()
        for name, history in resumed.items():
            np.testing.assert_array_equal(back[name], history, err_msg=name)


def test_what_is_lost_is_reported_by_layer(capsys: pytest.CaptureFixture) -> None:
    """With much too large scales everything is clamped, with much too small ones everything becomes 0."""
    run = start(DELAYED | {"fp8_statistics_interval": 1})
    train(run, 1)
    assert histories_of(run).losses() == []
    for name, amax in (("decoder.layers.0.mlp.linear_fc1", 1e-9), ("decoder.layers.1.mlp.linear_fc2", 1e9)):
        layer = histories_of(run).layers[name]
        layer.history.fill_(amax)
        layer.known_scales = None
    histories_of(run).count(wanted=True)
    train(run, 1)
    found = {(loss.layer, loss.role): (loss.saturated, loss.underflown) for loss in histories_of(run).losses()}
    assert len(found) == 2 * 4 * 3
    assert found["decoder.layers.0.mlp.linear_fc1", "weight"] == pytest.approx((1.0, 0.0), abs=1e-3)
    assert found["decoder.layers.1.mlp.linear_fc2", "input"] == pytest.approx((0.0, 1.0), abs=1e-3)
    assert found["decoder.layers.1.mlp.linear_fc2", "grad"] == (0.0, 1.0)
    assert found["decoder.layers.0.self_attention.linear_qkv", "weight"] == pytest.approx((0.0, 0.0), abs=0.05)
    FP8Statistics(run).print()
    assert "  decoder.layers.1.mlp.linear_fc2 grad: 0.0000%, 100.0000%\n" in capsys.readouterr().out


def test_the_log_says_which_layers_run_in_fp8() -> None:
    settings = {
        "fp8_format": "hybrid",
        "fp8_recipe": "rowwise",
        "num_layers": 6,
        "first_last_layers_bf16": True,
        "bf16": True,
    }
    line = describe_fp8(RunConfig.from_flat(settings | {"num_layers_at_end_in_bf16": 2}))
    assert "hybrid, rowwise" in line and "layers 1 to 3" in line and "bfloat16: layers 0, 4, 5, embedding" in line
    run = start(DELAYED | {"num_layers": 4, "first_last_layers_bf16": True})
    assert {name.split(".")[2] for name in histories_of(run).layers} == {"1", "2"}


@pytest.mark.parametrize(("algorithm", "length", "margin"), [("max", 3, 0), ("max", 2, 2), ("most_recent", 1, 1)])
def test_scales_are_the_formula_of_the_last_amaxes(algorithm: str, length: int, margin: int) -> None:
    """s = 448 / a / 2^margin, where a is the largest of the inputs of the last steps, or of the last one."""
    settings = {"fp8_amax_compute_algo": algorithm, "fp8_amax_history_len": length, "fp8_margin": margin}
    run = start(DELAYED | settings | {"lr": 0.3})
    name = "decoder.layers.1.mlp.linear_fc2"
    amaxes: list[float] = []
    note = lambda _, args: amaxes.append(max(amaxes.pop(), args[0].abs().max().item()))  # noqa: E731
    run.stages[0].get_submodule(name).register_forward_pre_hook(note)
    for _ in range(5):
        amaxes.append(0.0)
        train(run, 1)
    assert len(set(amaxes)) == 5
    layer = histories_of(run).layers[name]
    scale = layer.scale_of_amax("input", torch.ones(()), WHOLE)
    assert scale.item() == pytest.approx(448.0 / max(amaxes[-length:]) / 2.0**margin, rel=1e-6)


def test_first_and_last_layers_in_bf16() -> None:
    """Only the layers between them have products in FP8: the layers before them compute the bits of bfloat16."""
    plain = {"num_layers": 5, "bf16": True, "fp64": False}
    some = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    inputs: list[list[torch.Tensor]] = []
    for settings in (plain, DELAYED | plain | some):
        run = start(settings)
        inputs.append([])
        note = lambda _, args, seen=inputs[-1]: seen.append(args[0].detach().clone())  # noqa: E731
        for number in (2, 3):
            run.stages[0].get_submodule(f"decoder.layers.{number}").register_forward_pre_hook(note)
        train(run, 1)
    assert {int(name.split(".")[2]) for name in histories_of(run).layers} == {2}
    (third, fourth), (third_in_fp8, fourth_in_fp8) = (seen[:2] for seen in inputs)
    assert third_in_fp8.equal(third) and not fourth_in_fp8.equal(fourth)


def test_statistics_change_no_bit() -> None:
    counted = start(DELAYED | {"fp8_statistics_interval": 1})
    assert train(counted, 3) == train(start(DELAYED), 3)
