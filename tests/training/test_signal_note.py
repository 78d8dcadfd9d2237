"""The note of a training whose thread cannot install signal handlers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_core.training.pretrain import notes
from tests.runs import tiny_run


def test_a_note_says_that_signals_do_not_save(tmp_path: Path) -> None:
    run = tiny_run(save=str(tmp_path))
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(lambda: list(notes(run))).result()
    here = list(notes(run))
    (note,) = set(elsewhere) - set(here)
    assert note.startswith("SIGTERM and Ctrl-C do not save") and "save_interval" in note
    assert set(here) < set(elsewhere)
    assert not any("SIGTERM" in note for note in notes(tiny_run()))
