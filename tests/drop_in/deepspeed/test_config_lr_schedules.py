"""Comparison of the learning-rate schedules with DeepSpeed's own, step by step."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.runtime import lr_schedules

REFERENCE = Path(sys.prefix).resolve() / "reference"
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
TRACE = """
import torch


def trace(module, kind, params):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.3, 0.2)]
    optimizer = torch.optim.AdamW(groups)
    schedule = getattr(module, kind)(optimizer, **params)
    rows = []
    for step in range(26):
        rows.append([[group["lr"], *group["betas"]] for group in optimizer.param_groups])
        schedule.step()
    return rows
"""
THEIRS = """
import argparse, json, sys
from deepspeed.runtime import lr_schedules
cases = json.load(sys.stdin)
parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
configs = {k: lr_schedules.get_config_from_args(parser.parse_args(["--lr_schedule", k])) for k, _ in cases}
print("RESULT" + json.dumps([[trace(lr_schedules, *case) for case in cases], vars(parser.parse_args([])), configs]))
"""


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_every_step_has_deepspeeds_learning_rates_and_momenta() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REFERENCE), "DS_ACCELERATOR": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", TRACE + THEIRS], input=json.dumps(CASES), capture_output=True, text=True, env=environment
    )
    assert found.returncode == 0, found.stderr
    rows, arguments, configs = json.loads(found.stdout.partition("RESULT")[2])
    scope: dict[str, Any] = {}
    exec(TRACE, scope)
    for case, expected in zip(CASES, rows, strict=True):
        ours = scope["trace"](lr_schedules, *case)
        both = [torch.tensor(each, dtype=torch.float64) for each in (ours, expected)]
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-15)
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == arguments
    ours_by_name = {k: lr_schedules.get_config_from_args(parser.parse_args(["--lr_schedule", k])) for k, _ in CASES}
    assert json.loads(json.dumps(ours_by_name)) == configs


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
