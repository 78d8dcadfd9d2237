"""docs/extend.md is right: its callback runs, its table and order are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from megatron_core.feature import features, load_hook
from megatron_core.training import Callback
from megatron_core.training.loop import built_in_callbacks, train
from tests.programs import run_ranks_of
from tests.runs import TINY, tiny_run

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()


def test_the_callback_stops_a_run(tmp_path: Path) -> None:
    (program,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "StopAtLoss" in code)
    (command,) = re.findall(r"^torchrun (.*my_training\.py) --config run.yaml --save checkpoints$", PAGE, flags=re.M)
    (tmp_path / "my_training.py").write_text(program.replace("StopAtLoss(2.0)", "StopAtLoss(100.0)"))
    settings = TINY | {"save": str(tmp_path / "checkpoints"), "eval_iters": 0}
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    result = run_ranks_of(f"torchrun {command} --config run.yaml", tmp_path)
    assert result.returncode == 0, result.stderr
    ending = rf"ends early, after iteration 2 \(loss \d\.\d{{3}}\); saved in {tmp_path / 'checkpoints'}"
    assert re.search(ending, result.stdout), result.stdout
    assert (tmp_path / "checkpoints" / "iter_0000002").is_dir()


def test_the_callback_with_values_ends_a_resumed_run_where_it_would_have_ended(tmp_path: Path) -> None:
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "StopOnPlateau" in code)
    names: dict = {}
    exec(code, names)
    settings = {"eval_iters": 0, "lr": 1e-9, "min_lr": 0.0, "lr_warmup_iters": 0, "fp64": True}
    alone = tiny_run(**settings)
    train(alone, [], [names["StopOnPlateau"](patience=2)])
    assert 2 < alone.state.iteration < 8
    train(tiny_run(**settings, exit_interval=2, save=str(tmp_path)), [], [names["StopOnPlateau"](patience=2)])
    resumed = tiny_run(**settings, load=str(tmp_path))
    train(resumed, [], [names["StopOnPlateau"](patience=2)])
    assert (resumed.state.iteration, resumed.stop_reason) == (alone.state.iteration, alone.stop_reason)


def test_the_order_of_methods_is_that_of_the_docstring() -> None:
    (order,) = re.findall(r"```\n(load_values .*?)```", PAGE, flags=re.DOTALL)
    assert "\n".join("    " + line for line in order.splitlines()) in inspect.getdoc(Callback)


def test_the_table_lists_all_callbacks() -> None:
    """Callbacks of every run and of features, with different priorities."""
    rows = re.findall(r"^\| `(\w+)` \| (-?\d+) \|", PAGE, flags=re.M)
    kinds = [type(callback) for callback in built_in_callbacks(tiny_run(), [])]
    kinds += [load_hook(hook) for feature in features() for hook in feature.callbacks]
    kinds.sort(key=lambda kind: -kind.priority)
    assert rows == [(kind.__name__, str(kind.priority)) for kind in kinds]
    assert len({kind.priority for kind in kinds}) == len(kinds)
