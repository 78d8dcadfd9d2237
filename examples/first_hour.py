"""From text to a chat in the browser: tokenizer, pretraining in four layouts, fine-tuning on conversations, evaluation.

``--minutes`` determines the size of the model and the number of steps. The text is the source code of Python's
standard library, and the conversations are questions about its functions, answered by their docstrings.

    python examples/first_hour.py --minutes 60
    python examples/first_hour.py --minutes 60 --corpus /some/folder/of/text --conversations talks.jsonl
"""

from __future__ import annotations

import ast
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.commands import launch, run
from megatron_core.commands.collect_corpus import LIBRARY_PATTERNS, SKIPPED, SKIPPED_IN_LIBRARY, find
from megatron_core.reports.reference_rate import measure_product_rate

TOKENS_PER_PARAMETER = 20
"""The best number for a given time of training (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models",
table 3)."""
LAYERS, HEAD = 4, 32
SEQUENCE, BATCH = 256, 16
PRETRAINING, FINE_TUNING = 0.65, 0.15
"""Shares of the time; the rest is for data, evaluation and the comparison of layouts."""
LAYOUTS = {
    "tp2 sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "4"],
    "pp2": ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "2"],
    "cp2": ["--context-parallel-size", "2", "--micro-batch-size", "4"],
    "dp2 zero2": ["--zero-stage", "2", "--micro-batch-size", "4"],
}
"""The layouts of pretraining, in turn; the last one is that of fine-tuning."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|endoftext|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
LONGEST_ANSWER = 400
"""Characters of a docstring's first paragraph; longer ones are left out."""
QUESTIONS = (
    ("What does {name} do?", "{summary}"),
    ("How do I call {name}?", "{name}({arguments})"),
    ("Explain {name} of Python's module {module}.", "{name}({arguments}): {summary}"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a small language model on this machine and chat with it."""

    minutes: float = 60.0
    """Time for everything; it determines the size of the model."""
    corpus: str | None = None
    """Folder of text files to train on; default: the source code of Python's standard library."""
    conversations: str | None = None
    """JSON Lines with messages to fine-tune on; default: questions about the standard library."""
    output: str = "runs/first_hour"
    """Folder for all results."""
    vocab_size: int = 4096
    """Vocabulary size of the tokenizer."""
    watts: float = 30.0
    """Power of this machine while it computes, for the estimate of energy; read it from a meter."""
    serve: bool = False
    """Start the chat page at the end."""


@dataclass(frozen=True)
class Plan:
    """Size of the model and number of steps."""

    hidden_size: int
    pretraining: int
    fine_tuning: int

    @property
    def parameters(self) -> int:
        """Weights of the layers: 12 h^2 each (Kaplan et al. 2020, table 1)."""
        return 12 * LAYERS * self.hidden_size**2

    @property
    def shape(self) -> str:
        """Description of the model."""
        return f"{LAYERS} layers, {self.hidden_size} wide, {self.parameters / 1e6:.1f} million weights in the layers"

    def flags(self) -> list[str]:
        """Flags of the model."""
        return [
            *("--num-layers", str(LAYERS), "--hidden-size", str(self.hidden_size)),
            *("--num-attention-heads", str(self.hidden_size // HEAD), "--seq-length", str(SEQUENCE)),
            *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
            *("--hidden-dropout", "0", "--attention-dropout", "0"),
        ]


def hidden_size_for(seconds: float, flops_per_second: float) -> int:
    """Width of the model that is best for ``seconds`` of training: 6 N D FLOPs with D = 20 N tokens.

    A multiple of 2 heads, so that two tensor-parallel ranks divide them.
    """
    parameters = (seconds * flops_per_second / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    step = 2 * HEAD
    return max(step, round((parameters / (12 * LAYERS)) ** 0.5 / step) * step)


def thread_rate() -> float:
    """FLOP/s of float32 products on one thread, which is what a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rate = measure_product_rate(torch.device("cpu"), torch.float32)
    torch.set_num_threads(threads)
    return rate


class Hour:
    """The steps of the program, with one method for each."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.output).absolute()  # commands run in the clone's folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus, self.prefix = self.folder / "corpus.jsonl", self.folder / "corpus"
        self.tokenizer, self.template = self.folder / "tokenizer.json", self.folder / "chat_template.jinja"
        self.talks = {split: self.folder / f"conversations.{split}.jsonl" for split in ("train", "valid")}
        self.pretrained, self.tuned = self.folder / "pretrained", self.folder / "tuned"

    def make_plan(self) -> Plan:
        """Choose the model, measure three of its steps, and print the price."""
        seconds = 60 * self.settings.minutes
        # Two ranks compute; an estimate of whole steps is half the rate of products, and the steps are measured below.
        hidden = hidden_size_for(PRETRAINING * seconds, 2 * 0.5 * thread_rate())
        trial = Plan(hidden, 0, 0)
        metrics = self.folder / "trial.jsonl"
        metrics.unlink(missing_ok=True)
        launch(
            "measure a step", 2, *trial.flags(), *LAYOUTS["dp2 zero2"], "--mock-data", "--vocab-size",
            self.settings.vocab_size, "--global-batch-size", BATCH, "--train-iters", 6,
            "--eval-iters", 0, "--lr-warmup-iters", 0, "--metrics-file", metrics, "--quiet",
        )  # fmt: skip
        times = [float(record["elapsed_ms"]) / 1000 for record in records(metrics) if record["kind"] == "step"]
        per_step = statistics.median(times[2:])
        steps = [max(len(LAYOUTS), int(share * seconds / per_step)) for share in (PRETRAINING, FINE_TUNING)]
        plan = Plan(hidden, *steps)
        tokens = plan.pretraining * BATCH * SEQUENCE
        print(
            f"\nmodel    {plan.shape}\n"
            f"training {plan.pretraining} steps, {tokens / 1e6:.1f} million tokens; {plan.fine_tuning} of fine-tuning\n"
            f"price    about {self.settings.minutes:.0f} minutes and {self.energy(seconds):.3f} kWh at "
            f"{self.settings.watts:.0f} W",
            flush=True,
        )
        return plan

    def energy(self, seconds: float) -> float:
        """Kilowatt hours of ``seconds`` of computing."""
        return self.settings.watts * seconds / 3.6e6

    def prepare_data(self) -> None:
        """Corpus, tokenizer, tokens, and conversations."""
        folder = ["--folder", Path(self.settings.corpus).absolute()] if self.settings.corpus else []
        run("corpus", "tools/collect_corpus.py", *folder, "--output", self.corpus)
        run(
            "tokenizer", "tools/train_tokenizer.py", "--input", self.corpus, "--vocab-size", self.settings.vocab_size,
            "--special-tokens", *ROLES, "--output", self.tokenizer,
        )  # fmt: skip
        run(
            "tokens", "tools/preprocess_data.py", "--input", self.corpus, "--output-prefix", self.prefix,
            *self.tokenizer_flags(), "--append-eod", "--workers", 2, "--overwrite",
        )  # fmt: skip
        self.template.write_text(TEMPLATE)
        given = self.settings.conversations
        lines = (
            Path(given).read_text().splitlines() if given else [json.dumps(each) for each in library_conversations()]
        )
        random.Random(0).shuffle(lines)
        held_out = max(1, len(lines) // 20)
        self.talks["valid"].write_text("\n".join(lines[:held_out]) + "\n")
        self.talks["train"].write_text("\n".join(lines[held_out:]) + "\n")
        print(f"\n{len(lines)} conversations, {held_out} of them for validation", flush=True)

    def pretrain(self, plan: Plan) -> None:
        """A quarter of the steps in each layout; each continues from the checkpoint of the one before."""
        common = [
            *plan.flags(), *self.tokenizer_flags(), "--data-path", f"{self.prefix}_text_document", "--split", "95,5,0",
            "--global-batch-size", BATCH, "--lr", "3e-3", "--lr-warmup-iters", plan.pretraining // 20,
            "--lr-decay-style", "cosine", "--lr-decay-iters", plan.pretraining, "--min-lr", "3e-4",
            "--weight-decay", "0.1", "--adam-beta2", "0.98", "--save", self.pretrained, "--eval-iters", 4,
            "--log-interval", max(1, plan.pretraining // 40),
        ]  # fmt: skip
        for number, (name, layout) in enumerate(LAYOUTS.items(), 1):
            last = plan.pretraining * number // len(LAYOUTS)
            load = ["--load", self.pretrained] if number > 1 else ["--overwrite-checkpoints"]
            launch(f"pretraining, {name}", 2, *common, *layout, "--train-iters", last, "--eval-interval", last, *load)

    def fine_tune(self, plan: Plan) -> None:
        """Train on conversations; evaluate the loss of held-out answers before and after it."""
        steps = plan.fine_tuning
        common = [
            *plan.flags(), *self.tokenizer_flags(), *LAYOUTS["dp2 zero2"], "--sft", "--chat-template", self.template,
            "--train-data-path", self.talks["train"], "--valid-data-path", self.talks["valid"],
            "--global-batch-size", BATCH, "--train-iters", steps, "--eval-iters", 8,
            "--load", self.pretrained, "--finetune",
        ]  # fmt: skip
        before = ["--skip-train", "--metrics-file", self.folder / "before.jsonl"]
        launch("conversations before fine-tuning", 2, *common, *before)
        rate = ["--lr", "1e-3", "--min-lr", "1e-5", "--lr-decay-style", "cosine", "--lr-warmup-iters", steps // 20]
        often = [
            "--eval-interval",
            steps,
            "--log-interval",
            max(1, steps // 10),
            "--save",
            self.tuned,
            "--overwrite-checkpoints",
        ]
        launch("fine-tuning", 2, *common, *rate, *often)

    def prove(self, plan: Plan) -> None:
        """Compare the four layouts with one process."""
        run(
            "proof", "tools/verify_layout.py", *plan.flags(), "--layouts", *LAYOUTS,
            "--markdown", self.folder / "proof.md",
        )  # fmt: skip

    def write_card(self, plan: Plan, seconds: float) -> Path:
        """Write the model's page: data, shape, losses, curve and proof."""
        run("curve", "tools/plot_metrics.py", self.pretrained / "metrics.jsonl", "--out", self.folder / "loss.png")
        pretrained, before = (
            validation_loss(self.pretrained / "metrics.jsonl"),
            validation_loss(self.folder / "before.jsonl"),
        )
        watts = self.settings.watts
        rows = {
            "Text": self.settings.corpus or "source code of Python's standard library (PSF License)",
            "Conversations": self.settings.conversations or "questions about its functions, from their docstrings",
            "Model": plan.shape,
            "Pretraining": f"{plan.pretraining} steps of {BATCH * SEQUENCE} tokens in {', '.join(LAYOUTS)}, in turn",
            "Fine-tuning": f"{plan.fine_tuning} steps of {BATCH} conversations",
            "Validation loss of the text": f"{pretrained:.3f}",
            "Validation loss of answers, before fine-tuning": f"{before:.3f}",
            "Validation loss of answers, after it": f"{validation_loss(self.tuned / 'metrics.jsonl'):.3f}",
            "Time and energy": f"{seconds / 60:.1f} minutes; {self.energy(seconds):.3f} kWh at {watts:.0f} W",
        }
        card = self.folder / "card.md"
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        proof = (self.folder / "proof.md").read_text()
        card.write_text(
            f"# A model of the first hour\n\n| | |\n|---|---|\n{table}\n\n![loss of pretraining](loss.png)\n\n"
            f"## The four layouts compared with one process\n\n{proof[proof.index('|') :]}"
        )
        return card

    def tokenizer_flags(self) -> list[object]:
        """The flags that select the tokenizer, the same for every command."""
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer]

    def chat(self) -> None:
        """Answer a question, then print the command of the page or start it."""
        page = ["tools/serve.py", "--load", self.tuned, "--chat-template", self.template]
        if self.settings.serve:
            run("chat", *page)
        else:
            print("\nchat with it in the browser:\n$ python", *page)


def library_conversations() -> Iterator[dict[str, object]]:
    """Questions and answers from the docstrings of public functions and classes of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in find(root, LIBRARY_PATTERNS, SKIPPED | SKIPPED_IN_LIBRARY):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if module.startswith("_") or "._" in module:
            continue
        try:
            nodes = list(ast.parse(path.read_text(encoding="utf-8")).body)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield from _questions_about(node, module)


def _questions_about(node: ast.ClassDef | ast.FunctionDef, module: str) -> Iterator[dict[str, object]]:
    summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if not 0 < len(summary) <= LONGEST_ANSWER:
        return
    arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
    facts = {"name": f"{module}.{node.name}", "module": module, "arguments": arguments, "summary": summary}
    for question, answer in QUESTIONS if isinstance(node, ast.FunctionDef) else QUESTIONS[:1]:
        texts = {"user": question.format(**facts), "assistant": answer.format(**facts)}
        yield {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def records(metrics: Path) -> list[dict[str, Any]]:
    """The records of a metrics file."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def validation_loss(metrics: Path) -> float:
    """The last validation loss of a run."""
    return [float(record["loss"]) for record in records(metrics) if record["kind"] == "validation"][-1]


def main() -> None:
    """Run all steps."""
    began = time.monotonic()
    hour = Hour(tyro.cli(Settings, description=__doc__))
    plan = hour.make_plan()
    hour.prepare_data()
    hour.pretrain(plan)
    hour.fine_tune(plan)
    hour.prove(plan)
    card = hour.write_card(plan, time.monotonic() - began)
    print(f"\nthe model's card: {card}")
    hour.chat()


if __name__ == "__main__":
    main()
