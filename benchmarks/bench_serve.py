"""Compare the server's engine with that of another commit: the same requests, alternately, one process for each.

git worktree add /tmp/earlier COMMIT
python -m benchmarks.bench_serve --earlier /tmp/earlier

The native libraries of the other commit must be built in its folder. Every text must be that of the other commit token
by token. Prints medians over rounds and appends them to benchmarks/results.csv; ``ratio`` is relative to the earlier
commit, in pairs of the same round. Cases, for a Llama with random weights in float32:

prefix: 32 requests at once with a common prefix of 768 tokens, 8 to 16 tokens of their own, and 48 new tokens
plain: 16 prompts of 5 to 80 tokens without a common prefix, 96 new tokens
pause: 8 texts are generated when a prompt of 1536 tokens arrives; the longest time between two of their steps
pp2: the requests of ``plain``, twice as many, on two pipeline ranks
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro

ROOT = Path(__file__).parents[1]
LENGTHS = (5, 9, 12, 16, 20, 23, 27, 31, 36, 40, 46, 52, 58, 64, 72, 80)
"""Lengths of the prompts in ``plain``."""
WORKER = "--worker"


def prompts_of(case: str, vocabulary: int) -> list[list[int]]:
    """The prompts of a case; in ``pause`` the last one arrives later."""
    random = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(3, vocabulary, (length,), generator=random).tolist()

    if case == "prefix":
        common = text(768)
        return [common + text(8 + number % 9) for number in range(32)]
    if case == "pause":
        return [*(text(32) for _ in range(8)), text(1536)]
    return [text(length) for length in LENGTHS * (2 if case == "pp2" else 1)]


def measure(generator: Any, case: str, new_tokens: int) -> dict[str, Any]:
    """Generate greedily; return texts, seconds, CPU seconds, and the longest time of a step of running texts."""
    from megatron_core.inference import Engine, Request

    engine = Engine(generator, max_batch_size=32)
    wall, processor = time.perf_counter(), time.process_time()
    texts: dict[int, list[int]] = {}
    *prompts, last = prompts_of(case, generator.vocab_size)
    for prompt in prompts if case == "pause" else [*prompts, last]:
        texts[engine.submit(Request(prompt=tuple(prompt), max_new_tokens=new_tokens))] = []
    pauses, before, arrives = [], 0.0, case == "pause"
    while engine.busy:
        found = engine.step()
        for progress in found:
            texts[progress.number].append(progress.token)
        if any(progress.number == 0 for progress in found):
            now = time.perf_counter()
            pauses.append(now - before)
            before = now
        if arrives and len(texts[0]) == new_tokens // 3:
            texts[engine.submit(Request(prompt=tuple(last), max_new_tokens=8))] = []
            arrives = False
    seconds, used = time.perf_counter() - wall, time.process_time() - processor
    return {"texts": list(texts.values()), "seconds": seconds, "cpu": used, "pause": max(pauses[1:])}


def ranks(folder: str, case: str, new_tokens: int) -> dict[str, Any]:
    """One of two pipeline ranks, measured after a warm-up."""
    import torch.distributed as dist

    generator = load(folder, world_of(dist.get_rank(), 2), pipeline_model_parallel_size=2)
    measure(generator, case, 2)
    return measure(generator, case, new_tokens)


def world_of(rank: int, size: int) -> Any:
    """This process as a rank on the CPU."""
    from megatron_core.parallel import World

    return World(rank, size, rank, torch.device("cpu"))


def load(folder: str, world: Any, **layout: int) -> Any:
    """The model in ``folder`` as a generator of the package that this process imports."""
    from megatron_core import parallel_state
    from megatron_core.inference import Generator
    from megatron_core.inference.generator import GenerationLayout
    from megatron_core.parallel import start_world
    from megatron_core.training.compatibility import open_model

    reader, trained = open_model(folder, None)
    config = GenerationLayout(**layout).applied(trained)
    if world.size == 1:  # the ranks of ``run_ranks`` have joined
        start_world(world)
    with reader:
        return Generator.load(reader, config, parallel_state.make_groups(config.parallel, world), world.device)


def work(folder: str) -> None:
    """Answer each line, a case and a number of tokens, with a line of JSON."""
    from megatron_core.verify.ranks import run_ranks

    torch.set_num_threads(1)
    generator = load(folder, world_of(0, 1))
    for line in sys.stdin:
        case, new_tokens = line.split()
        if case == "pp2":
            found = run_ranks(2, ranks, folder, case, int(new_tokens), timeout=600.0)[0]
        else:
            found = measure(generator, case, int(new_tokens))
        print(json.dumps(found), flush=True)


class Worker:
    """A process that imports the package of ``root``."""

    def __init__(self, root: Path, folder: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), WORKER, folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=root, env=environment, **pipes)

    def measure(self, case: str, new_tokens: int) -> dict[str, Any]:
        """Run a case."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(case, new_tokens, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """Wait until the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


NEW_TOKENS = {"prefix": 48, "plain": 96, "pause": 60, "pp2": 48}


def main(
    earlier: Path,
    rounds: int = 3,
    models: tuple[str, ...] = ("5M", "45M"),
    cases: tuple[str, ...] = tuple(NEW_TOKENS),
) -> None:
    """Time both.

    Args:
        earlier: Folder of the other commit.
        rounds: Number of rounds, after one warm-up round.
        models: Names of the shapes of ``benchmarks.bench_generate``.
        cases: Cases to measure.
    """
    from benchmarks.bench_generate import MODELS, llama

    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            llama(MODELS[name]).save_pretrained(folder)
            workers = {"earlier": Worker(earlier, folder), "engine": Worker(ROOT, folder)}
            for case in cases:
                compare(name, case, workers, rounds)
            for worker in workers.values():
                worker.end()


def compare(name: str, case: str, workers: dict[str, Worker], rounds: int) -> None:
    """Print and append the medians of one case."""
    from benchmarks.results import Row, append

    found: dict[str, list[dict[str, Any]]] = {contender: [] for contender in workers}
    for turn in range(rounds + 1):
        both = {contender: worker.measure(case, NEW_TOKENS[case]) for contender, worker in workers.items()}
        if both["engine"]["texts"] != both["earlier"]["texts"]:
            sys.exit(f"{name}, {case}: the texts differ")
        for contender, measured in both.items():
            found[contender] += [measured] if turn else []
    tokens = sum(map(len, found["engine"][0]["texts"]))
    clocks = {"pause": ("pause",), "pp2": ("seconds",)}.get(case, ("seconds", "cpu"))
    rows = []
    for clock in clocks:
        quotients = [a[clock] / b[clock] for a, b in zip(found["earlier"], found["engine"], strict=True)]
        ratio = statistics.median(quotients)
        for contender, each in found.items():
            middle = statistics.median(one[clock] for one in each)
            value, unit = (middle, "s") if clock == "pause" else (tokens / middle, "tokens/s")
            label = {"seconds": "wall clock", "cpu": "CPU time", "pause": "longest pause"}[clock]
            own = ratio if contender == "engine" else 1.0
            print(f"{name:5}{case:8}{contender:9}{label:14}{value:10.4g} {unit:9}{own:7.2f}", flush=True)
            rows.append(Row(f"{name} {case} {contender}, {label}", value, unit, ratio=own))
    append("bench_serve", rows)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2])
    else:
        sys.exit(tyro.cli(main, description=__doc__))
