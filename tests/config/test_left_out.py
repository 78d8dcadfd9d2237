"""Settings that a comparison of layouts leaves out or shortens are named."""

from __future__ import annotations

import pytest

from megatron_core.commands.verify_layout import LayoutOptions, task_of
from megatron_core.config import RunConfig
from megatron_core.config.training import TrainingConfig
from megatron_core.planner.layout import Layout
from megatron_core.verify.comparison import Task, changed_lines, changed_values, not_compared
from megatron_core.verify.shrink import OF_COMPARISON, at_full_size, short_schedules, shrunk, small_run
from megatron_core.verify.table import setting_words

MODEL = {"num_layers": 4, "num_attention_heads": 4}
SCHEDULES = """
    lr_decay_style lr_warmup_iters lr_warmup_fraction lr_warmup_samples lr_decay_iters lr_decay_samples
    lr_wsd_decay_iters lr_wsd_decay_samples rampup_batch_size step_batch_size_schedule seq_length_warmup"""
"""Settings of ``small_run`` that are shortened if they are legal."""


@pytest.mark.parametrize("full_size", [False, True])
def test_every_setting_that_is_reset_is_named(full_size: bool) -> None:
    layout, defaults = Layout(tp=2), RunConfig().flat()
    for name in small_run().keys() - {*OF_COMPARISON, *SCHEDULES.split()}:
        config = RunConfig.from_flat(MODEL | {name: not defaults[name] if defaults[name] in (True, False) else "a"})
        small = at_full_size(config, 32) if full_size else shrunk(config, [layout])
        assert name in not_compared(Task(small, [layout]), config, "float64"), name


def test_settings_that_a_dtype_or_a_layout_replaces_are_named() -> None:
    flags = MODEL | {"fp32_residual_connection": True, "bf16": True, "decoder_first_pipeline_num_layers": 1}
    flags |= {"pipeline_model_parallel_size": 2, "zero3_keep_after_forward": True, "zero_stage": 3}
    config = RunConfig.from_flat(flags)
    task = task_of(config, LayoutOptions(all=True, world_size=(2,), dtype="float64"))
    assert task.not_compared == {
        "decoder_first_pipeline_num_layers": 1,
        "fp32_residual_connection": True,
        "zero3_keep_after_forward": True,
    }
    assert "fp32_residual_connection" not in task_of(config, LayoutOptions(all=True, world_size=(2,))).not_compared
    layout = Layout(pp=2, dp=2, zero_stage=3)
    own = not_compared(Task(config, [layout], task.not_compared), config, "bfloat16")
    assert own == {}


def test_changed_values_are_named() -> None:
    config = RunConfig.from_flat(MODEL | {"clip_grad": 2.0, "adam_eps": 1e-5, "init_method_std": 0.01})
    task = Task(shrunk(config, [Layout(tp=2)]), [Layout(tp=2)])
    text = ", ".join(changed_lines(changed_values(task, config, "float64")))
    assert "clip_grad 2.0 -> 0.5" in text and "adam_eps 1e-05 -> 0.001" in text
    assert "init_method_std 0.01 -> 0.05" in text and "vocab_size None -> 101" in text


RAMPS = [
    ({"rampup_batch_size": (8, 8, 1000), "global_batch_size": 64}, "rampup_batch_size (8, 8, 1000) -> (8, 8, 8)"),
    ({"step_batch_size_schedule": ("0:8", "1M:64")}, "step_batch_size_schedule"),
]


@pytest.mark.parametrize(("ramp", "text"), RAMPS)
def test_batch_ramps_take_effect_in_the_second_step(ramp: dict[str, object], text: str) -> None:
    config = RunConfig.from_flat(MODEL | ramp)
    small = shrunk(config, [Layout(pp=2), Layout(dp=2)])
    sizes = small.training.batch_growth(2, small.data.seq_length)
    assert (sizes.at(0), sizes.at(8), sizes.at(24)) == (8, 16, 16)
    assert text in ", ".join(changed_lines(changed_values(Task(small, [Layout(pp=2)]), config, "float64")))
    assert not not_compared(Task(small, [Layout(pp=2)]), config, "float64")


def test_length_and_learning_rate_change_in_the_first_steps() -> None:
    rates = {"lr_decay_style": "cosine", "lr_warmup_iters": 2000, "lr": 1e-2, "min_lr": 1e-3, "lr_decay_iters": 9000}
    config = RunConfig.from_flat(MODEL | rates | {"seq_length": 4096, "seq_length_warmup": (512, 512, 1000)})
    small = shrunk(config, [Layout(tp=2, cp=2)])
    lengths = small.data.length_growth
    assert (lengths.at(0), lengths.at(8), small.data.seq_length) == (16, 32, 32)
    optimizer = small.optimizer
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters, optimizer.lr_decay_iters) == ("cosine", 2, 8)
    assert (optimizer.lr, optimizer.min_lr) == (1e-3, 1e-4)


def test_a_schedule_that_does_not_fit_a_layout_is_left_out() -> None:
    """Outer groups are compared with one process for a constant batch."""
    config = RunConfig.from_flat(
        MODEL | {"outer_steps": 2, "outer_groups": 2, "rampup_batch_size": (8, 8, 99), "global_batch_size": 64}
    )
    assert not any("rampup_batch_size" in settings for settings in short_schedules(config, 8, 16))
    for small in (shrunk(config, [Layout(dp=2)]), at_full_size(config, 32)):
        assert small.training.rampup_batch_size == TrainingConfig().rampup_batch_size
        assert "rampup_batch_size" in not_compared(Task(small, [Layout(dp=2)]), config, "float64")


def test_words_are_short() -> None:
    words = setting_words({"save": "x", "dpo": True, "data_path": ("a" * 50,)})
    assert words == ["save=x", "dpo", "data_path"]
