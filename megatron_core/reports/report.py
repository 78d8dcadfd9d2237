"""An HTML page about a run, made from its records alone."""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from markupsafe import Markup

from megatron_core.errors import MegatronError
from megatron_core.monitor.events import ExpertLoad
from megatron_core.output_file import Kind
from megatron_core.planner.simulate import simulate
from megatron_core.prepared_output import prepare_output
from megatron_core.reports.diagnosis import Diagnosis
from megatron_core.reports.diagnosis_rules import diagnose
from megatron_core.reports.goodput import LOST
from megatron_core.reports.metrics import find_metrics, read_run, recorded_loads
from megatron_core.reports.page import BLOCKS, GENERATOR, bars, chart, embedded_picture, html_table, page, three_digits
from megatron_core.reports.plot import plot_expert_load, plot_timelines, validations
from megatron_core.reports.reference_rate import ReferenceRate
from megatron_core.reports.summary import RunSummary
from megatron_core.reports.trace_files import measured_costs, read_trace

_REPORT = Kind("report of this program", lambda data: GENERATOR.encode() in data[:1000])
MOST_RANKS = 64
"""Maximum number of ranks shown; of more ranks, half are the slowest and half the fastest in forward and backward."""


def write_report(run: str | Path, out: str | Path, compared_runs: str | Path | Sequence[str | Path] = ()) -> None:
    """Write the page about ``run`` to the file ``out``; ``compared_runs``: runs to compare with, or a single one."""
    output = prepare_output({"out": out, "run": run, "compare": compared_runs}, "out", _REPORT)
    output.write(report(run, compared_runs))


def report(run: str | Path, compared_runs: str | Path | Sequence[str | Path] = ()) -> str:
    """Return the page as text."""
    compared_runs = [compared_runs] if isinstance(compared_runs, str | Path) else compared_runs
    summary = RunSummary.of(read_run(run))
    names = _names_of(run, *compared_runs)[1:]
    compared = {name: RunSummary.of(read_run(folder)) for name, folder in zip(names, compared_runs, strict=True)}
    diagnosis = diagnose(summary)
    metrics = find_metrics(run)
    name = _names_of(run)[0]
    sections = [
        ("summary", "Summary", _summary(summary, diagnosis)),
        ("diagnosis", "Diagnosis", _diagnosis(diagnosis)),
        ("loss", "Loss and validation", _loss(summary, compared)),
        ("throughput", "Throughput and utilisation", _throughput(summary, compared)),
        ("time", "Where the time goes", _time(summary)),
        ("memory", "Where the memory goes", _memory(summary)),
        ("collectives", "Collectives", _collectives(summary)),
        ("imbalance", "Imbalance", _imbalance(summary)),
        ("pipeline", "Pipeline", _pipeline(summary)),
        ("experts", "Load of the experts", _experts(summary, metrics)),
        ("goodput", "Goodput", _goodput(summary)),
    ]
    if compared:
        sections.append(("comparison", "Comparison of runs", _comparison(summary, compared)))
    sections.append(("config", "Configuration and environment", _config(summary)))
    return page(f"Training run {name}", [section for section in sections if section[2]])


def _names_of(*runs: str | Path) -> list[str]:
    """Short names of runs: of the folder or file, with the folder above if two have the same."""
    paths = [Path(os.path.realpath(find_metrics(run))) for run in runs]
    paths = [path.parent if path.stem == "metrics" else path.with_suffix("") for path in paths]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _summary(summary: RunSummary, diagnosis: Diagnosis) -> Markup:
    steps = summary.records.steps()
    header = summary.records.header()
    values: dict[str, str] = {}
    if steps:
        final_step = steps[-1]
        values |= {
            "steps": f"{final_step['iteration']} of {final_step['total_iterations']}",
            "last loss": f"{final_step['loss']:.4f}",
        }
        values["tokens"] = three_digits(float(final_step["consumed_tokens"]))
        for label, field, scale in (("tokens per second", "tokens_per_second", 1.0), ("step (s)", "elapsed_ms", 1e-3)):
            values[label] = three_digits(scale * (summary.mean(field) or 0.0))
    utilisation = summary.mean("utilisation")
    values |= {} if utilisation is None else {"utilisation": f"{utilisation:.1%}"}
    values |= {"goodput": f"{summary.goodput.share:.1%}"} if summary.ranks else {}
    if len(summary.ranks) > 1:
        values["scaling efficiency"] = f"{summary.scaling_efficiency:.1%}"
    values |= {"layout": str(header.get("layout", "unknown")), "ranks": str(header.get("world_size", "unknown"))}
    if diagnosis.findings:
        first = diagnosis.findings[0]
        values["bottleneck"] = f"{first.cause} ({first.share:.0%})"
    return BLOCKS.tiles(values) + _paragraphs((f"Note: {note}" for note in diagnosis.notes), "note")


