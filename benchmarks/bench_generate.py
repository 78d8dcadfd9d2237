"""Compare greedy generation for 16 prompts of different lengths with `transformers.generate`, with the same weights.

A Llama with random weights on one thread in float32. Both alternate in one process, each with all prompts in one batch;
the ratios are medians over the rounds. Every text must equal that of transformers token by token. Prints a table and
appends it to benchmarks/results.csv; ``ratio`` there is the rate relative to transformers.

python -m benchmarks.bench_generate
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import tyro

from benchmarks.results import Row, append
from megatron_core import parallel_state
from megatron_core.inference import Engine, Generator, Request
from megatron_core.inference.generator import GenerationLayout
from megatron_core.parallel import World, start_world
from megatron_core.training.compatibility import open_model

LENGTHS = (5, 9, 12, 16, 20, 23, 27, 31, 36, 40, 46, 52, 58, 64, 72, 80)
"""Lengths of the prompts."""
MODELS: dict[str, dict[str, Any]] = {
    "45M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 16384},
    "5M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 4096},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
}  # fmt: skip
"""Shapes by number of parameters; the second is that of SmolLM2-135M."""


def llama(shape: dict[str, Any]) -> Any:
    """A Llama with random weights whose greedy text varies and does not end."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=True, initializer_range=0.05, max_position_embeddings=2048
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def load(folder: str) -> Generator:
    """The model in ``folder`` as this project's generator."""
    world = World(0, 1, 0, torch.device("cpu"))
    reader, trained = open_model(folder, None)
    config = GenerationLayout().applied(trained)
    start_world(world)
    with reader:
        return Generator.load(reader, config, parallel_state.make_groups(config.parallel, world), world.device)


def continue_by_engine(generator: Generator, prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
    """The new tokens of all prompts."""
    engine = Engine(generator, max_batch_size=batch)
    texts: dict[int, list[int]] = {}
    for prompt in prompts:
        texts[engine.submit(Request(prompt=tuple(prompt), max_new_tokens=new_tokens))] = []
    while engine.busy:
        for progress in engine.step():
            texts[progress.number].append(progress.token)
    return list(texts.values())


def continue_by_transformers(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The new tokens by ``generate``, with padding on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return output[:, width:].tolist()


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    """Wall-clock seconds, CPU seconds, and the result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - processor, result


def main(rounds: int = 5, new_tokens: int = 96, models: tuple[str, ...] = tuple(MODELS), batch: int = 16) -> None:
    """Time both.

    Args:
        rounds: Number of rounds, after one warm-up round.
        new_tokens: New tokens per prompt.
        models: Names of the shapes.
        batch: The engine's --max-batch-size.
    """
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    for name in models:
        model = llama(MODELS[name])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            generator = load(folder)
        high = MODELS[name]["vocab_size"]
        prompts = [torch.randint(3, high, (length,), generator=random).tolist() for length in LENGTHS]
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "engine": lambda p=prompts, g=generator: continue_by_engine(g, p, new_tokens, batch),
            "transformers": lambda p=prompts, m=model: continue_by_transformers(m, p, new_tokens),
        }
        report(name, runs, rounds, new_tokens * len(prompts))


def report(name: str, runs: dict[str, Callable[[], list[list[int]]]], rounds: int, tokens: int) -> None:
    """Print and append the medians of one model."""
    seconds: dict[str, list[tuple[float, float]]] = {contender: [] for contender in runs}
    for turn in range(rounds + 1):
        texts = {}
        for contender, run in runs.items():
            wall, processor, texts[contender] = timed(run)
            if turn:
                seconds[contender].append((wall, processor))
        if texts["engine"] != texts["transformers"]:
            sys.exit(f"{name}: the engine's text is not that of transformers")
    pairs = list(zip(seconds["engine"], seconds["transformers"], strict=True))
    rows = []
    for at, clock in enumerate(("wall clock", "CPU time")):
        ratio = statistics.median(theirs[at] / own[at] for own, theirs in pairs)
        for contender, found in seconds.items():
            rate = tokens / statistics.median(each[at] for each in found)
            own_ratio = ratio if contender == "engine" else 1.0
            print(f"{name:6}{contender:14}{clock:12}{rate:9.1f} tokens/s{own_ratio:7.2f}", flush=True)
            rows.append(Row(f"{name} {contender}, {clock}", rate, "tokens/s", ratio=own_ratio))
    append("bench_generate", rows, peer=f"transformers {transformers.__version__}")


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
