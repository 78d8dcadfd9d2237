"""The page of a check of a GPU, and the fields of its record.

python -m benchmarks.gpu.report runs/gpu.json runs/gpu.html
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmarks.gpu.stages import ROOT
from megatron_core.errors import DataError
from megatron_core.reports.page import BLOCKS, chart, html_table, page
from megatron_core.schema import flag, items, maybe, real, text, wrong

STATUSES = ("ok", "failed", "skipped")
RECORD = {
    "version": lambda value: value == 1,
    "device": lambda value: value in ("cuda", "cpu"),
    "started": text,
    "finished": flag,
    "seconds": real(),
    "budget_seconds": real(),
    "stages": items(lambda value: isinstance(value, dict) and not wrong_stage(value)),
}
STAGE = {
    "name": text,
    "status": lambda value: value in STATUSES,
    "seconds": real(),
    "limit_seconds": real(),
    "command": items(text),
    "reason": maybe(text),
    "figures": lambda value: isinstance(value, dict),
    "output": maybe(text),
    "log": maybe(text),
}
SPEEDS = {
    "tokens/s": "tokens_per_second",
    "TFLOP/s": "tflops",
    "MFU": "mfu",
    "of products": "of_products",
    "of planner": "of_planner",
    "GiB": "memory_gib",
    "micro-batch": "micro_batch_size",
    "tokens each": "seq_length",
}


def wrong_stage(stage: dict[str, Any]) -> list[str]:
    """Names of fields of a stage that are missing or invalid; a stage that is not ok has a reason."""
    found = wrong(stage, STAGE)
    return found or (["reason"] if stage["status"] != "ok" and not stage["reason"] else [])


def checked(record: Any) -> dict[str, Any]:
    """The record itself; ``DataError`` with the names of its missing and invalid fields."""
    found = wrong(record, RECORD) if isinstance(record, dict) else list(RECORD)
    if found:
        raise DataError(f"the record of a GPU's check has missing or invalid fields: {', '.join(found)}; run it again")
    return dict(record)


def stages_named(record: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The stages whose name begins with ``prefix``, and that have figures."""
    return [stage for stage in record["stages"] if stage["name"].startswith(prefix) and stage["figures"]]


def overview(record: dict[str, Any]) -> Markup:
    """A row per stage."""
    rows = [(stage["name"], stage["status"], stage["seconds"], stage["reason"] or "") for stage in record["stages"]]
    return html_table(("stage", "status", "seconds", "reason"), rows)


def environment(record: dict[str, Any]) -> Markup:
    """The facts about the machine."""
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for stage in stages_named(record, "environment")
        for name, value in stage["figures"].items()
    ]
    return html_table(("fact", "value"), rows)


def trainings(record: dict[str, Any]) -> Markup:
    """Differences from the CPU, and a chart of the differences of the losses."""
    found = stages_named(record, "train ")
    rows = [
        (
            stage["name"].removeprefix("train "),
            str(stage["figures"].get("largest_difference", "")),
            str(stage["figures"].get("bound", "equal")),
            "yes" if stage["figures"].get("within") else "no",
            stage["figures"].get("products", ""),
        )
        for stage in found
    ]
    curves = {}
    for stage in found:
        losses, reference = (stage["figures"].get(name, []) for name in ("losses", "reference"))
        if all(isinstance(value, float) for value in [*losses, *reference]):
            pairs = enumerate(zip(losses, reference, strict=False), 1)
            curves[stage["name"].removeprefix("train ")] = [(float(at), loss - other) for at, (loss, other) in pairs]
    curves = {name: curve for name, curve in curves.items() if curve}
    head = ("mode", "largest relative difference", "bound", "within", "products")
    return html_table(head, rows) + chart(curves, "step", "loss minus the CPU's in float32")


def speeds(record: dict[str, Any]) -> Markup:
    """A row per measured model."""
    rows = []
    for stage in stages_named(record, "speed "):
        values = [stage["figures"].get(name) for name in SPEEDS.values()]
        rows.append((stage["name"].removeprefix("speed "), *("" if value is None else value for value in values)))
    return html_table(("model", *SPEEDS), rows)


def outputs(record: dict[str, Any]) -> Markup:
    """The end of the output of each stage that failed."""
    parts = [
        BLOCKS.paragraph(f"{stage['name']} ({stage['log']}): {line}", "soft")
        for stage in record["stages"]
        if stage["status"] == "failed"
        for line in (stage["output"] or "no output").splitlines()[-20:]
    ]
    return Markup("").join(parts) if parts else BLOCKS.paragraph("no stage failed", "soft")


def render(record: dict[str, Any]) -> str:
    """The page of a record."""
    sections = [
        ("stages", "Stages", overview(record)),
        ("failures", "Output of failed stages", outputs(record)),
        ("speed", "Speed", speeds(record)),
        ("training", "Trainings compared with the CPU", trainings(record)),
        ("environment", "Machine", environment(record)),
    ]
    return page("Check of a GPU", sections)


def main() -> int:
    """Read the record, check it, and write the page."""
    source, target = (Path(argument) for argument in sys.argv[1:])
    record = checked(json.loads((ROOT / source).read_text(encoding="utf-8")))
    (ROOT / target).write_text(render(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
