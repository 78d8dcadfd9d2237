"""The pages of a check of a GPU, in HTML and Markdown, and the fields of its record.

python -m benchmarks.gpu.report runs/gpu.json runs/gpu.html     # and runs/gpu.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from benchmarks.gpu.stages import ROOT
from megatron_core.errors import DataError
from megatron_core.foreign_json import flag, items, maybe, numeric, text, wrong
from megatron_core.reports.page import BLOCKS, chart, html_table, page

STATUSES = ("ok", "failed", "skipped")
RECORD = {
    "version": lambda value: value == 1,
    "device": lambda value: value in ("cuda", "cpu"),
    "started": text,
    "finished": flag,
    "seconds": numeric(),
    "budget_seconds": numeric(),
    "stages": items(lambda value: isinstance(value, dict) and not wrong_stage(value)),
}
TRAINED = ("mode", "largest relative difference", "bound", "within")
STAGE = {
    "name": text,
    "status": lambda value: value in STATUSES,
    "seconds": numeric(),
    "limit_seconds": numeric(),
    "command": items(text),
    "reason": maybe(text),
    "figures": lambda value: isinstance(value, dict),
    "output": maybe(text),
    "log": maybe(text),
}
Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]
"""The head and the rows."""
SPEEDS = {
    "tokens/s": "tokens_per_second",
    "TFLOP/s": "tflops",
    "MFU": "mfu",
    "of products": "of_products",
    "products, TFLOP/s": "product_tflops",
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


def speed_table(record: dict[str, Any]) -> Table:
    """A row per measured model."""
    rows = []
    for stage in stages_named(record, "speed "):
        values = [stage["figures"].get(name) for name in SPEEDS.values()]
        rows.append((stage["name"].removeprefix("speed "), *("" if value is None else value for value in values)))
    return ("model", *SPEEDS), rows


def launch_table(record: dict[str, Any]) -> Table:
    """Launches of a layer and waits of a step."""
    rows = [
        (
            f"{stage['figures']['counted']} of a layer, forward and backward",
            stage["figures"]["launches_per_layer"],
        )
        for stage in stages_named(record, "trace launches")
    ]
    for stage in stages_named(record, "trace launches"):
        figures = stage["figures"]
        rows.append((f"{figures['counted']} of a step besides its layers", figures["launches_besides_layers"]))
        rows.append(("waits of the host in a step", figures["host_waits_per_step"]))
        rows += [(f"of these {name}", count) for name, count in figures["host_waits"].items()]
    return ("what", "number"), rows


def overlap_table(record: dict[str, Any]) -> Table:
    """A row per switch that overlaps transfers, from the profiler's trace."""
    rows = []
    for stage in stages_named(record, "trace "):
        figures = stage["figures"]
        if not {"on", "off"} <= figures.keys():
            continue
        cells = [figures[state][key] for key in ("transfers_ms", "hidden") for state in ("off", "on")]
        steps = [1e3 * figures[state]["step_seconds"] for state in ("off", "on")]
        rows.append((stage["name"].removeprefix("trace "), *cells, *steps))
    head = ("switch", "transfers off, ms", "on, ms", "hidden off", "on", "step off, ms", "on, ms")
    return head, rows


def layout_table(record: dict[str, Any]) -> Table:
    """A row per layout of two ranks."""
    rows = []
    for stage in stages_named(record, "layout "):
        figures = stage["figures"]
        rates = [figures.get(name, "") for name in ("tokens_per_second", "tokens_per_second_alone")]
        difference = figures.get("largest_difference", "; ".join(figures.get("layouts", ())))
        is_within = "yes" if figures.get("within") else "no"
        name = stage["name"].removeprefix("layout ")
        rows.append((name, figures.get("transport", ""), str(difference), is_within, *rates))
    return ("layout", "transport", "largest difference", "within", "tokens/s", "of one rank"), rows


def outputs(record: dict[str, Any]) -> Markup:
    """The end of the output of each stage that failed."""
    parts = [
        BLOCKS.paragraph(f"{stage['name']} ({stage['log']}): {line}", "soft")
        for stage in record["stages"]
        if stage["status"] == "failed"
        for line in (stage["output"] or "no output").splitlines()[-20:]
    ]
    return Markup("").join(parts) if parts else BLOCKS.paragraph("no stage failed", "soft")


TABLES = (
    ("speed", "Speed", speed_table),
    ("launches", "Launches and waits", launch_table),
    ("overlap", "Overlap, from the profiler's trace", overlap_table),
    ("layouts", "Layouts of two ranks compared with one", layout_table),
)


def render(record: dict[str, Any]) -> str:
    """The page of a record."""
    sections = [
        ("stages", "Stages", overview(record)),
        ("failures", "Output of failed stages", outputs(record)),
        *((name, title, html_table(*table(record))) for name, title, table in TABLES),
        ("training", "Trainings compared with the CPU", trainings(record)),
        ("environment", "Machine", environment(record)),
    ]
    return page("Check of a GPU", sections)


def in_words(value: Any) -> str:
    """A cell of Markdown."""
    return (f"{value:.4g}" if isinstance(value, float) else str(value)).replace("|", "\\|").replace("\n", " ")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(in_words, cells))} |" for cells in lines]


def summary(record: dict[str, Any]) -> str:
    """The record on one page of Markdown: the numbers first, then what did not pass, then the machine."""
    counts = {status: sum(stage["status"] == status for stage in record["stages"]) for status in STATUSES}
    facts = {name: value for stage in stages_named(record, "environment") for name, value in stage["figures"].items()}
    on = facts.get("gpu", record["device"])
    lines = [
        f"# Check of {on}",
        "",
        f"{record['started']}, revision {facts.get('revision', 'unknown')}, torch {facts.get('torch', 'unknown')}: "
        f"{', '.join(f'{count} {status}' for status, count in counts.items())}, {record['seconds']:.0f} s.",
    ]
    for _, title, table in TABLES:
        head, rows = table(record)
        if rows:
            lines += ["", f"## {title}", "", *markdown_table(head, rows)]
    compared = [stage for stage in stages_named(record, "train ") if "within" in stage["figures"]]
    if compared:
        rows = [
            (
                stage["name"].removeprefix("train "),
                stage["figures"].get("largest_difference", ""),
                stage["figures"].get("bound", "equal"),
                "yes" if stage["figures"]["within"] else "no",
            )
            for stage in compared
        ]
        lines += ["", "## Trainings compared with the CPU", "", *markdown_table(TRAINED, rows)]
    others = [stage for stage in record["stages"] if stage["status"] != "ok"]
    if others:
        rows = [(stage["name"], stage["status"], stage["seconds"], stage["reason"]) for stage in others]
        lines += ["", "## Failed and skipped", "", *markdown_table(("stage", "status", "seconds", "reason"), rows)]
    if facts:
        cells = [(name, ", ".join(value) if isinstance(value, list) else value) for name, value in facts.items()]
        lines += ["", "## Machine", "", *markdown_table(("fact", "value"), cells)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Read the record, check it, and write the pages."""
    source, target = (ROOT / argument for argument in sys.argv[1:])
    record = checked(json.loads(source.read_text(encoding="utf-8")))
    target.write_text(render(record), encoding="utf-8")
    target.with_suffix(".md").write_text(summary(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
