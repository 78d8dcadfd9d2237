r"""Statistics and checks of a corpus of token files: tokens by source, lengths, duplicates, samples, and a picture.

megatron-corpus-report --input web_text_document books_text_document --longer-than 4096 \
    --output runs/corpus.json --png runs/corpus.png

megatron-corpus-report --input shards --output /shared/corpus.json --engine ray
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("corpus_report")

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from megatron_core.commands.inspect_dataset import ShowTextFlags, as_text, histogram
from megatron_core.commands.merge_datasets import folder_prefixes, parts_of
from megatron_core.errors import ConfigError, DataError
from megatron_core.output_file import make_folder
from megatron_core.prepared_output import json_with, picture_kind, prepare_output
from megatron_core.preprocess.corpus import (
    CorpusOptions,
    MergeTask,
    RangeTask,
    lengths_of,
    merged,
    plan_merge,
    plan_ranges,
    read_counts,
)
from megatron_core.preprocess.pool import WorkerPool
from megatron_core.preprocess.ray_tasks import AnyTask, RayTasks
from megatron_core.preprocess.report import progress_of_bytes
from megatron_core.preprocess.settings import available_cores, parse_share
from megatron_core.terminal import parse_flags

SHOWN = 20
"""Sources in the printed table and the picture; the file has all."""


@dataclass(frozen=True, kw_only=True)
class CorpusReportFlags(ShowTextFlags):
    """Statistics and checks of a corpus of token files."""

    input: tuple[str, ...]
    """Prefixes of .bin/.idx pairs or of lists of parts, each a source; or folders, of which each pair is a source."""
    output: str
    """File of the report, as JSON; FILE.parts has the results of tasks until the end."""
    png: str | None = None
    """Write a plot of lengths, sources and duplicates to this file."""
    longer_than: int | None = None
    """Count documents with more tokens than this, for example the sequence length, and their tokens beyond it."""
    samples: int = 5
    """Number of documents to show, chosen at random, but the same in each run."""
    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: tasks of a Ray cluster, of which all hosts share the folders."""
    partition: str | None = None
    """I/N: compute only the I-th of N shares, I from 1 to N; for job arrays."""
    join_partitions: bool = False
    """Finish the report when all partitions are computed."""
    workers: int | None = None
    """Processes; default: one per core."""


def corpus_report(settings: CorpusReportFlags) -> None:
    """Compute what is missing, and write and print the report."""
    share = check_report(settings)
    output = prepare_output(settings, "output", json_with("report of a corpus", "corpus", "sources"))
    if settings.png is not None:
        prepare_output(settings, "png", picture_kind(settings.png))
    tokenizer = settings.tokenizer()
    sources = dict(found_sources(settings.input))
    folder = Path(f"{settings.output}.parts")
    make_folder(folder)
    options = CorpusOptions(settings.longer_than, settings.samples)
    ranges = plan_ranges(list(sources.values()), options)
    work = TaskRunner(settings, folder, options)
    try:
        if share is not None:
            number, total = share
            work.run(ranges[number - 1 :: total], "counting")
            print(f"{folder}: {len(ranges[number - 1 :: total]):,} parts of --partition {settings.partition}")
            return
        if settings.join_partitions:
            work.refuse_missing(ranges)
        work.run(ranges, "counting")
        merges = plan_merge(ranges, sum(read_counts(folder / task.name)["documents"] for task in ranges))
        work.run(merges, "comparing")
    finally:
        work.stop()
    result = merged(folder, list(sources), ranges, merges, options)
    for sample in result["samples"]:
        sample["text"] = as_text(sample.pop("ids"), tokenizer)
    output.write(json.dumps(result, indent=1) + "\n")
    if settings.png is not None:
        plot_report(result, settings.png)
    for name in [task.name for task in ranges] + [task.name for task in merges]:
        (folder / name).unlink()
    with suppress(OSError):  # it has other files, such as parts for other options
        folder.rmdir()
    print("\n".join(report_lines(result, shutil.get_terminal_size((100, 24)).columns)))
    print(f"\nwrote {' and '.join(filter(None, [settings.output, settings.png]))}")


