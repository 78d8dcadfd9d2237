"""Shares of the mutants that the tests find, by package, and lists of those that they miss."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

import yaml

from tests.mutants.examine import FOUND, NOT_EXECUTED, SURVIVED, Verdict

EQUIVALENT = "equivalent"
NO_NUMBER = "no number"
ON_GPU = "on a GPU"
KINDS = ("order", "memory", "message", "check", "process", "inference")
"""Effects other than a number of a training; ``equivalent.yaml`` defines each."""
OUTCOMES = (FOUND, EQUIVALENT, NO_NUMBER, ON_GPU, NOT_EXECUTED, SURVIVED)
REASONS: dict[str, list[dict[str, str]]] = yaml.safe_load(Path(__file__).with_name("equivalent.yaml").read_text())


def latest(verdicts: list[Verdict]) -> list[Verdict]:
    """The last verdict of each mutant, with those that change no training, in the order of the list of mutants."""
    by_name: dict[str, Verdict] = {}
    for verdict in verdicts:
        by_name[verdict.name] = verdict
    for verdict in by_name.values():
        entry = entry_of(verdict)
        if verdict.outcome != FOUND and entry is not None:
            kind = entry.get("kind")
            verdict.outcome = ON_GPU if kind == "gpu" else NO_NUMBER if kind else EQUIVALENT
    return list(by_name.values())


def judged_by_all(verdicts: list[Verdict]) -> list[Verdict]:
    """The beginning of the list up to the first mutant that not all judges have judged: an even sample."""
    complete = lambda verdict: verdict.outcome in OUTCOMES[:4] or verdict.final  # noqa: E731
    return list(takewhile(complete, latest(verdicts)))


def entry_of(verdict: Verdict) -> dict[str, str] | None:
    """The entry of ``equivalent.yaml`` with the reason why a mutant changes no training."""
    for entry in REASONS.get(verdict.name.partition(":")[0], []):
        target = verdict.name.partition(":")[2].partition("#")[0]
        if fnmatchcase(target, entry["function"]) and fnmatchcase(verdict.change, entry.get("change", "*")):
            return entry
    return None


def way_of(verdict: Verdict) -> str:
    """How a mutant is found."""
    if verdict.symptom.startswith("no answer"):
        return "time limit"
    if verdict.by.startswith("tests/parity"):
        return "parity rows"
    if verdict.by.startswith(("tests", "pytest")):
        return "other tests"
    if verdict.symptom.startswith(("exception", "the process")) or verdict.by == "compilation":
        return "exception while training"
    return "layouts of the plain model" if verdict.by.startswith("layout") else "plain model"


def summary(verdicts: list[Verdict], *, bound: bool = False) -> str:
    """A table of the packages, and how mutants are found, of the mutants that all judges have judged.

    ``bound``: also of the others, which count as not found, so that the share is a lower bound.
    """
    final = latest(verdicts) if bound else judged_by_all(verdicts)
    lines = [f"| package | mutants | {' | '.join(OUTCOMES)} | share found |", "|---" * (3 + len(OUTCOMES)) + "|"]
    packages = sorted({verdict.name.partition(".")[0] for verdict in final})
    for package in [*packages, "all"]:
        chosen = [verdict for verdict in final if package in ("all", verdict.name.partition(".")[0])]
        number = Counter(verdict.outcome for verdict in chosen)
        share = 100 * number[FOUND] / max(number[FOUND] + number[NOT_EXECUTED] + number[SURVIVED], 1)
        cells = [package, len(chosen), *(number[outcome] for outcome in OUTCOMES)]
        lines.append(f"| {' | '.join(map(str, cells))} | {share:.1f} % |")
    ways = Counter(way_of(verdict) for verdict in final if verdict.outcome == FOUND)
    lines += ["", *(f"found by {way}: {number}" for way, number in ways.most_common())]
    entries = [entry_of(verdict) for verdict in final if verdict.outcome == NO_NUMBER]
    kinds = Counter(entry["kind"] for entry in entries if entry is not None)
    lines += [f"no number, {kind}: {number}" for kind, number in kinds.most_common()]
    return "\n".join(lines)


def survivors(verdicts: list[Verdict], beginning: str = "") -> str:
    """The mutants that no test finds, in the order of the source."""
    missed = [verdict for verdict in latest(verdicts) if verdict.outcome in (SURVIVED, NOT_EXECUTED)]
    missed.sort(key=lambda verdict: (verdict.name.partition(":")[0], verdict.line))
    lines = []
    for verdict in missed:
        if verdict.name.startswith(beginning):
            bits = {True: "equal bits", False: "other bits", None: "no row"}[verdict.equal_bits]
            lines.append(f"{verdict.name} line {verdict.line}: {verdict.change} ({verdict.outcome}, {bits})")
    return "\n".join(lines)
