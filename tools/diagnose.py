"""Say what holds a run back, with evidence, the share of time, and what to change, the largest gain first.

python tools/diagnose.py runs/mine

RUN is the folder of --save, or the file of --metrics-file. Rules and their sources: docs/monitoring.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron_core.errors import MegatronError
from megatron_core.monitor.diagnosis import diagnose
from megatron_core.monitor.rank_records import read_run
from megatron_core.monitor.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to look at."""

    run: tyro.conf.Positional[str]
    """Folder of --save, or metrics file, of a run."""
    json: str | None = None
    """Write the diagnosis to this file, too, for programs."""


def diagnose_run(settings: Settings) -> None:
    """Read the records, print the diagnosis."""
    found = diagnose(Summary.of(read_run(settings.run)))
    print(found.text())
    if settings.json is not None:
        Path(settings.json).write_text(json.dumps(found.record(), indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, diagnose and exit."""
    settings = tyro.cli(Settings, args=arguments, description=__doc__)
    try:
        diagnose_run(settings)
    except (MegatronError, OSError) as error:
        print(f"diagnose.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
