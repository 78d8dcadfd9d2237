"""The first cause of a diagnosis is the planted one, in synthetic records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_core.commands.diagnose import main
from megatron_core.errors import DataError
from megatron_core.reports.diagnosis import Change, Diagnosis
from megatron_core.reports.diagnosis_rules import diagnose
from megatron_core.reports.meter import Traffic
from megatron_core.reports.metrics import rank_metrics_file, read_run
from megatron_core.reports.summary import RunSummary
from tests.reports.planted import write_run

WORK = {"forward": 0.1, "backward": 0.2}
PP = [{"pp": 0}, {"pp": 1}]


def _diagnosis(folder: Path) -> Diagnosis:
    return diagnose(RunSummary.of(read_run(folder)))


def _sent(exposed: float, size: float = 1e9, in_flight: float | None = None) -> Traffic:
    return Traffic(4, size, exposed, exposed if in_flight is None else in_flight)


def _expert(*tokens: int) -> dict[str, Any]:
    return {"expert_load": {0: [*tokens, 0]}, "config": {"expert_model_parallel_size": 2}}


PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "slow rank": (
        {"ranks": [WORK, {k: 2 * v for k, v in WORK.items()}, WORK],
         "traffic": [{"dp all_reduce": _sent(0.32)}, {"dp all_reduce": _sent(0.02)}, {"dp all_reduce": _sent(0.32)}]},
        "test or replace",
    ),
    "data loading": (
        {"ranks": [WORK | {"data": 0.2}] * 2, "config": {"num_workers": 0}}, "--num-workers 2",
    ),
    "checkpoint": (
        {"ranks": [WORK | {"checkpoint": 0.1}] * 2, "config": {"save_interval": 5}}, "--save-interval 10",
    ),
    "evaluation": (
        {"ranks": [WORK | {"evaluation": 0.2}] * 2, "config": {"eval_interval": 4}}, "--eval-interval 8",
    ),
    "optimizer": ({"ranks": [WORK | {"optimizer": 0.3}] * 2}, "--use-distributed-optimizer"),
    "exposed communication over tp": (
        {"ranks": [WORK] * 2, "coordinates": [{"tp": 0}, {"tp": 1}], "traffic": [{"tp all_reduce": _sent(0.3)}] * 2,
         "config": {"tensor_model_parallel_size": 2}},
        "--tensor-model-parallel-size 1",
    ),
    "exposed communication over dp": (
        {"ranks": [WORK] * 2, "traffic": [{"dp all_reduce": _sent(0.2)}] * 2}, "--overlap-grad-reduce",
    ),
    "exposed communication over ep": (
        {"ranks": [WORK] * 2, "coordinates": [{"ep": 0}, {"ep": 1}], "traffic": [{"ep all_to_all": _sent(0.2)}] * 2},
        "--expert-model-parallel-size",
    ),
    "slow link": (
        {"ranks": [WORK] * 6, "coordinates": [{"tp": i % 2, "dp": i // 2} for i in range(6)],
         "traffic": [{"tp all_gather": _sent(0.4 if i > 3 else 0.02)} for i in range(6)]},
        "cables",
    ),
    "pipeline bubble": (
        {"ranks": [WORK | {"pipeline": 0.15}] * 2, "coordinates": PP, "global_batch_size": 8,
         "config": {"pipeline_model_parallel_size": 2}},
        "--pipeline-schedule zb_h1",
    ),
    "slow messages between stages": (
        {"ranks": [WORK | {"pipeline": 0.4}] * 2, "coordinates": PP, "global_batch_size": 64,
         "config": {"pipeline_model_parallel_size": 2}},
        "links between stages",
    ),
    "imbalanced stage": (
        {"ranks": [WORK | {"pipeline": 0.3}, {"forward": 0.2, "backward": 0.4}], "coordinates": PP,
         "about": [{"work": 1.0}, {"work": 2.0}], "global_batch_size": 64,
         "config": {"pipeline_model_parallel_size": 2}},
        "--pipeline-model-parallel-layout",
    ),
    "small micro-batches": (
        {"ranks": [WORK] * 2, "config": {"micro_batch_size": 1, "seq_length": 128},
         "model_flops_per_second": 1e13, "product_rate": 1e15},
        "--micro-batch-size 2",
    ),
    "full recomputation": ({"ranks": [WORK] * 2, "config": {"recompute_granularity": "full"}}, "selective"),
    "memory pressure": ({"ranks": [WORK] * 2, "memory": {"peak": 78 * 2**30}}, "selective"),
    "starving expert": (_expert(100, 100, 100, 1) | {"ranks": [WORK] * 2}, "--moe-aux-loss-coeff"),
    "unequal experts": (_expert(100, 20, 20, 20) | {"ranks": [WORK] * 2}, "--moe-aux-loss-coeff"),
    "compute": ({"ranks": [WORK] * 2}, ""),
}  # fmt: skip


@pytest.mark.parametrize("cause", PLANTED)
def test_planted_in_synthetic_records(cause: str, tmp_path: Path) -> None:
    planted, change = PLANTED[cause]
    found = _diagnosis(write_run(tmp_path, **planted))
    first = found.findings[0]
    assert first.cause == cause, found.text()
    assert change in " ".join(c.text for c in first.changes)
    assert 0 < first.share <= 1 + 1e-9 and all(0 <= c.gain <= first.share for c in first.changes)
    assert [c.gain for c in first.changes] == sorted((c.gain for c in first.changes), reverse=True)


def _gain_of_half_tp(folder: Path, **config: Any) -> float:
    """The predicted gain of one tensor-parallel rank instead of two, whose communication takes half of the time."""
    planted = PLANTED["exposed communication over tp"][0]
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **config}
    first = _diagnosis(write_run(folder, **planted | {"config": settings})).findings[0]
    assert first.share == pytest.approx(0.5)
    return max((change.gain for change in first.changes if "tensor_model_parallel_size" in change.settings), default=0)


def test_half_as_many_tensor_parallel_ranks_have_to_sum_gradients(tmp_path: Path) -> None:
    """By hand: bytes of one of two ranks in 0.3 s over tp, 10 collectives of half of [s, b, h] in 16 bits per layer and
    micro-batch; instead over dp the ring's 2 (n - 1) / n of float32 gradients."""
    tokens, h, layers, micros = 4 * 1024, 4096, 8, 8
    over_tp = 10 * layers * micros * tokens * h * 2 / 2
    parameters = layers * 12 * h * h + (32000 + 1024) * h
    seconds = 0.3 * 4 * parameters / over_tp
    gain = _gain_of_half_tp(tmp_path / "wide", hidden_size=h, num_attention_heads=32)
    assert gain == pytest.approx((0.3 - seconds) / 0.6, rel=0.15) and gain < 0.2
    narrow = _gain_of_half_tp(tmp_path / "narrow", hidden_size=256, num_attention_heads=32)
    assert 0.4 < narrow <= 0.5, "its gradients are small"
    few = _gain_of_half_tp(tmp_path / "few", hidden_size=h, num_attention_heads=32, seq_length=128)
    assert few == 0, "sums of gradients would take longer than what they replace"


