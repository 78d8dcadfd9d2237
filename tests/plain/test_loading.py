"""Training that continues from a checkpoint is the plain training of the rest, with the part of the state that settings
choose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.parallel import World
from megatron_core.training.compatibility import model_settings, moved_end, with_stored_schedule
from megatron_core.training.pretrain import read_settings
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from tests.plain.engine import BASE, BOUND, engine_trace, samples_of, settings_of, start_of, started
from tests.plain.norms import Weights
from tests.plain.rows import FIXED, LLAMA, Values
from tests.plain.training import Record, train

ALONE = World(0, 1, 0, torch.device("cpu"))
MODEL: Values = LLAMA | FIXED | {"eval_iters": 0}
ADAM = MODEL | {"lr_decay_style": "cosine"}
SGD = MODEL | {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1}
"""Without a state, so that a training from given weights is the rest of another one."""
SAMPLES = samples_of(BASE, 24)
SIZE = 4
"""Samples of a step."""


def advanced(values: Values, steps: int, saved_after: tuple[int, ...] = ()) -> Run:
    """The engine after some steps, with checkpoints."""
    run = started(values, ALONE)
    for _ in range(steps):
        train_step(run)
        if run.state.iteration in saved_after:
            run.saver.save(run.state)
    run.saver.close()
    return run


def plainly(values: Values, steps: int, start: Weights | None = None, skipped: int = 0) -> Record:
    """The plain training of ``steps`` from the initial or other weights, without the samples of ``skipped`` steps."""
    first = start_of(engine_trace(values, 0)) if start is None else start
    return train(settings_of(values), first, SAMPLES[skipped * SIZE :], steps)


def check(run: Run, expected: Weights) -> None:
    """The weights of the engine are the expected ones."""
    for name, parameter in run.stages[0].named_global_parameters():
        plain = expected[name]
        torch.testing.assert_close(parameter.detach()[: len(plain)], plain, rtol=BOUND, atol=1e-12)


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, str]:
    """A folder that a run saves in, and others load from."""
    return {"save": str(tmp_path / "run")}


@pytest.mark.parametrize("settings", [{}, {"verify_checkpoint": False}, {"exit_on_missing_checkpoint": True}])
def test_everything_continues(settings: Values, folder: dict[str, str]) -> None:
    """Moments, number of the step, and samples."""
    advanced(ADAM | folder, 2, (2,))
    check(advanced(ADAM | settings | {"load": folder["save"]}, 2), plainly(ADAM, 4).weights)


def test_an_older_checkpoint(folder: dict[str, str]) -> None:
    advanced(ADAM | folder, 2, (1, 2))
    older = ADAM | {"load": folder["save"], "ckpt_step": 1}
    check(advanced(older, 0), plainly(ADAM, 1).weights)
    check(advanced(older, 1), plainly(ADAM, 2).weights)


def test_finetuning_begins_at_the_first_step_and_sample(folder: dict[str, str]) -> None:
    """Only the weights are loaded."""
    advanced(ADAM | folder, 2, (2,))
    tuned = advanced(ADAM | {"load": folder["save"], "finetune": True}, 2)
    check(tuned, plainly(ADAM, 2, plainly(ADAM, 2).weights).weights)


def test_without_optimizer_state(folder: dict[str, str]) -> None:
    """Momentum begins at zero; the samples continue."""
    momentum = SGD | {"sgd_momentum": 0.7}
    advanced(momentum | folder, 2, (2,))
    fresh = advanced(momentum | {"load": folder["save"], "no_load_optim": True}, 2)
    check(fresh, plainly(momentum, 2, plainly(momentum, 2).weights, skipped=2).weights)


def test_rates_of_this_run_or_of_the_checkpoint(folder: dict[str, str]) -> None:
    before = plainly(SGD, 2).weights
    advanced(SGD | folder, 2, (2,))
    changed = SGD | {"lr": 0.03, "load": folder["save"]}
    with pytest.raises(CheckpointError, match="--override-opt-param-scheduler"):
        advanced(changed, 0)
    own = advanced(changed | {"override_opt_param_scheduler": True}, 2)
    check(own, plainly(SGD | {"lr": 0.03}, 2, before, skipped=2).weights)
    stored = with_stored_schedule(RunConfig.from_flat(BASE | changed | {"use_checkpoint_opt_param_scheduler": True}))
    check(advanced(stored.flat(), 2), plainly(SGD, 4).weights)


def test_a_longer_training_with_the_rates_of_the_checkpoint(folder: dict[str, str]) -> None:
    """Their decay ends where it ended before, as in Megatron-LM, whose checkpoints have ``lr_decay_steps``."""
    advanced(ADAM | folder, 2, (2,))
    longer = {"train_iters": 12, "load": folder["save"], "use_checkpoint_opt_param_scheduler": True}
    stored = with_stored_schedule(RunConfig.from_flat(BASE | ADAM | longer))
    check(advanced(stored.flat(), 2), plainly(ADAM, 4).weights)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_iters": 12}, "the last step determines the learning rate .--lr-decay-iters or"),
        ({"train_iters": None, "train_samples": 48}, "train_iters was 6 and is None and train_samples was None and"),
        ({"train_iters": 12, "lr_decay_iters": 6}, "^$"),
        ({"train_iters": 12, "lr_decay_iters": 6, "weight_decay_incr_style": "linear"}, "determines the weight decay:"),
    ],
)
def test_rates_that_follow_the_length_of_the_training(changed: Values, words: str) -> None:
    before, now = (RunConfig.from_flat(BASE | ADAM | values) for values in ({}, changed))
    assert re.search(words, moved_end(before.flat(), now))


def test_model_of_the_checkpoint(folder: dict[str, str]) -> None:
    """Flags without any setting of the model."""
    advanced(SGD | folder, 2, (2,))
    of_checkpoint = (*model_settings(), "vocab_size")
    flags = ["--load", folder["save"], "--use-checkpoint-args"]
    for name, value in (BASE | SGD).items():
        if name not in of_checkpoint and value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    config, _ = read_settings("test", flags)
    assert config.model.swiglu and config.model.hidden_size == BASE["hidden_size"]
    check(advanced(config.flat(), 2), plainly(SGD, 4).weights)
