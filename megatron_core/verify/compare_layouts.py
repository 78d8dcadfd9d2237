"""Compare the layouts of a task, print the table, and write it to files, for megatron-verify."""

import json
from collections.abc import Mapping

from megatron_core.output_file import Output
from megatron_core.verify.bits import check_bits
from megatron_core.verify.comparison import Task, changed_lines, switches
from megatron_core.verify.gpt import GPTExperiment
from megatron_core.verify.parity import ParityReport, check_parity
from megatron_core.verify.resumed import check_resumed, why_not_resumed
from megatron_core.verify.table import (
    TerminalTable,
    Verdict,
    bits_page,
    layout_page,
    print_wrapped,
    setting_words,
    summary_line,
    verdict_line,
)


def compare_values(
    experiment: GPTExperiment, task: Task, device: str, what: str, outputs: Mapping[str, Output]
) -> bool:
    """Compare within the bounds of rounding, print and write the result; returns whether all layouts agree.

    what: description of the comparison. outputs: files by the names of their settings.
    """
    backend = task.config.parallel.distributed_backend
    left_out = setting_words(task.not_compared)
    reports = list[ParityReport]()
    for dtype in task.dtypes:
        table = TerminalTable([str(layout) for layout in task.layouts], dtype)
        print(table.head(), flush=True)
        reports.append(
            check_parity(
                experiment,
                task.layouts,
                dtype=dtype,
                device=device,
                backend=backend,
                on_row=table.print_row,
            )
        )
        print_wrapped(verdict_line(summary_line(reports[-1]), left_out))
    unresumed = why_not_resumed(task, device) if experiment.thorough else "add --thorough"
    if not unresumed:
        table = TerminalTable([f"1 process from {layout}" for layout in task.layouts], "float64")
        print(table.head(), flush=True)
        reports.append(check_resumed(experiment, task.layouts, backend=backend, on_row=table.print_row))
        print_wrapped(summary_line(reports[-1]))
    verdict = Verdict(experiment.steps, experiment.thorough, unresumed, switches(task.config), task.changed)
    print_wrapped(*verdict.lines(), *refusals(task))
    first, *further = reports
    if "json" in outputs:
        written = first.as_dict() | {"not_compared": left_out, "refused": task.refused} | verdict.as_dict()
        written["further"] = [report.as_dict() for report in further]
        outputs["json"].write(json.dumps(written, indent=1) + "\n")
    if "markdown" in outputs:
        pages = [*layout_page(first, what, left_out), "", *(f"- {line}" for line in verdict.lines())]
        for report in further:
            pages += ["", *layout_page(report, what)]
        outputs["markdown"].write("\n".join(pages) + "\n")
    return all(report.holds for report in reports)


def compare_bits(experiment: GPTExperiment, task: Task, device: str, what: str, outputs: Mapping[str, Output]) -> bool:
    """Compare hashes in the first dtype of the task; arguments and result are those of ``compare_values``."""
    width = max(len(str(layout)) for layout in task.layouts)
    report = check_bits(
        experiment,
        task.layouts,
        dtype=task.dtypes[0],
        device=device,
        backend=task.config.parallel.distributed_backend,
        on_row=lambda row: print(f"{row.layout:<{width}}  {row.verdict}", flush=True),
    )
    left_out = setting_words(task.not_compared)
    print_wrapped(verdict_line(report.summary, left_out), *changed_lines(task.changed), *refusals(task))
    if "json" in outputs:
        written = report.as_dict() | {"model": what, "not_compared": left_out, "refused": task.refused}
        outputs["json"].write(json.dumps(written, indent=1) + "\n")
    if "markdown" in outputs:
        outputs["markdown"].write("\n".join(bits_page(report, what, task.refused, left_out)) + "\n")
    return report.holds


def refusals(task: Task) -> list[str]:
    """A line for each reason why layouts of --all are not compared."""
    names: dict[str, list[str]] = {}
    for name, reason in task.refused.items():
        names.setdefault(reason, []).append(name)
    return [f"refused: {', '.join(layouts)}: {reason}" for reason, layouts in names.items()]
