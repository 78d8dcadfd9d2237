"""From text to a trained model on this machine: corpus, tokenizer, training on 4 ranks, another layout, generation.

Every command is printed before it runs, so that you can copy and change it.

    python examples/quickstart.py
    python examples/quickstart.py --corpus /some/folder/of/text
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.commands import launch, run


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a small GPT on real text, split over tensor, pipeline and data parallel ranks."""

    corpus: str | None = None
    """Folder of text files to train on; default the source code of Python's standard library."""
    output: str = "runs/quickstart"
    """Folder for all results."""
    vocab_size: int = 4096
    """Vocabulary size of the tokenizer."""
    train_iters: int = 95
    """Steps in the first layout."""
    more_iters: int = 15
    """Steps in the second layout."""
    global_batch_size: int = 128
    """Sequences in each step, a multiple of 32."""
    prompt: str = "def __init__(self"
    """Prompt that the trained model continues."""


MODEL = [
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
]


class Job:
    """The commands of the quickstart, with one method for each step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus = self.folder / "corpus.jsonl"
        self.tokenizer = self.folder / "tokenizer.json"
        self.prefix = self.folder / "corpus"
        self.checkpoints = self.folder / "checkpoints"
        self.plot = self.folder / "loss.png"

    def prepare_data(self) -> None:
        """Text -> JSON Lines -> tokenizer -> .bin/.idx."""
        folder = ["--folder", self.settings.corpus] if self.settings.corpus else []
        run("corpus", "tools/collect_corpus.py", *folder, "--output", self.corpus)
        run(
            "tokenizer", "tools/train_tokenizer.py",
            "--input", self.corpus, "--vocab-size", self.settings.vocab_size, "--output", self.tokenizer,
        )  # fmt: skip
        run(
            "tokens", "tools/preprocess_data.py", "--input", self.corpus, "--output-prefix", self.prefix,
            *self.tokenizer_flags(), "--append-eod", "--workers", "2", "--overwrite",
        )  # fmt: skip

    def train(self) -> None:
        """TP2 x PP2 with two chunks on each rank; then, from its checkpoint, DP2 x TP2 with a sharded optimizer."""
        first, last = self.settings.train_iters, self.settings.train_iters + self.settings.more_iters
        ranks = rank_count()
        layouts = {
            4: (
                ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2",
                 "--num-virtual-stages-per-pipeline-rank", "2"],
                ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"],
            ),
            2: (["--tensor-model-parallel-size", "2"], ["--use-distributed-optimizer"]),
            1: ([], ["--micro-batch-size", "8"]),
        }  # fmt: skip
        common = [
            *MODEL, *self.tokenizer_flags(), "--data-path", f"{self.prefix}_text_document", "--split", "95,5,0",
            "--micro-batch-size", "16", "--global-batch-size", self.settings.global_batch_size,
            "--lr", "4e-3", "--lr-warmup-iters", first // 10,
            "--lr-decay-style", "cosine", "--lr-decay-iters", last, "--min-lr", "4e-4", "--weight-decay", "0.1",
            "--adam-beta2", "0.98", "--save", self.checkpoints, "--eval-iters", "4", "--eval-interval", "30",
            "--log-interval", "20", "--tensorboard-dir", self.folder / "tensorboard",
            *(["--bf16"] if torch.cuda.is_available() else []),
        ]  # fmt: skip
        before, after = layouts[ranks]
        launch("training", ranks, *common, *before, "--train-iters", first)
        launch("another layout", ranks, *common, *after, "--train-iters", last, "--load", self.checkpoints)

    def show(self) -> None:
        """Generate text and draw the loss."""
        run(
            "text", "tools/generate_text.py", "--load", self.checkpoints, "--prompt", self.settings.prompt,
            "--max-new-tokens", "48", "--temperature", "0.7", "--top-p", "0.9",
        )  # fmt: skip
        metrics = self.checkpoints / "metrics.jsonl"
        run("plot", "tools/plot_metrics.py", metrics, "--out", self.plot)
        print(f"loss curve   {self.plot}\nmetrics      {metrics}\ncheckpoints  {self.checkpoints}")

    def tokenizer_flags(self) -> list[object]:
        """The flags that select the tokenizer, the same for every tool."""
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer]


def rank_count() -> int:
    """4 ranks on the CPU; on GPUs 1, 2 or 4, at most one per GPU."""
    gpus = torch.cuda.device_count()
    return 4 if gpus == 0 else max(n for n in (1, 2, 4) if n <= gpus)


def main() -> None:
    """Run all steps."""
    began = time.monotonic()
    job = Job(tyro.cli(Settings, description=__doc__))
    job.prepare_data()
    job.train()
    job.show()
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