def check_report(settings: CorpusReportFlags) -> tuple[int, int] | None:
    """The share of --partition. ConfigError: flags that are illegal or exclude each other."""
    for name, least in (("longer_than", 1), ("samples", 0), ("workers", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small; give {least} or more")
    chosen = [settings.engine == "ray", settings.partition is not None, settings.join_partitions]
    if sum(chosen) > 1:
        raise ConfigError("--engine ray, --partition and --join-partitions exclude each other; give one of them")
    try:
        return None if settings.partition is None else parse_share(settings.partition)
    except ValueError:
        raise ConfigError(f"--partition {settings.partition} must be I/N with 1 <= I <= N, such as 3/8") from None


def found_sources(inputs: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The name and the pairs of each source. ConfigError: given twice."""
    names: set[str] = set()
    for text in inputs:
        is_folder = Path(text).is_dir()
        for name in folder_prefixes(Path(text)) if is_folder else [text]:
            if name in names:
                raise ConfigError(f"--input has {name} twice, so its documents would be duplicates; remove one")
            names.add(name)
            yield name, [name] if is_folder else parts_of(name)


class TaskRunner:
    """Runs tasks on this machine or on a Ray cluster, except those whose file exists."""

    def __init__(self, settings: CorpusReportFlags, folder: Path, options: CorpusOptions) -> None:
        self._folder = folder
        self._shared = (folder, options)
        self._processes = settings.workers or available_cores()
        is_ray = settings.engine == "ray"
        self._ray = RayTasks(self.finished, self._processes, settings.workers) if is_ray else None

    def finished(self) -> set[str]:
        """The names of the complete tasks."""
        return {path.name for path in self._folder.iterdir() if "." not in path.name}

    def refuse_missing(self, tasks: Sequence[RangeTask]) -> None:
        """DataError if a task is not complete."""
        complete = self.finished()
        missing = [task for task in tasks if task.name not in complete]
        if missing:
            raise DataError(
                f"{self._folder} has {len(tasks) - len(missing):,} of {len(tasks):,} parts; the first missing one is "
                f"of {missing[0].place}: run the --partition commands again, and then this one"
            )

    def run(self, tasks: Sequence[AnyTask], name: str) -> None:
        """Complete all tasks."""
        with progress_of_bytes(len(tasks), desc=name, leave=False) as bar:
            if self._ray is not None:
                for _ in self._ray.map(write_result, self._shared, tasks, lambda task: bar.update(task is not None)):
                    pass
                return
            complete = self.finished()
            bar.update(len(tasks) - len(left := [task for task in tasks if task.name not in complete]))
            pool = WorkerPool(self._processes, lambda task: write_result(self._shared, task))
            try:
                for _ in pool.map(left):
                    bar.update(1)
            finally:
                pool.stop()

    def stop(self) -> None:
        """Disconnect from the cluster."""
        if self._ray is not None:
            self._ray.stop()


def write_result(shared: tuple[Path, CorpusOptions], task: RangeTask | MergeTask) -> None:
    """Compute a task on any machine."""
    folder, options = shared
    if not (folder / task.name).exists():
        task.write(folder / task.name, options)


def report_lines(result: dict[str, Any], width: int) -> list[str]:
    """The printed report."""
    corpus = result["corpus"]
    header = f"{'tokens':>18}  {'documents':>14}  {'duplicates':>14}  {'of tokens':>9}  {'empty':>9}  source"
    lines = [header]
    largest = sorted(result["sources"], key=lambda source: -source["tokens"])[:SHOWN]
    for source in [*largest, corpus]:
        share = source["duplicate tokens"] / max(source["tokens"], 1)
        counts = f"{source['tokens']:>18,}  {source['documents']:>14,}  {source['duplicates']:>14,}"
        lines.append(f"{counts}  {share:>9.2%}  {source['empty']:>9,}  {source['name']}")
    if corpus["longer than"] is not None:
        beyond = f"{corpus['tokens beyond']:,} of their tokens are beyond"
        lines.append(f"{corpus['too long']:,} documents are longer than {corpus['longer than']:,} tokens; {beyond}")
    lines += ["", *histogram(lengths_of(corpus), width)]
    for group in result["most frequent documents"][:5]:
        name = f"document {group['document']} of {group['file']}"
        lines.append(f"{group['times']:,} times: {name} ({group['tokens']:,} tokens)")
    for sample in result["samples"]:
        name = f"document {sample['document']} of {sample['file']}"
        lines.append(f"\n{name} ({sample['tokens']:,} tokens)\n{sample['text']}")
    return lines


def plot_report(result: dict[str, Any], path: str) -> None:
    """Plot lengths, and tokens by source."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    from megatron_core.prepared_output import save_picture
    from megatron_core.preprocess.lengths import draw_lengths

    corpus = result["corpus"]
    sources = sorted(result["sources"], key=lambda source: -source["tokens"])[:SHOWN]
    figure = Figure(figsize=(8.5, 5.8 + 0.25 * len(sources)), layout="constrained")
    upper, lower, bars = figure.subplots(3, 1, height_ratios=[3, 3, 1 + 0.3 * len(sources)])
    draw_lengths(lengths_of(corpus), upper, lower)
    upper.set_title(f"{corpus['documents']:,} documents, {corpus['tokens']:,} tokens", loc="left", fontsize=12)
    # Names of files may be long, and their ends differ.
    names = [name if len(name) <= 40 else f"...{name[-37:]}" for name in (source["name"] for source in sources)]
    repeated = [source["duplicate tokens"] for source in sources]
    distinct = [source["tokens"] - tokens for source, tokens in zip(sources, repeated, strict=True)]
    rows = range(len(sources))
    bars.barh(rows, distinct, color="#2563eb", label="distinct documents")
    bars.barh(rows, repeated, left=distinct, color="#c2410c", label="duplicates")
    bars.set_yticks(rows, names, fontsize=8)
    bars.invert_yaxis()
    bars.xaxis.set_major_formatter(EngFormatter(sep=""))
    bars.set_xlabel("tokens of a source")
    bars.legend(frameon=False, fontsize=9)
    bars.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, dpi=150)


def main() -> None:
    """Parse the flags and run."""
    corpus_report(parse_flags(CorpusReportFlags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
