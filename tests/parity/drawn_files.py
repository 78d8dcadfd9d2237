"""Data files and a teacher for ``drawn_rows``: tokens, conversations, pairs of answers."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.training.setup import set_up
from megatron_core.verify.ranks import run_ranks, this_world
from tests.datasets.files import write
from tests.parity.drawn_settings import BASE

_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""The folder is removed at the end of the process."""
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATE = EACH + "{% if add_generation_prompt %}<assistant>{% endif %}"
TEACHER = {"num_layers": 8, "position_embedding_type": "rope", "seed": 7, "seq_length": 65}


@cache
def files() -> str:
    """Write the files once for each process; return their folder."""
    _KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(_KEPT[-1].name)
    rng = np.random.default_rng(3)
    write(folder / "tokens", [rng.integers(0, 101, int(length)).tolist() for length in rng.integers(3, 90, 60)])
    (folder / "chat.jinja").write_text(TEMPLATE)
    pairs = [{"prompt": f"q{n}", "chosen": "yes" * (n % 3 + 1), "rejected": f"no{n}"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    talks = [
        [{"role": "user", "content": "a" * (n % 5 + 1)}, {"role": "assistant", "content": f"b{n}" * (n % 4 + 1)}]
        for n in range(13)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    run_ranks(1, _save, RunConfig.from_flat(BASE | TEACHER | {"save": str(folder / "teacher")}))
    return str(folder)


def _save(config: RunConfig) -> None:
    run = set_up(config, this_world())
    run.saver.save(run.state)
    run.saver.close()
