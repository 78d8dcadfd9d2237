"""The exact log lines, and the progress bar."""

from __future__ import annotations

import io
import math
import re
from datetime import datetime

import pytest

from megatron_core.monitor.console import WIDTH, ConsoleSink, short_line
from megatron_core.reports.megatron_lines import MegatronConsole, step_line, validation_block
from tests.monitor.examples import step, validation

NOW = datetime(2026, 11, 21, 2, 45, 32, 107490)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_is_megatron_lms():
    assert step_line([step(2)], NOW) == (
        " [2026-11-21 02:45:32.107490] iteration        2/       4 | consumed samples:            8 | "
        "elapsed time per iteration (ms): 41.0 | throughput per GPU (TFLOP/s/GPU): 2.50 | tokens per second: 1560 | "
        "learning rate: 5.500000E-04 | global batch size:     4 | lm loss: 4.809311E+00 | loss scale: 1.0 | "
        "grad norm: 1.257 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_short_line_has_the_values_that_users_watch():
    assert short_line([step(2)], NOW) == (
        "02:45  iteration 2/4  loss 4.8093  norm 1.257  lr 5.5e-04  41.0 ms  1,560 tok/s"
    )
    many = {"auxiliary_losses": {"load_balancing_loss": 0.5, "z_loss": 0.25}, "params_norm": 3.0, "product_rate": 5e12}
    large = {"iteration": 250_000, "total_iterations": 500_000, "elapsed_ms": 43_210.5, "tokens_per_second": 9.9e6}
    line = short_line([step(1, loss=2.0), step(**large | many | {"loss": math.nan, "skipped": True})], NOW)
    assert len(line) <= WIDTH and "loss 2.0" in line and "skipped 1  nan 1  " in line and line.endswith("  21.63 s")
    assert "  43.21 s  9,900,000 tok/s" in short_line([step(**large | {"iteration": 9})], NOW)
    indexed = step(250_000, total_iterations=500_000, auxiliary_losses={"z_loss": 0.25, "indexer_loss": 0.5})
    assert "  loss 4.8093  indexer_loss 0.5000  norm " in short_line([indexed], NOW)
    assert short_line([step(1, **many)], NOW).endswith("  util 50%")
    assert "left" not in short_line([step(1, total_iterations=100_000)], NOW)
    for milliseconds, left in ((0.5, "50 s"), (36.0, "60 min"), (72.0, "2.0 h"), (2592.0, "3.0 days")):
        later = step(2, total_iterations=100_002, elapsed_ms=milliseconds)
        assert short_line([later], NOW).endswith(f"  {left} left")
    assert short_line([step(1, **many | {"grad_norm": None})], NOW).endswith("  util 50%  z_loss 0.2500")


def end_of_run(kind: type[ConsoleSink] = ConsoleSink, **settings: object) -> list[str]:
    out = io.StringIO()
    sink = kind(1, out=out, err=Terminal(), **settings)
    for event in (step(3, loss=5.0, elapsed_ms=10.0), step(4, loss=3.0, elapsed_ms=30.0, skipped=True)):
        sink.on_step(event)
    sink.on_validation(validation(4))
    sink.close()
    return out.getvalue().splitlines()


def test_the_table_at_the_end_sums_up_the_run():
    assert end_of_run()[-7:] == [
        "  steps            2, to iteration 4 of 4",
        "  skipped steps    1",
        "  loss             5.0000 in the first step, 3.0000 in the last",
        "  validation loss  4.6346",
        "  tokens           62 in these steps, 256 in all",
        "  time of steps    0:00:00, 20.0 ms each",
        "  speed            1,560 tokens/s",
    ]


def test_formats_and_quiet():
    assert end_of_run(quiet=True) == ["validation loss at iteration 4: 4.6346, perplexity 102.9823"]
    assert end_of_run(MegatronConsole)[-3:] == validation_block(validation(4)).splitlines()
    assert "consumed samples" in end_of_run(MegatronConsole)[0]


def test_colours_on_terminals_only():
    shown = Terminal()
    sink = ConsoleSink(1, out=shown, err=io.StringIO())
    sink.on_step(step(1))
    sink.on_step(step(2, loss=math.nan))
    normal, alarming = shown.getvalue().splitlines()
    assert "\x1b[1mloss 4.8093\x1b[0m" in normal and alarming.startswith("\x1b[31m")


@pytest.mark.parametrize(
    ("flops", "shown"),
    [
        (0.0, "(GFLOP/s/GPU): 0.00"),
        (3.456e6, "(GFLOP/s/GPU): 0.00346"),
        (4.5678e10, "(GFLOP/s/GPU): 45.7"),
        (9.994e11, "(GFLOP/s/GPU): 999"),
        (1.23456e12, "(TFLOP/s/GPU): 1.23"),
        (4.7123e14, "(TFLOP/s/GPU): 471"),
    ],
)
def test_throughput_has_three_digits_on_a_cpu_too(flops: float, shown: str) -> None:
    line = step_line([step(1, model_flops_per_second=flops, tokens_per_second=1234.5)], NOW)
    assert f"throughput per GPU {shown} |" in line
    assert "tokens per second: 1234 |" in line


def test_the_validation_block_is_megatron_lms():
    line = " validation loss at iteration 2 | lm loss value: 4.634557E+00 | lm loss PPL: 1.029823E+02 | "
    rule = "-" * (len(line) + 1)
    assert validation_block(validation(2)) == f"{rule}\n{line}\n{rule}"
    assert "at iteration 2 on test set |" in validation_block(validation(2, split="test"))


def test_a_line_sums_up_the_steps_since_the_last_one():
    line = step_line([step(1, loss=2.0, elapsed_ms=10.0), step(2, loss=4.0, elapsed_ms=20.0)], NOW)
    assert "lm loss: 3.000000E+00" in line and "(ms): 15.0" in line


def test_nan_and_negative_losses_are_shown():  # C47
    line = step_line([step(1), step(2, loss=math.nan)], NOW)
    assert "lm loss: nan |" in line and "number of nan iterations:   1 |" in line
    assert "lm loss: inf |" in step_line([step(1, loss=math.inf)], NOW)
    assert "lm loss: -1.000000E+00 |" in step_line([step(1, loss=-1.0)], NOW)


def test_skipped_steps_are_counted_and_left_out_of_the_mean():  # C47
    line = step_line([step(1, loss=2.0), step(2, loss=9.0, skipped=True)], NOW)
    assert "lm loss: 2.000000E+00" in line and "number of skipped iterations:   1 |" in line
    line = step_line([step(1, loss=9.0, skipped=True, grad_norm=None)], NOW)
    assert "lm loss: 9.000000E+00" in line and "grad norm" not in line


def lines_at(iterations: range, log_interval: int) -> list[int]:
    out = io.StringIO()
    sink = ConsoleSink(log_interval, out=out, err=io.StringIO())
    for iteration in iterations:
        sink.on_step(step(iteration, total_iterations=7))
    sink.close()
    return [int(number) for number in re.findall(r"iteration +(\d+)/", out.getvalue())]


def test_lines_come_at_the_interval_at_both_ends_and_at_a_break():
    assert lines_at(range(1, 8), 3) == [1, 3, 6, 7]
    assert lines_at(range(4, 6), 3) == [5]


def test_the_bar_goes_to_a_terminal_on_standard_error_alone():
    out, err = io.StringIO(), Terminal()
    sink = MegatronConsole(2, out=out, err=err)
    for iteration in (3, 4):
        sink.on_step(step(iteration))
    sink.on_validation(validation(4))
    sink.close()
    assert "4/4" in err.getvalue() and "loss 4.8093" in err.getvalue() and "tokens/s" in err.getvalue()
    assert "left" in err.getvalue() and "iteration        4/" not in err.getvalue()
    assert out.getvalue().count("\n") == 4 and "tokens/s" not in out.getvalue()


def test_there_is_no_bar_without_a_terminal_or_with_no_progress():
    for progress, err in ((True, io.StringIO()), (False, Terminal())):
        sink = ConsoleSink(2, progress=progress, out=io.StringIO(), err=err)
        sink.on_step(step(1))
        sink.close()
        assert err.getvalue() == ""