def test_the_machine_of_a_prediction_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, **PLANTED["exposed communication over tp"][0])
    assert main([str(folder), "--hardware", "a100"]) == 0
    assert "--tensor-model-parallel-size 1" in capsys.readouterr().out
    assert main([str(folder), "--hardware", "abacus"]) == 1
    assert "hardware='abacus' is not known; legal: a100" in capsys.readouterr().err


def test_shares_and_gains_by_hand(tmp_path: Path) -> None:
    """Rank 1 takes 0.6 s instead of 0.3 of a step of 0.62; the links take 0.02 of it."""
    found = _diagnosis(write_run(tmp_path, **PLANTED["slow rank"][0]))
    assert found.findings[0].share == pytest.approx(0.3 / 0.62, rel=1e-6)
    assert "rank 1 [" in found.findings[0].evidence and "on node1" in found.findings[0].evidence
    summary = RunSummary.of(read_run(tmp_path))
    sending, waiting = summary.communication()["dp all_reduce"]
    assert sending == pytest.approx(0.02 / 0.62, rel=1e-6) and waiting == pytest.approx(0.6 / 3 / 0.62, rel=1e-6)
    assert summary.rates("dp all_reduce") == {(0, 1, 2): pytest.approx(1e9 / 0.02)}


def test_steps_of_an_earlier_layout_do_not_count(tmp_path: Path) -> None:
    """Equal ranks become unequal stages; the one with less work is slower for its work, but finishes first. Rank 0's
    own lines do not distinguish the layouts."""
    stages = [{"tp": 0, "pp": pp} for pp in (0, 1)]
    earlier = write_run(
        tmp_path / "earlier", [{k: 8 * v for k, v in WORK.items()}] * 2, traffic=[{"tp all_reduce": _sent(0.9)}] * 2,
        coordinates=[{"tp": tp} for tp in (0, 1)],
    )  # fmt: skip
    later = write_run(
        tmp_path / "later", [WORK, {k: 2 * v for k, v in WORK.items()}], coordinates=stages,
        about=[{"work": 1.0, "began": 100.0}, {"work": 5.0, "began": 100.0}],
    )  # fmt: skip
    alone = RunSummary.of(read_run(later))
    for rank in (0, 1):
        files = [rank_metrics_file(run / "metrics.jsonl", rank) for run in (earlier, later)]
        files[1].write_text("".join(file.read_text() for file in files))
    both = RunSummary.of(read_run(later))
    assert both.ranks == alone.ranks and not both.communication()
    assert not {"slow rank", "exposed communication over tp"} & {f.cause for f in _diagnosis(later).findings}


