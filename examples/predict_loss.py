"""Train models of several depths, and predict the loss of the largest from the others.

The models are those of ``--depth``, each on a fixed number of tokens for each parameter. The losses of all but the
largest give the constants of L(C) = E + A C^-a, with the compute C = 6 N D of N parameters in layers and D tokens
(Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", section 3).

    python examples/predict_loss.py --corpus /some/folder/of/text
    python examples/predict_loss.py --depths 3 4 5 6 7 --channels 24 --tokens-per-parameter 5    # an hour on a laptop
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.commands import launch, run
from megatron_core.errors import ConfigError
from megatron_core.features.presets.depth import HEAD_SIZE, TOKENS_PER_PARAMETER, batch_tokens

EVALUATED = 64
"""Batches of a validation."""
LARGEST_MICRO_BATCH = 16
"""Most sequences in a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Predict the loss of a larger model from those of smaller ones."""

    depths: tuple[int, ...] = (2, 3, 4, 5, 6)
    """Numbers of layers in ascending order; the last one is predicted."""
    channels: int = HEAD_SIZE
    """Width of a model for each of its layers, and size of its heads."""
    tokens_per_parameter: float = TOKENS_PER_PARAMETER
    """Tokens of training for each parameter in layers."""
    seq_length: int = 256
    """Bytes in a sequence."""
    corpus: str | None = None
    """Folder of text files; default: the source code of Python's standard library."""
    output: str = "runs/predict_loss"
    """Folder for all results."""

    def __post_init__(self) -> None:
        if len(self.depths) < 4 or list(self.depths) != sorted(set(self.depths)):
            raise ConfigError(
                f"depths={' '.join(map(str, self.depths))}: three losses determine the curve, and the last depth is "
                "predicted; give at least 4 in ascending order"
            )


@dataclass(frozen=True)
class Size:
    """A model and the length of its training."""

    depth: int
    width: int
    parameters: int
    """N: those in layers."""
    micro_batch: int
    """Sequences in a micro-batch of one of the two ranks."""
    batch: int
    """Sequences in a batch."""
    steps: int

    @classmethod
    def of(cls, depth: int, settings: Settings) -> Size:
        """The model of ``depth`` layers, and its training by the rules of ``--depth`` with other rounding."""
        width = settings.channels * depth
        parameters = 12 * depth * width**2
        tokens = settings.tokens_per_parameter * parameters
        # Rounded to micro-batches: with powers of 2, as ``--depth`` has them, the losses would lie on no curve.
        share = batch_tokens(parameters, tokens) / settings.seq_length / 2
        count = math.ceil(share / LARGEST_MICRO_BATCH)
        micro_batch = max(round(share / count), 1)
        batch = 2 * count * micro_batch
        return cls(depth, width, parameters, micro_batch, batch, math.ceil(tokens / (batch * settings.seq_length)))

    def compute(self, seq_length: int) -> float:
        """C = 6 N D in FLOP."""
        return 6.0 * self.parameters * self.steps * self.batch * seq_length

    def flags(self, seq_length: int) -> list[object]:
        """Flags of the model and of its training."""
        return [
            *("--depth", self.depth, "--hidden-size", self.width, "--ffn-hidden-size", 4 * self.width),
            *("--seq-length", seq_length, "--max-position-embeddings", seq_length, "--train-iters", self.steps),
            *("--global-batch-size", self.batch, "--micro-batch-size", self.micro_batch),
        ]


@dataclass(frozen=True)
class Curve:
    """L(C) = floor + scale C^-exponent."""

    floor: float
    scale: float
    exponent: float

    @classmethod
    def through(cls, computes: Sequence[float], losses: Sequence[float]) -> Curve:
        """The curve with the least squares of log(L - floor), over a grid of floors."""
        logs, found = np.log(computes), []
        for floor in np.linspace(0.0, min(losses), 1000, endpoint=False):
            rests = np.log(np.asarray(losses) - floor)
            slope, constant = np.polyfit(logs, rests, 1)
            error = float(np.square(rests - constant - slope * logs).sum())
            found.append((error, cls(float(floor), math.exp(constant), -float(slope))))
        return min(found, key=lambda each: each[0])[1]

    def loss(self, compute: float) -> float:
        """L(C)."""
        return self.floor + self.scale * compute**-self.exponent


def main() -> None:
    """Train all models, then write the table."""
    settings = tyro.cli(Settings, description=__doc__)
    folder = Path(settings.output).absolute()  # commands run in the clone's folder
    folder.mkdir(parents=True, exist_ok=True)
    corpus, prefix = folder / "corpus.jsonl", folder / "corpus"
    text = ["--folder", Path(settings.corpus).absolute()] if settings.corpus else []
    run("corpus", "tools/collect_corpus.py", *text, "--output", corpus)
    tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
    words = ["--input", corpus, "--output-prefix", prefix, "--append-eod", "--workers", 2, "--overwrite"]
    run("tokens", "tools/preprocess_data.py", *words, *tokenizer)

    sizes = [Size.of(depth, settings) for depth in settings.depths]
    losses, seconds = list[float](), list[float]()
    for size in sizes:
        began, metrics = time.monotonic(), folder / f"depth{size.depth}.jsonl"
        metrics.unlink(missing_ok=True)
        launch(
            f"depth {size.depth}", 2, *size.flags(settings.seq_length), *tokenizer, "--split", "90,10,0",
            "--data-path", f"{prefix}_text_document", "--eval-iters", EVALUATED, "--eval-interval", size.steps,
            "--metrics-file", metrics, "--log-interval", max(1, size.steps // 10),
        )  # fmt: skip
        losses.append(last_validation_loss(metrics))
        seconds.append(time.monotonic() - began)

    page = table(settings, sizes, losses, seconds)
    (folder / "table.md").write_text(page)
    print(f"\n{page}")


def last_validation_loss(metrics: Path) -> float:
    """The last validation loss of a run."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(each["loss"]) for each in records if each["kind"] == "validation"][-1]


def table(settings: Settings, sizes: Sequence[Size], losses: Sequence[float], seconds: Sequence[float]) -> str:
    """Measured losses, the curve, and the prediction, in Markdown."""
    computes = [size.compute(settings.seq_length) for size in sizes]
    curve = Curve.through(computes[:-1], losses[:-1])
    predicted = curve.loss(computes[-1])
    rows = [
        "| depth | width | parameters | steps | FLOP | validation loss | seconds |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size, compute, loss, time_taken in zip(sizes, computes, losses, seconds, strict=True):
        rows.append(
            f"| {size.depth} | {size.width} | {size.parameters:,} | {size.steps} | {compute:.2g} | {loss:.4f} | "
            f"{time_taken:.0f} |"
        )
    law = f"L(C) = {curve.floor:.3f} + {curve.scale:.3g} C^-{curve.exponent:.3f}"
    error = f"predicted {predicted:.4f}, measured {losses[-1]:.4f}, {predicted / losses[-1] - 1:+.2%}"
    return "\n".join([*rows, "", f"{law} through all but the last model. Depth {sizes[-1].depth}: {error}.", ""])


if __name__ == "__main__":
    main()
