"""Count what the tests would miss: ``python -m tests.mutants run FOLDER``, then ``... report FOLDER``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch._dynamo  # recomputation imports it, which takes 1.5 s; forked processes inherit the import

from tests.defects.source import forget_all
from tests.mutants.examine import FOUND, Budget, Verdict, examine, examine_again, verdicts
from tests.mutants.judges import Case, all_rows, learn_cases, learn_rows
from tests.mutants.lines import Lines
from tests.mutants.report import summary, survivors
from tests.mutants.targets import ROOT, all_mutants, modules


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("command", choices=["list", "run", "again", "report", "bound", "survivors"])
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--count", type=int, default=2000, help="mutants of the sample")
    parser.add_argument("--only", default="", help="mutants whose name begins so")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = arguments.folder / "verdicts.jsonl"
    if arguments.command in ("report", "bound"):
        print(summary(list(verdicts(results)), bound=arguments.command == "bound"))
    elif arguments.command == "survivors":
        print(survivors(list(verdicts(results)), arguments.only))
    elif arguments.command == "list":
        for mutant in all_mutants()[: arguments.count]:
            print(mutant.name, mutant.lines[0], mutant.kind, mutant.change, sep="\t")
    else:
        run(arguments.folder, results, arguments.count, arguments.only, arguments.command == "again")


def run(folder: Path, results: Path, count: int, only: str, again: bool) -> None:
    """Judge the first mutants that have no verdict yet; ``again`` those that no judge has found, by all judges."""
    torch.set_num_threads(1)
    lines = Lines()
    stored = Stored(folder)
    # Tests leave modules and settings behind, so that another process runs them.
    cases = stored.kept("tests", partial(learn_cases, lines)) if again else []
    rows = all_rows()
    learn_rows(rows, lines, {name: numbers for name, _, numbers in stored.entries("rows")})
    stored.keep("rows", [(row.name, row.seconds, sorted(row.lines)) for row in rows])
    known = {verdict.name: verdict for verdict in verdicts(results)}
    mutants = [mutant for mutant in all_mutants()[:count] if mutant.name.startswith(only)]
    if again:
        mutants = [mutant for mutant in mutants if is_missed(known.get(mutant.name))]
    else:
        mutants = [mutant for mutant in mutants if mutant.name not in known]
    budget = Budget(40, 10, 20.0) if again else Budget()
    forget_all()
    gc.freeze()  # otherwise each child's collections copy the parent's memory
    with results.open("a", buffering=1) as file:
        for mutant in mutants:
            verdict = (examine_again if again else examine)(mutant, rows, cases, lines, budget)
            verdict.final = again
            print(verdict.line_of_file(), file=file)
            if verdict.outcome != FOUND:
                print(f"{verdict.name} line {verdict.line}: {verdict.change}", flush=True)


def is_missed(verdict: Verdict | None) -> bool:
    """Whether a mutant needs all judges."""
    return verdict is not None and verdict.outcome != FOUND and not verdict.final


class Stored:
    """Times and lines of judges in a folder, as long as the mutated modules do not change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sources = [ROOT.joinpath(*module.split(".")).with_suffix(".py").read_bytes() for module in modules()]
        self._key = sha256(b"".join(sources)).hexdigest()

    def entries(self, name: str) -> list:
        """Stored name, seconds and lines of each judge."""
        path = self._folder / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        return content["judges"] if content.get("sources") == self._key else []

    def keep(self, name: str, entries: list) -> None:
        """Store judges."""
        (self._folder / f"{name}.json").write_text(json.dumps({"sources": self._key, "judges": entries}))

    def kept(self, name: str, learn: Callable[[], list[Case]]) -> list[Case]:
        """The stored judges, which a forked process learns if there are none."""
        if not self.entries(name):
            child = os.fork()
            if child == 0:
                self.keep(name, [(case.name, case.seconds, sorted(case.lines)) for case in learn()])
                os._exit(0)
            os.waitpid(child, 0)
        return [Case(title, seconds, set(numbers)) for title, seconds, numbers in self.entries(name)]


if __name__ == "__main__":
    sys.exit(main())
