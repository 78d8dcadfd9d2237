"""Comparison of the learning-rate schedules with DeepSpeed's own, step by step."""

import json
from typing import Any

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.choice import choose_scheduler
from deepspeed.translation import translate
from megatron_core.errors import ConfigError
from tests.drop_in.deepspeed import traces
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": [0.5, 0.7], "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 19, "warmup_num_steps": 4, "warmup_min_lr": 0.01}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 19, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 24, "warmup_num_steps": 9, "warmup_type": "linear", "cos_min_ratio": 0.2}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.5}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 5}),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 7, "cycle_second_step_size": 4}
        | {"cycle_first_stair_count": 3, "decay_step_size": 2, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01},
    ),
]


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_every_step_has_deepspeeds_learning_rates_and_momenta() -> None:
    rows, arguments, configs = ask(Task("tests.drop_in.deepspeed.traces:rates", (CASES,)))
    own_rows, own_arguments, own_configs = traces.rates(CASES)
    for ours, theirs in zip(own_rows, rows, strict=True):
        both = [torch.tensor(each, dtype=torch.float64) for each in (ours, theirs)]
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-15)
    assert own_arguments == arguments
    assert json.loads(json.dumps(own_configs)) == configs


def test_a_schedule_resumes_at_its_position() -> None:
    rates = []
    for resumed in (False, True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = lr_schedules.WarmupDecayLR(optimizer, 9, warmup_num_steps=3)
        if resumed:
            schedule.load_state_dict({"last_batch_iteration": 4})
        else:
            for _ in range(5):
                schedule.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] > 0


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_steps_of_warm_up_are_two(name: str) -> None:
    """The Trainer fills in its default of 0; the fewest steps of DeepSpeed's classes are 2."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    params = {} if name == "WarmupLR" else {"total_num_steps": 9}
    steps = [
        getattr(lr_schedules, name)(optimizer, warmup_num_steps=count, **params).warmup_num_steps for count in (0, 1)
    ]
    assert steps == [2, 2]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupLR", {"warmup_max_lr": "x"}, "max_lr='x' must be a number"),
    ("WarmupLR", {"warmup_min_lr": [0.1, None]}, "min_lr=None must be a number"),
    ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps must be a positive integer, got True"),
    ("WarmupDecayLR", {"total_num_steps": "9"}, "total_num_steps='9' must be a number"),
    ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": "x"}, "cos_min_ratio='x' must be a number"),
    ("LRRangeTest", {"lr_range_test_step_rate": "x"}, "lr_range_test_step_rate='x' must be a number"),
    ("LRRangeTest", {"lr_range_test_staircase": "no"}, "lr_range_test_staircase='no' must be true or false"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": float("nan")}, "cycle_max_lr=nan must be a number"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_lr_rate": "x"}, "decay_lr_rate='x' must be a number"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": 1}, "cycle_momentum=1 must be true"),
    ("StepLR", {"step_size": "x"}, "step_size='x' must be of the type int"),
    ("ExponentialLR", {"gamma": "x"}, "gamma='x' must be of the type float"),
    ("StepLR", {}, "missing 1 required positional argument"),
    ("LambdaLR", {"lr_lambda": "x"}, "of LambdaLR: "),
]


@pytest.mark.parametrize(("name", "params", "message"), WRONG)
def test_wrong_parameters_are_one_error(name: str, params: dict[str, Any], message: str) -> None:
    translation = translate({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}, 1)
    with pytest.raises(ConfigError) as error:
        choose_scheduler(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1), None, translation)
    assert message in str(error.value) and f"of {name}: " in str(error.value)
