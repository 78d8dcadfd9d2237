"""Continue trainings of Megatron Core here, and ours in Megatron Core, in five layouts of four ranks each way.

A model of dense layers with grouped queries and one of experts train three steps, save, and take ten more; the other
framework loads the checkpoint, in another layout, and takes the same ten steps. Prints a table of the largest
difference of a loss for each format, as Markdown. Needs ``make install-test``; takes about 10 minutes on two cores.

python -m benchmarks.bench_continue
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from megatron_core.errors import MegatronError
from megatron_core.hub.megatron_lm import settings_of_arguments
from megatron_core.hub.megatron_lm.arguments import training_settings
from megatron_core.hub.megatron_lm.format import megatron_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.hub import megatron_training as theirs
from tests.hub.test_continue_megatron import AFTER, BEFORE, Tokens, continued

RANKS = 4
TP, PP, EP, ETP = theirs.SIZES["tp"], theirs.SIZES["pp"], theirs.SIZES["ep"], theirs.SIZES["etp"]
ZERO = {"use_distributed_optimizer": True}
SP = {"sequence_parallel": True}


@dataclass(frozen=True)
class Layout:
    """The same four ranks in Megatron Core and here."""

    name: str
    theirs: str
    ours: dict[str, Any]
    chunks: int = 1
    micro_batch: int = 2


EXPERTS = theirs.EXPERTS | {"num_layers": 4, "moe_token_dispatcher_type": "allgather"}  # gloo gathers equal sizes only
MODELS = {"dense": theirs.LLAMA | {"num_layers": 4}, "experts": EXPERTS}
LAYOUTS = {
    "dense": (
        Layout("dp4", "", ZERO, micro_batch=1),
        Layout("tp2 dp2", "tp2", {TP: 2} | SP),
        Layout("pp2 dp2", "pp2", {PP: 2} | ZERO),
        Layout("tp2 pp2", "tp2 pp2", {TP: 2, PP: 2}),
        Layout("tp2 pp2 vpp2", "tp2 pp2", {TP: 2, PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, chunks=2),
    ),
    "experts": (
        Layout("ep4", "ep4", {EP: 4} | ZERO, micro_batch=1),
        Layout("ep2 dp2", "ep2", {EP: 2} | ZERO, micro_batch=1),
        Layout("tp2 ep2", "tp2 ep2", {TP: 2, EP: 2} | SP),
        Layout("tp2 ep2 etp1", "tp2 ep2 etp1", {TP: 2, EP: 2, ETP: 1} | SP),
        Layout("pp2 ep2", "pp2 ep2", {PP: 2, EP: 2}),
    ),
}
SHARDED = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter", "torch")
"""How the distributed optimizer's state is stored."""
WHOLE = ("torch_dist", "torch")
"""The formats without the distributed optimizer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Continue trainings of Megatron Core, and ours there."""

    models: tuple[str, ...] = tuple(MODELS)
    """The models."""
    directions: tuple[str, ...] = ("theirs", "ours")
    """Who writes the checkpoints."""
    layouts: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Numbers of the layouts in which checkpoints are saved."""
    tolerance: float = 5e-5
    """Largest difference of a loss; the exit status is 1 if one is larger."""


def write_theirs(folder: Path, model: str, layout: Layout, *, distributed: bool) -> list[float]:
    """Train in Megatron Core and save in every format; returns the next losses."""
    theirs.use_megatron()
    training = training_of(model, layout, distributed=distributed)
    for _ in range(BEFORE):
        training.step()
    for how in SHARDED if distributed else WHOLE:
        if how == "torch":
            training.save_rank_files(folder / how)
        else:
            training.save(folder / how, how)
    return [training.step() for _ in range(AFTER)]


def training_of(model: str, layout: Layout, *, distributed: bool) -> theirs.Training:
    """The training of Megatron Core in ``layout``."""
    return theirs.Training(
        MODELS[model], layout.theirs, distributed=distributed, chunks=layout.chunks, micro_batch=layout.micro_batch
    )


def write_ours(folder: Path, model: str, layout: Layout) -> list[float]:
    """Train here and save as torch_dist; returns the next losses."""
    named = vars(theirs.arguments_of(MODELS[model], {}, micro_batch=layout.micro_batch))
    settings = settings_of_arguments(named) | training_settings(named) | layout.ours
    settings |= {"fp64": False, "mock_data": True, "eval_iters": 0, "save": str(folder)}
    run = start(settings | {"ckpt_format": "torch_dist", "ckpt_format_interval": BEFORE})
    run.train_loader = run.loader(Tokens())
    train(run, BEFORE)
    run.saver.save(run.state)
    run.saver.close()
    return [loss for loss, _ in train(run, AFTER)]


def continue_theirs(folder: Path, model: str, layout: Layout, *, distributed: bool) -> list[float]:
    """Load in Megatron Core; returns the next losses."""
    theirs.use_megatron()
    training = training_of(model, layout, distributed=distributed)
    training.load(folder / "torch_dist" / f"iter_{BEFORE:07d}")
    return [training.step() for _ in range(AFTER)]


def difference(expected: list[float], found: list[float]) -> float:
    """The largest difference of a loss."""
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


Result = tuple[str, str, str, str | float]
"""The layout when it was saved, format, layout that continues, and the largest difference or the error."""


def compare_theirs(model: str, root: Path, numbers: tuple[int, ...]) -> Iterator[Result]:
    """Continue the checkpoints of Megatron Core here."""
    layouts = LAYOUTS[model]
    for number in numbers:
        layout = layouts[number]
        for distributed in (True, False):
            folder = root / f"{model} {number} {distributed}"
            expected = run_ranks(RANKS, write_theirs_of(folder, model, layout, distributed), backend="gloo")[0]
            for shift, how in enumerate(SHARDED if distributed else WHOLE):
                target = layouts[(number + 1 + shift) % len(layouts)]
                name = f"{how}, distributed" if distributed else how
                yield layout.name, name, target.name, attempt(expected, folder / how, target)


def write_theirs_of(folder: Path, model: str, layout: Layout, distributed: bool) -> Any:
    """``write_theirs`` with its arguments, for ranks."""
    return lambda: write_theirs(folder, model, layout, distributed=distributed)


def attempt(expected: list[float], folder: Path, target: Layout) -> str | float:
    """The difference of the losses that continue ``folder`` here, or the error."""
    try:
        settings = megatron_config(folder / f"iter_{BEFORE:07d}").flat() | target.ours
        settings |= {"micro_batch_size": target.micro_batch}
        return difference(expected, run_ranks(RANKS, continued, str(folder), settings)[0])
    except MegatronError as error:
        return str(error).strip().splitlines()[-1]


def compare_ours(model: str, root: Path, numbers: tuple[int, ...]) -> Iterator[Result]:
    """Continue our checkpoints in Megatron Core."""
    layouts = LAYOUTS[model]
    for number in numbers:
        layout = layouts[number]
        folder = root / f"ours {model} {number}"
        expected = run_ranks(RANKS, write_ours, folder, model, layout)[0]
        for distributed in (True, False):
            target = layouts[(number + 1 + distributed) % len(layouts)]

            def rank(target: Layout = target, distributed: bool = distributed, folder: Path = folder) -> list[float]:
                return continue_theirs(folder, model, target, distributed=distributed)

            result: str | float
            try:
                result = difference(expected, run_ranks(RANKS, rank, backend="gloo")[0])
            except MegatronError as error:
                result = str(error).strip().splitlines()[-1]
            yield layout.name, "torch_dist, distributed" if distributed else "torch_dist", target.name, result


def main() -> int:
    """Run the comparisons and print the table."""
    settings = tyro.cli(Settings)
    import_module("torch._inductor.compile_fx")  # inherited by the ranks
    failed = False
    print("| model | saved by | in | format | continued in | difference |\n|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for direction, model in product(settings.directions, settings.models):
            compare = compare_theirs if direction == "theirs" else compare_ours
            for saved, form, target, result in compare(model, Path(folder), settings.layouts):
                failed |= isinstance(result, str) or result > settings.tolerance
                shown = result if isinstance(result, str) else f"{result:.1e}"
                print(f"| {model} | {direction} | {saved} | {form} | {target} | {shown} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
