"""Rows of the parity matrix drawn at random from all settings of a model, a training and a layout.

``python -m tests.parity.drawn_rows --first 0 --count 300`` compares this number of rows and prints those that fail. A
row is a function of its number: settings are tried one after another and kept if ``problems`` accepts them, so that
each row is valid and many combine settings that no handwritten test does. Beside losses, gradients and weights a row
compares the optimizer's state and the loss of an evaluation.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.planner.layout import Layout
from megatron_core.verify import RankFailure, Trace, trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND, Bounds, beyond, relative_errors, rounding_noise
from megatron_core.verify.gpt import train_traced
from megatron_core.verify.together import Scope, incomparable, replicas, shared_micro_batches
from tests.parity.drawn_files import files
from tests.parity.drawn_layouts import JOINT, LAYOUT, LOSSY, PRECISION, RECOMPUTE
from tests.parity.drawn_settings import BASE, FILES, FOLDER, MODEL, Choices, Settings

STEPS = 2
NOISE = 1e-12
"""Relative to the largest gradient or weight: smaller differences are rounding errors, even of small tensors."""
SHORTEST_TALK = 48
"""Tokens of a sequence that holds a conversation of ``drawn_files`` with its answer."""
SWITCHES = {
    *("overlap_p2p_communication", "tp_comm_overlap", "tp_comm_overlap_chunks", "overlap_grad_reduce"),
    *("overlap_param_gather", "zero3_keep_after_forward", "zero3_param_persistence_threshold"),
    *("distributed_backend", "moe_shared_expert_overlap"),
    *("overlap_moe_expert_parallel_comm", "cpu_offloading", "cpu_offloading_num_layers", "poison_buffers"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "kernel_backend", "attention_backend"),
    *("log_norms_by_layer", "log_params_norm", "log_num_zeros_in_grad", "apply_query_key_layer_scaling"),
    *("check_pipeline_messages", "moe_token_dispatcher_type", "num_workers"),
    *(name for choice in RECOMPUTE for name in choice),
}
"""Settings of a layout that a comparison of the layout with itself leaves out."""


def is_legal(settings: Settings, world_size: int) -> bool:
    """Whether a run with this number of ranks may have these settings."""
    has_texts = "chat_template" in settings
    if has_texts and settings["seq_length"] < SHORTEST_TALK:
        return False
    # The teacher and the token files have the tokens of ``NullTokenizer``.
    needs_tokens = "kd_teacher" in settings or ("data_path" in settings and not has_texts)
    if needs_tokens and settings["vocab_size"] != BASE["vocab_size"]:
        return False
    try:
        return next(problems(RunConfig.from_flat(settings), world_size), None) is None
    except ConfigError:
        return False


def grown(rng: random.Random, settings: Settings, choices: list[tuple[float, Choices]], world_size: int) -> Settings:
    """``settings`` with valid random values of ``choices``."""
    for probability, options in choices:
        if rng.random() < probability:
            more = settings | rng.choice(options)
            settings = more if is_legal(more, world_size) else settings
    return settings


Row = tuple[int, Settings, int, Settings]
"""World size and settings of the reference, and of the layout."""


def row(number: int, folder: str = "/nowhere", data: str = "/nowhere") -> Row:
    """World sizes and settings of the reference and of the layout; files are in ``data``, those of a run in ``folder``.

    The reference is one process, or with lossy settings the layout without its switches.
    """
    rng = random.Random(number)
    shared = grown(rng, BASE, MODEL, 1)
    shared = grown(rng, shared, PRECISION, 1)
    size = rng.choice((2, 2, 4, 4, 4, 1))
    if not is_legal(shared, size):  # the batch is not divisible by the number of replicas
        size = 1
    ours = grown(rng, shared, LAYOUT, size)
    joint = grown(rng, ours, JOINT, size)
    shared = shared | {name: value for name, value in joint.items() if name not in ours}
    # Lossy sums are not compared in narrow dtypes: the reference of their bounds is one process.
    ours = grown(rng, joint, LOSSY, size) if joint["fp64"] and "outer_steps" not in joint else joint
    reference_size = 1
    if "grad_compression" in ours:
        shared = {name: value for name, value in ours.items() if name not in SWITCHES}
        reference_size = size
    if shared.get("bf16") or shared.get("fp16"):
        shared = {name: value for name, value in shared.items() if name not in STORED_NARROW}
    filled = [with_folders(settings, folder, data) for settings in (shared, ours)]
    alone, laid_out = filled
    if reference_size == 1:
        alone = with_micro_batches(alone, laid_out, size)
    return reference_size, alone, size, laid_out


STORED_NARROW = {
    *("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "use_precision_aware_optimizer", "bf16", "fp16"),
    *("grad_reduce_in_bf16", "fp32_residual_connection", "loss_scale", "use_distributed_optimizer"),
}
"""Settings of 16-bit runs that their reference in float64 does not have."""
ROUNDED_DIFFERENTLY = {"attention_backend"}
"""Settings of a layout that change the rounding errors of 16-bit runs: unfused attention stores its scores in bf16."""


def with_folders(settings: Settings, folder: str, data: str) -> Settings:
    """``settings`` with ``FILES`` and ``FOLDER`` replaced in their values."""

    def fill(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.replace(FOLDER, folder).replace(FILES, data) if isinstance(value, str) else value

    return {name: fill(value) for name, value in settings.items()}


def with_micro_batches(shared: Settings, ours: Settings, size: int) -> Settings:
    """``shared`` with the micro-batches of the layout, if sequences that are computed together affect each other."""
    config = RunConfig.from_flat(ours)
    scopes = shared_micro_batches(config)
    if not scopes:
        return shared
    layout = Layout.of(config.parallel, config.model.num_layers, size)
    together = replicas(config, layout) if Scope.REPLICAS in scopes.values() else 1
    return shared | {"micro_batch_size": config.training.micro_batch_size * together}


def reason_to_skip(number: int) -> str | None:
    """The reason why no process computes what the layout of a row must compute."""
    _, _, size, ours = row(number)
    config = RunConfig.from_flat(ours)
    return incomparable(config, Layout.of(config.parallel, config.model.num_layers, size))


def takes_signs(settings: Settings) -> bool:
    """Whether the update of an element is the sign of a sum of its gradients."""
    return "lion" in (settings.get(name) for name in ("optimizer", "muon_scalar_optimizer", "soap_scalar_optimizer"))


def undecided(name: str, baseline: Trace, largest: dict[str, float]) -> np.ndarray | bool:
    """Elements whose gradient consists of rounding errors in a step, so that its sign is arbitrary."""
    parameter = name.partition(".")[2]
    gradients = [(step, baseline.tensors.get(f"grad{step}.{parameter}")) for step in range(STEPS)]
    negligible = [np.abs(grad) <= NOISE * largest[f"grad{step}"] for step, grad in gradients if grad is not None]
    return np.logical_or.reduce(negligible) if negligible else False


def faults(found: Trace, baseline: Trace, *, signs: bool = False) -> Iterator[str]:
    """Differences larger than rounding errors; ``signs``: the optimizer takes the signs of sums of gradients."""
    yield from found.faults
    if not np.isfinite(baseline.losses).all():
        yield f"in one process the losses are {baseline.losses}"
    for kind in ("losses", "norms"):
        ours, theirs = getattr(found, kind), getattr(baseline, kind)
        if not np.allclose(ours, theirs, rtol=FLOAT64_BOUND, atol=0):
            yield f"{kind} are {ours} instead of {theirs}"
    largest: dict[str, float] = {}
    for name, values in baseline.tensors.items():
        kind = name.partition(".")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(values).max(initial=0.0)))
    for name in sorted(baseline.tensors.keys() | found.tensors.keys()):
        expected, actual = baseline.tensors.get(name), found.tensors.get(name)
        if expected is None or actual is None or expected.shape != actual.shape:
            yield f"{name} is missing, unexpected or of another shape"
            continue
        differences = np.abs(actual - expected)
        if signs and name.partition(".")[0] in ("weight", "ema"):
            differences = np.where(undecided(name, baseline, largest), 0.0, differences)
        off = float(differences.max(initial=0.0))
        size = float(np.abs(expected).max(initial=0.0))
        if not off <= max(FLOAT64_BOUND * size, NOISE * largest[name.partition(".")[0]]):
            yield f"{name} is off by {off:.1e} of {size:.1e}"


def compared(number: int) -> list[str]:
    """Reason why row ``number`` fails; empty if it passes."""
    if reason_to_skip(number):
        return []
    with tempfile.TemporaryDirectory() as folder:
        reference_size, shared, size, ours = row(number, folder, files())
        alone, layout = RunConfig.from_flat(shared | {"fp64": True}), RunConfig.from_flat(ours)
        try:
            baseline = trace_training(alone, reference_size, STEPS, thorough=True)
            trace = trace_training(layout, size, STEPS, thorough=True)
            if layout.training.fp64:
                return list(faults(trace, baseline, signs=takes_signs(ours)))
            return list(narrow_faults(trace, baseline, shared, ours))
        except RankFailure as error:
            return str(error).strip().splitlines()[-12:]


def narrow_faults(trace: Trace, baseline: Trace, shared: Settings, ours: Settings) -> Iterator[str]:
    """Errors of a layout in a narrower dtype than float64 that are larger than those of one process in it."""
    training = RunConfig.from_flat(ours).training
    dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
    shared_with_layout = (STORED_NARROW | ROUNDED_DIFFERENTLY) & ours.keys()
    narrow = shared | {name: ours[name] for name in shared_with_layout} | {"fp64": False}
    train = partial(train_traced, thorough=True)
    _, noise = rounding_noise(train, RunConfig.from_flat(narrow), STEPS, baseline=baseline)
    yield from trace.faults
    yield from beyond(relative_errors(trace, baseline), Bounds(dtype, noise))


def described(number: int) -> str:
    """Description of the row: differences from ``BASE``, and additions of the layout."""
    reference_size, shared, size, ours = row(number)
    model = {name: value for name, value in shared.items() if BASE.get(name) != value}
    layout = {name: value for name, value in ours.items() if shared.get(name) != value}
    return f"row {number}: {size} ranks against {reference_size}\n  model {model}\n  layout {layout}"


def main(args: list[str] | None = None) -> int:
    """Compare rows; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="drawn_rows")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args(args)
    wrong, began = 0, time.perf_counter()
    for number in range(options.first, options.first + options.count):
        if found := compared(number):
            wrong += 1
            print(described(number), *(f"  {line}" for line in found[:12]), sep="\n", flush=True)
    print(f"{options.count} rows, {wrong} do not hold; {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
