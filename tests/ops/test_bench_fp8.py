"""The benchmark of FP8 for GPUs runs on a CPU with tiny sizes."""

from __future__ import annotations

import pytest

from benchmarks.bench_fp8_gpu import Settings, products, steps

RUNS = ("bf16", "delayed, hybrid", "blockwise, e4m3")


def test_runs_are_timed(capsys: pytest.CaptureFixture) -> None:
    tiny = {"layers": 1, "hidden": 64, "ffn": 96, "heads": 4, "length": 32, "vocab": 64, "repeats": 1, "warm_ups": 0}
    settings = Settings(device="cpu", runs=RUNS, **tiny)
    rows = steps(settings) + products(settings)
    names = [f"{run}, {part}{one}" for part in ("fc1", "fc2") for run in RUNS for one in ("", ", one product")]
    assert [row.contender for row in rows] == [f"{run}, step" for run in RUNS] + names
    assert all(row.value > 0 for row in rows) and rows[0].ratio == 1.0
    assert "blockwise: dequantised matrices, because torch has this product on" in capsys.readouterr().out