def test_a_gain_is_printed_where_one_is_predicted() -> None:
    assert str(Change("replace it", 0.25)) == "replace it (predicted gain 25.0%)"
    assert str(Change("replace it", 0.0)) == "replace it"


def test_restarts_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, [WORK])
    path = rank_metrics_file(tmp_path / "metrics.jsonl", 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    later = [lines[0] | {"began": 20.0, "iteration": 3}, *({**line, "at": line["at"] + 20} for line in lines[4:])]
    path.write_text("\n".join(map(json.dumps, lines + later)))
    first = _diagnosis(tmp_path).findings[0]
    assert first.cause == "restarts and skipped steps" and "repeated" in first.evidence


def test_missing_records_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, [WORK] * 3)
    (tmp_path / "metrics.ranks" / "rank00001.jsonl").unlink()
    assert main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "note: records of 1 of 3 ranks are missing (1)" in shown and "1. compute: 100.0% of the time" in shown
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["cause"] == "compute"
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "has no records of a run" in capsys.readouterr().err
    for file in (tmp_path / "metrics.ranks").iterdir():
        file.unlink()
    found = _diagnosis(tmp_path)
    assert found.findings == () and "the bottleneck is unknown" in found.notes[-1]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no metrics\n")
    with pytest.raises(DataError, match=r"notes.txt has no records of a run"):
        read_run(tmp_path / "notes.txt")


def test_a_change_gains_at_most_what_it_saves_of_the_cause(tmp_path: Path) -> None:
    """Of 4 tensor-parallel ranks 2 remain, whose collectives send (2 - 1) / 2 over (4 - 1) / 4 of the bytes of before,
    for twice the tokens of a replica; twice the batch halves the sums of gradients per token."""
    planted = PLANTED["exposed communication over tp"][0]
    settings = {"tensor_model_parallel_size": 4, "hidden_size": 256, "num_attention_heads": 32}
    sent = [{"tp all_reduce": Traffic(100, 1e9, 0.3, 0.3)}] * 4
    phases = [{"forward": 0.1, "backward": 0.2}] * 4
    folder = write_run(tmp_path / "tp", phases, traffic=sent, config=planted.get("config", {}) | settings)
    first = _diagnosis(folder).findings[0]
    gains = [change.gain for change in first.changes if change.settings.get("tensor_model_parallel_size") == 2]
    assert first.share == pytest.approx(0.5) and gains and max(gains) < 0.8 * first.share
    sent = [{"dp all_reduce": Traffic(1, 1e9, 0.3, 0.3)}] * 2
    first = _diagnosis(write_run(tmp_path / "dp", phases[:2], traffic=sent, config={})).findings[0]
    (gain,) = (change.gain for change in first.changes if "global_batch_size" in change.settings)
    assert first.share == pytest.approx(0.5) and 0.2 < gain <= 0.25 + 1e-9