def _paragraphs(texts: Iterable[str], style: str) -> Markup:
    return Markup().join(BLOCKS.paragraph(text, style) for text in texts)


def _diagnosis(diagnosis: Diagnosis) -> Markup:
    if not diagnosis.findings:
        return BLOCKS.paragraph("Without times of steps there is no diagnosis.", "soft")
    return BLOCKS.findings(diagnosis.findings)


def _curve(summary: RunSummary, field: str, *, by_layout: bool = False) -> list[tuple[float, float]]:
    """The points of a field of steps; ``by_layout``: with a gap where the layout changes."""
    return _points(summary.records.steps(), field, by_layout=by_layout)


def _percents(summary: RunSummary, field: str, *, by_layout: bool = False) -> list[tuple[float, float]]:
    """The points of a share, as in the summary: in percent."""
    return [(iteration, 100 * share) for iteration, share in _curve(summary, field, by_layout=by_layout)]


def _points(records: Sequence[Mapping[str, Any]], field: str, *, by_layout: bool = False) -> list[tuple[float, float]]:
    chosen = [r for r in records if r.get(field) is not None]
    points = []
    layout = None
    for record in chosen[:: max(len(chosen) // 1500, 1)]:
        if by_layout and layout is not None and record.get("layout") != layout:
            points.append((float(record["iteration"]), math.nan))
        layout = record.get("layout")
        points.append((float(record["iteration"]), float(record[field])))
    return points


def _changes(summary: RunSummary) -> list[tuple[float, str]]:
    """First steps after a change of layout, with the layout; empty if there is a single layout."""
    changes: list[tuple[float, str]] = []
    for step in summary.records.steps():
        if step.get("layout") and (not changes or step["layout"] != changes[-1][1]):
            changes.append((float(step["iteration"]), str(step["layout"])))
    return changes if len(changes) > 1 else []


def _loss(summary: RunSummary, compared: Mapping[str, RunSummary]) -> Markup:
    curves = {"training": _curve(summary, "loss")}
    curves |= {split: _points(checks, "loss") for split, checks in validations(summary.records.metrics).items()}
    curves |= {f"training of {name}": _curve(other, "loss") for name, other in compared.items()}
    drawn = {name: curve for name, curve in curves.items() if curve}
    sources = {name.partition("/")[2]: _curve(summary, name) for name in _names(summary, "lm loss by source")}
    by_source = chart(sources, "iteration", "loss per token by source of data") if sources else Markup()
    rates = chart({"learning rate": _curve(summary, "learning_rate")}, "iteration", "learning rate")
    norms = chart({"gradient norm": _curve(summary, "grad_norm")}, "iteration", "gradient norm")
    more = BLOCKS.details("More", rates + norms + _norms_by_layer(summary))
    return chart(drawn, "iteration", "loss per token", _changes(summary)) + by_source + more


def _names(summary: RunSummary, metric: str) -> list[str]:
    """Names of the fields of steps that break ``metric`` down."""
    names = (name for step in summary.records.steps() for name in step if name.startswith(f"{metric}/"))
    return list(dict.fromkeys(names))


def _norms_by_layer(summary: RunSummary) -> Markup:
    metric = "grad-norm by layer"
    steps = [step for step in summary.records.steps() if f"{metric}/head" in step]
    if not steps:
        return BLOCKS.paragraph("Norms by layer are recorded with --log-norms-by-layer.", "soft")
    final_step = steps[-1]
    rows = []
    for name in _names(summary, metric):
        grad, weights = (final_step.get(metric) for metric in (name, name.replace("grad", "params", 1)))
        if grad is not None and weights is not None:
            rows.append((name.partition("/")[2], grad, weights, grad / weights if weights else math.nan))
    return html_table(("last step", "gradient norm", "norm of weights", "ratio"), rows)


def _throughput(summary: RunSummary, compared: Mapping[str, RunSummary]) -> Markup:
    runs = {"this run": summary} | dict(compared)
    changes = _changes(summary)
    rates = {name: _curve(run, "tokens_per_second", by_layout=True) for name, run in runs.items()}
    utilisation = {name: _percents(run, "utilisation", by_layout=True) for name, run in runs.items()}
    goodput = {name: _percents(run, "goodput") for name, run in runs.items()}
    charts = chart(rates, "iteration", "tokens per second", changes)
    charts += chart(utilisation, "iteration", "utilisation (%)", changes)
    charts += chart(goodput, "iteration", "goodput (%)", changes)
    return charts + _paragraphs(_references(summary), "soft")


def _references(summary: RunSummary) -> Iterator[str]:
    """Describe the reference of utilisation; several lines if restarts changed it."""
    lines = summary.records.ranks.get(min(summary.records.ranks, default=0), [])
    before = None
    for line in (line for line in lines if line["kind"] == "start" and line.get("product_rate")):
        rate = ReferenceRate.of(line.get("rate_of")) or f"{line['product_rate'] / 1e12:.3g} TFLOP/s of a rank"
        if rate != before:
            begin = f"From iteration {line.get('iteration', 0) + 1} on, utilisation" if before else "Utilisation"
            yield f"{begin} is against {rate}."
        before = rate


def _shown_ranks(summary: RunSummary) -> list[int]:
    ranks = sorted(summary.ranks)
    if len(ranks) <= MOST_RANKS:
        return ranks
    by_time = sorted(ranks, key=lambda rank: summary.ranks[rank].compute / summary.ranks[rank].steps)
    return sorted(by_time[: MOST_RANKS // 2] + by_time[-MOST_RANKS // 2 :])


def _time(summary: RunSummary) -> Markup:
    if not summary.ranks:
        return BLOCKS.paragraph("No rank has recorded its times.", "soft")
    rows = {}
    for rank in _shown_ranks(summary):
        times = summary.ranks[rank]
        seconds_by_phase = times.phases | {name: traffic["exposed"] for name, traffic in times.traffic.items()}
        rows[summary.name(rank)] = {name: 1000 * s / times.steps for name, s in seconds_by_phase.items() if s}
    text = "Milliseconds per step by rank; time spent waiting for collectives is listed by group and kind."
    return BLOCKS.paragraph(text, "soft") + bars(rows, "ms")


def _memory(summary: RunSummary) -> Markup:
    rows = {}
    peaks = []
    for rank in _shown_ranks(summary):
        kinds = dict(summary.records.ranks[rank][-1].get("memory", {}))
        peak = kinds.pop("peak", 0)
        now = kinds.pop("current", 0)
        peaks.append((summary.name(rank), now / 2**20, peak / 2**20))
        rows[summary.name(rank)] = {category: size / 2**20 for category, size in kinds.items() if size}
    if not any(rows.values()):
        return BLOCKS.paragraph("No memory was recorded.", "soft")
    return bars(rows, "MiB") + html_table(("rank", "now (MiB)", "peak (MiB)"), peaks) + _gpus(summary)


def _gpus(summary: RunSummary) -> Markup:
    """Fragments of each GPU's memory, and its utilisation; empty without GPUs."""
    rows = []
    for rank in _shown_ranks(summary):
        states = [line["gpu"] for line in summary.records.ranks[rank] if line.get("gpu")]
        if states:
            busy = [state["busy"] for state in states if "busy" in state]
            share = f"{median(busy):.0%}" if busy else "not measured: pip install nvidia-ml-py"
            final = states[-1]
            rows.append((summary.name(rank), final["reserved"] / 2**20, f"{final['fragments']:.1%}", share))
    return html_table(("rank", "reserved (MiB)", "of it fragments", "GPU busy"), rows) if rows else Markup()


def _collectives(summary: RunSummary) -> Markup:
    rows = []
    for collective, (sending, waiting) in summary.communication().items():
        traffic = [t for t in (times.traffic.get(collective) for times in summary.ranks.values()) if t]
        steps = next(iter(summary.ranks.values())).steps
        rates = summary.rates(collective)
        rate = f"{median(rates.values()) / 1e9:.3g}" if rates else "not exposed"
        sent = float(median(t["bytes"] for t in traffic)) / steps / 1e6
        rows.append((collective, round(traffic[0]["calls"] / steps, 1), sent, rate, f"{sending:.1%}", f"{waiting:.1%}"))
    if not rows:
        return Markup()
    head = ("group and kind", "calls per step", "MB sent per step and rank", "GB/s", "exposed", "waiting for others")
    note = "Bytes are those of a ring algorithm; exposed and waiting are shares of the time of all ranks."
    return html_table(head, rows) + BLOCKS.paragraph(note, "soft")


def _imbalance(summary: RunSummary) -> Markup:
    ranks = _shown_ranks(summary)
    if len(ranks) < 2:
        return Markup()
    times = {rank: 1000 * summary.ranks[rank].compute / summary.ranks[rank].steps for rank in ranks}
    middle = median(times.values())
    slowest = max(times, key=lambda rank: times[rank])
    share = times[slowest] / middle if middle else 1.0
    text = (
        f"Slowest: {summary.name(slowest)}, {three_digits(times[slowest])} ms per step, {share:.2f} times the median."
    )
    rows = [(summary.name(rank), time, time / middle if middle else 1.0) for rank, time in times.items()]
    return BLOCKS.paragraph(text) + html_table(("rank", "forward and backward (ms per step)", "over the median"), rows)


def _pipeline(summary: RunSummary) -> Markup:
    folder = summary.config.get("trace_pipeline")
    if (summary.config.get("pipeline_model_parallel_size") or 1) == 1:
        return Markup()
    if folder is None:
        return BLOCKS.paragraph("Not traced; record the first 20 steps with --trace-pipeline FOLDER.", "soft")
    try:
        measured = read_trace(folder)
    except MegatronError as error:
        return BLOCKS.paragraph(str(error), "note")
    timeline = measured.timelines[measured.typical]
    planned = simulate(timeline.plan, measured_costs(timeline))
    with tempfile.TemporaryDirectory() as temporary:
        png = Path(temporary) / "pipeline.png"
        plot_timelines([("measured", timeline), (f"planned: {measured.schedule}", planned)], png, unit="ms")
        image = embedded_picture(png, "timelines of the pipeline, measured and planned")
    text = f"Step {measured.typical}: idle {timeline.idle:.1%} measured, {planned.idle:.1%} planned."
    return BLOCKS.paragraph(text) + image


def _experts(summary: RunSummary, metrics: Path) -> Markup:
    steps = recorded_loads(summary.records.steps())
    if not steps:
        return Markup()
    rows = []
    for layer, numbers in steps[-1].items():
        load = ExpertLoad(tuple(numbers["tokens"]), numbers["dropped"])
        rows.append((f"layer {layer}", load.max_over_mean, load.entropy, load.dropped))
    with tempfile.TemporaryDirectory() as folder:
        png = Path(folder) / "experts.png"
        plot_expert_load(metrics, png)
        image = embedded_picture(png, "load of every expert over the steps")
    return image + html_table(("last step", "busiest over mean", "entropy", "dropped"), rows)


def _goodput(summary: RunSummary) -> Markup:
    good = summary.goodput
    if not good.seconds:
        return BLOCKS.paragraph("No rank has recorded its times.", "soft")
    seconds = {"useful": good.useful} | {name: good.lost[name] for name in LOST if good.lost[name]}
    text = f"{three_digits(good.seconds)} s since the first start, {good.share:.1%} of them useful."
    return BLOCKS.paragraph(text) + bars({"since the first start": seconds}, "s")


def _comparison(summary: RunSummary, compared: Mapping[str, RunSummary]) -> Markup:
    runs = [summary, *compared.values()]
    rows: list[tuple[str, ...]] = []
    for label, field in (
        ("step (ms)", "elapsed_ms"), ("tokens per second", "tokens_per_second"), ("utilisation", "utilisation"),
    ):  # fmt: skip
        values = [run.mean(field) for run in runs]
        rows.append((label, *(_beside(value, values[0]) for value in values)))
    if (scaling := _scaling(runs)) is not None:
        rows.append(scaling)
    final_steps = [run.records.steps()[-1:] for run in runs]
    rows.append(("last loss", *(f"{steps[0]['loss']:.4f}" if steps else "-" for steps in final_steps)))
    rows.append(("goodput", *(f"{run.goodput.share:.1%}" if run.ranks else "-" for run in runs)))
    for phase in dict.fromkeys(p for run in runs for times in run.ranks.values() for p in times.phases):
        rows.append((f"{phase} (share)", *(f"{run.share(phase):.1%}" for run in runs)))
    changed = list(_differences([run.config for run in runs]))
    head = ("this run", *compared)
    settings = html_table(("setting", *head), changed) if changed else BLOCKS.paragraph("The same settings.")
    return html_table(("", *head), rows) + settings


def _scaling(runs: Sequence[RunSummary]) -> tuple[str, ...] | None:
    """Tokens per second and rank, relative to the run with the fewest ranks; None if all have the same number."""
    sizes = [run.records.header().get("world_size", 0) for run in runs]
    if len(set(sizes)) == 1 or not min(sizes):
        return None
    rates = [(run.mean("tokens_per_second") or 0.0) / size for run, size in zip(runs, sizes, strict=True)]
    reference = rates[sizes.index(min(sizes))]
    shares = (f"{rate / reference:.1%}" if reference else "-" for rate in rates)
    return f"scaling efficiency from {min(sizes)} ranks", *shares


def _beside(value: float | None, first: float | None) -> str:
    """A value, with its ratio to that of the first run."""
    if value is None:
        return "-"
    ratio = f" ({value / first:.2f} x)" if first and value != first else ""
    return f"{three_digits(value)}{ratio}"


def _differences(configs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name in sorted(set().union(*configs)):
        values = [config.get(name) for config in configs]
        if any(value != values[0] for value in values):
            yield name, *map(str, values)


def _config(summary: RunSummary) -> Markup:
    header = summary.records.header(0)
    environment = {**header.get("environment", {}), "host": header.get("host", "unknown")}
    text = yaml.safe_dump(summary.config, sort_keys=True) if summary.config else "unknown: rank 0 left no records"
    settings = BLOCKS.details("All settings", BLOCKS.preformatted(text))
    return html_table(("environment", ""), [(name, str(value)) for name, value in environment.items()]) + settings
