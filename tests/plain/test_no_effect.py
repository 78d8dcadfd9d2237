"""Settings without a numerical effect: with and without them, a run has equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.parallel import World
from megatron_core.training.callbacks import Callback
from megatron_core.training.pretrain import Job
from megatron_core.training.step import StepResult
from tests.plain.engine import started

LONG = pytest.mark.whole_matrix
PATH = "PATH"
"""A path in the test's folder, in values of settings."""
SHORT = {"train_iters": 3, "eval_iters": 0, "log_interval": 1, "hidden_dropout": 0.1, "num_workers": 0}
EVALUATED = {"eval_interval": 1, "eval_iters": 2}
SAVED = {"save": PATH, "save_interval": 1}
PROFILE = {"profile": True, "profile_dir": PATH, "profile_step_start": 0, "profile_step_end": 2}
RERUN = {"rerun_mode": "validate_results"}
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "evaluations": EVALUATED,
    "evaluations of another size": EVALUATED | {"eval_global_batch_size": 2},
    "later evaluations": EVALUATED | {"start_eval_at_iter": 2},
    "largest logits": {"log_max_attention_logit": True},
    "checkpoints": SAVED,
    "checkpoints, some kept": SAVED | {"keep_last": 2, "save_retain_interval": 2},
    "checkpoints in the background": SAVED | {"async_save": True},
    "checkpoints of another run": SAVED | {"overwrite_checkpoints": True},
    "checkpoints of Megatron Core": SAVED | {"ckpt_format": "torch_dist", "ckpt_format_interval": 2},
    "checkpoints of torch": SAVED | {"ckpt_format": "torch_dcp"},
    "temporary checkpoints": {"save": PATH, "non_persistent_save_interval": 1, "non_persistent_global_ckpt_dir": PATH},
    "checkpoints without optimizer": SAVED | {"no_save_optim": True},
    "threads that read": {"num_workers": 3},
    "a file of metrics": {"metrics_file": PATH},
    "lines of Megatron-LM": {"log_format": "megatron", "log_interval": 2},
    "no lines": {"quiet": True},
    "no progress": {"progress": False},
    "norms": {"log_params_norm": True, "log_num_zeros_in_grad": True, "log_norms_by_layer": True},
    "no times": {"record_times": False},
    "times": {"timing_log_level": 2, "timing_log_option": "all", "peak_tflops": 1.0},
    "longest times": {"timing_log_level": 1, "timing_log_option": "max"},
    "slow ranks": {"log_straggler": True, "straggler_minmax_count": 2},
    "poisoned buffers": {"poison_buffers": True},
    "trace of the pipeline": {"trace_pipeline": PATH},
    "TensorBoard": {"tensorboard_dir": PATH},
    "Prometheus": {"prometheus_file": PATH},
    "profile": PROFILE,
    "profile of torch": PROFILE
    | {
        "use_pytorch_profiler": True,
        "pytorch_profiler_collect_shapes": True,
        "pytorch_profiler_collect_callstack": True,
        "profile_ranks": (0,),
    },
    "hashes": {
        "metrics_file": PATH,
        "record_hashes": True,
        "record_hashes_by_tensor": True,
        "record_hashes_interval": 2,
    },
    "checks of replicas and links": {"replica_check_interval": 1, "link_check_interval": 1},
    "steps computed twice": {"rerun_mode": "report_stats"},
    "suspicious steps computed again": RERUN,
    "bad steps allowed": {"max_bad_steps": 2, "max_rollbacks": 1, "save_bad_steps": 0} | SAVED,
    "spikes": {"spike_factor": 100.0, "max_bad_steps": 1} | SAVED,
    "infinite values allowed": {"check_for_nan_in_loss_and_grad": False},
    "overlapped gradients": {"overlap_grad_reduce": True},
    "overlapped weights": {"zero_stage": 1, "overlap_param_gather": True, "overlap_grad_reduce": True},
    "state on disk": {"optimizer_offload_dir": PATH},
    "half of the state on disk": {"optimizer_offload_dir": PATH, "optimizer_offload_fraction": 0.5},
    "deterministic": {"deterministic_mode": True},
    "time limit of messages": {"distributed_timeout_minutes": 3.0},
    "time limit of the run": {"exit_duration_in_mins": 60.0, "exit_interval": 100},
}


class Recorder(Callback):
    """Keeps the losses and norms of a run."""

    def __init__(self) -> None:
        self.results: list[tuple[float, float]] = []

    def after_step(self, result: StepResult) -> None:
        """Keep a result."""
        self.results.append((result.loss, result.grad_norm))


def trained(values: dict[str, Any], folder: Path) -> tuple[list, dict[str, torch.Tensor]]:
    """Losses and norms of a whole training, and the weights after it."""
    placed = {name: str(folder / name) if value == PATH else value for name, value in values.items()}
    run = started(SHORT | placed, World(0, 1, 0, torch.device("cpu")))
    recorder = Recorder()
    Job().train(run, [recorder])
    named = [pair for stage in run.stages.values() for pair in stage.named_global_parameters()]
    read = run.data_parallel.reading([parameter for _, parameter in named])
    rows = run.vocab_size
    return recorder.results, {
        name: (parameter[:rows] if name.startswith("embedding.word") else parameter).detach().clone()
        for (name, _), parameter in zip(named, read, strict=True)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, dict[str, torch.Tensor]]:
    return trained({}, tmp_path_factory.mktemp("alone"))


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=LONG if "use_pytorch_profiler" in WITHOUT_EFFECT[case] else ())
        for case in WITHOUT_EFFECT
    ],
)
def test_bits_are_equal(case: str, alone: tuple[list, dict], tmp_path: Path) -> None:
    results, weights = trained(WITHOUT_EFFECT[case], tmp_path)
    assert results == alone[0]
    assert len(results) == SHORT["train_iters"]
    assert weights.keys() == alone[1].keys()
    for name, expected in alone[1].items():
        assert weights[name].equal(expected), name


def test_an_effect_is_seen(alone: tuple[list, dict], tmp_path: Path) -> None:
    results, weights = trained({"weight_decay": 0.011}, tmp_path)
    assert results != alone[0]
    assert any(not weights[name].equal(expected) for name, expected in alone[1].items())
