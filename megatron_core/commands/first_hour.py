"""Train a small language model on this machine and chat with it in the browser.

megatron-first-hour

megatron-first-hour --minutes 3 --corpus ~/notes --conversations talks.jsonl

--minutes determines the size of the model and the number of steps. The text is the source code of Python's standard
library, the conversations are questions about its functions, answered by their docstrings: nothing is downloaded.
The chat page needs pip install starlette uvicorn h11 pydantic, or the extra "server" of this package.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("first_hour")

import importlib.util
import json
import os
import random
import re
import shlex
import signal
import statistics
import sys
import time
import urllib.request
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from megatron_core.commands.collect_corpus import library_conversations
from megatron_core.commands.start import command_name
from megatron_core.commands.start_steps import START_SECONDS, TimedSteps
from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.prepared_output import make_output_folder
from megatron_core.reports.metrics import read_metrics
from megatron_core.terminal import parse_flags

TOKENS_PER_PARAMETER = 20
"""The best number for a given time of training (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models",
table 3)."""
LAYERS = 4
HEAD = 32
SEQUENCE = 256
LEAST_DOCUMENTS = 20  # 5 % of the documents are for validation
BATCH = 16
SHARES = (0.65, 0.15)
"""Of the time for training, those of pretraining and fine-tuning; the rest is for evaluation and slower layouts."""
DATA_SECONDS = {"text": 2.0, "tokenizer": 6.0, "tokens": 4.0}
END_SECONDS = {"proof": 8.0, "curve": 3.0}
"""Seconds of the steps that do not depend on --minutes, on two cores."""
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


@dataclass(frozen=True, kw_only=True)
class FirstHourFlags:
    """Train a small language model on this machine and chat with it in the browser."""

    minutes: float = 60.0
    """Time for everything; it determines the size of the model. From 1 on."""
    corpus: str | None = None
    """Folder of text files to train on; default: the source code of Python's standard library."""
    conversations: str | None = None
    """JSON Lines with messages to fine-tune on; default: questions about the standard library."""
    output: str = "first_hour"
    """Folder for all results."""
    vocab_size: int = 4096
    """Vocabulary size of the tokenizer."""
    serve: bool = True
    """Start the chat page at the end."""
    port: int = 0
    """Port of the chat page; 0: a free port."""


@dataclass(frozen=True)
class HourPlan:
    """Size of the model, number of steps, and seconds for a step."""

    hidden_size: int
    pretraining: int = 0
    fine_tuning: int = 0
    step_seconds: float = 0.0

    @property
    def shape(self) -> str:
        """Description of the model; the layers have 12 h^2 weights each (Kaplan et al. 2020, table 1)."""
        millions = 12 * LAYERS * self.hidden_size**2 / 1e6
        return f"{LAYERS} layers, {self.hidden_size} wide, {millions:.1f} million weights in the layers"

    def flags(self) -> list[str]:
        """Flags of the model."""
        return [
            *("--num-layers", str(LAYERS), "--hidden-size", str(self.hidden_size)),
            *("--num-attention-heads", str(self.hidden_size // HEAD), "--seq-length", str(SEQUENCE)),
            *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
            *("--hidden-dropout", "0", "--attention-dropout", "0"),
        ]

    def seconds(self) -> dict[str, float]:
        """Expected seconds of each step after the plan, by its title, in order."""
        quarter = START_SECONDS + self.pretraining / len(LAYOUTS) * self.step_seconds
        trainings = dict.fromkeys((f"pretraining, {name}" for name in LAYOUTS), quarter)
        fine_tuning = {"before fine-tuning": 6.0, "fine-tuning": START_SECONDS + self.fine_tuning * self.step_seconds}
        return DATA_SECONDS | trainings | fine_tuning | END_SECONDS


def hidden_size_for(seconds: float, flops_per_second: float) -> int:
    """Width of the model that is best for ``seconds`` of training: 6 N D FLOPs with D = 20 N tokens.

    A multiple of 2 heads, so that two tensor-parallel ranks divide them.
    """
    parameters = (seconds * flops_per_second / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    step = 2 * HEAD
    return max(step, round((parameters / (12 * LAYERS)) ** 0.5 / step) * step)


def training_seconds(minutes: float) -> float:
    """Seconds of ``minutes`` that remain for training; a quarter if the other steps take most of the time."""
    fixed_seconds = sum(DATA_SECONDS.values()) + sum(END_SECONDS.values()) + (len(LAYOUTS) + 2) * START_SECONDS
    return max(60 * minutes - fixed_seconds, 15 * minutes)


class FirstHour:
    """The steps of the program, with one method for each."""

    def __init__(self, settings: FirstHourFlags) -> None:
        self.settings = settings
        self.folder = Path(settings.output)
        make_output_folder("--output", self.folder / "log.txt")
        self.steps = TimedSteps(self.folder / "log.txt")
        self.corpus = self.folder / "corpus.jsonl"
        self.tokenizer = self.folder / "tokenizer.json"
        self.tokenizer_flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer]
        self.template = self.folder / "chat_template.jinja"
        self.talks = {split: self.folder / f"conversations.{split}.jsonl" for split in ("train", "valid")}
        self.pretrained = self.folder / "pretrained"
        self.tuned = self.folder / "tuned"

    def make_plan(self) -> HourPlan:
        """Choose the model, measure a few of its steps, and print the price, here and on a GPU."""
        import torch  # here, so that --help and wrong flags are answered at once

        from megatron_core.reports.reference_rate import measure_product_rate

        seconds = training_seconds(self.settings.minutes)
        torch.set_num_threads(1)  # as each of the two ranks
        rate = measure_product_rate(torch.device("cpu"), torch.float32)
        # A rough estimate of whole steps is half the rate of products; the steps are measured below.
        model = HourPlan(hidden_size_for(SHARES[0] * seconds, 2 * 0.5 * rate))
        metrics = self.folder / "trial.jsonl"
        metrics.unlink(missing_ok=True)
        self._train(
            "measuring a step", model, *LAYOUTS["dp2 zero2"], "--mock-data", "--vocab-size", self.settings.vocab_size,
            "--train-iters", 6, "--eval-iters", 0, "--lr-warmup-iters", 0, "--metrics-file", metrics, "--quiet",
        )  # fmt: skip
        times = [float(record["elapsed_ms"]) / 1000 for record in read_metrics(metrics) if record["kind"] == "step"]
        per_step = statistics.median(times[2:])
        counts = [max(len(LAYOUTS), int(share * seconds / per_step)) for share in SHARES]
        plan = HourPlan(model.hidden_size, counts[0], counts[1], per_step)
        self.steps.plan(plan.seconds())
        path = self.folder / "planned.json"
        self.steps.run(
            "asking the planner", "plan_layout", *plan.flags(), "--vocab-size", self.settings.vocab_size,
            "--global-batch-size", BATCH, "--gpus", 1, "--hardware", "h100", "--json", path,
        )  # fmt: skip
        planned = float(json.loads(path.read_text())[0]["seconds"]) * (plan.pretraining + plan.fine_tuning)
        print(
            f"\nmodel         {plan.shape}\n"
            f"pretraining   {plan.pretraining} steps of {BATCH * SEQUENCE} tokens, {per_step:.2f} s each\n"
            f"fine-tuning   {plan.fine_tuning} steps of {BATCH} conversations\n"
            f"time          about {sum(plan.seconds().values()) / 60:.1f} minutes\n"
            f"on one H100   {planned:.0f} s for these steps, by the planner\n",
            flush=True,
        )
        return plan

    def prepare_data(self) -> None:
        """Corpus, tokenizer, tokens, and conversations."""
        folder = ["--folder", self.settings.corpus] if self.settings.corpus else []
        self.steps.run("text", "collect_corpus", *folder, "--output", self.corpus)
        if (documents := self.corpus.read_text().count("\n")) < LEAST_DOCUMENTS:
            raise DataError(f"--corpus has {documents} documents; give {LEAST_DOCUMENTS} files or more, for validation")
        self.steps.run(
            "tokenizer", "train_tokenizer", "--input", self.corpus, "--vocab-size", self.settings.vocab_size,
            "--special-tokens", *ROLES, "--output", self.tokenizer,
        )  # fmt: skip
        self.steps.run(
            "tokens", "preprocess_data", "--input", self.corpus, "--output-prefix", self.folder / "corpus",
            *self.tokenizer_flags, "--append-eod", "--workers", 2, "--overwrite",
        )  # fmt: skip
        self.template.write_text(TEMPLATE)
        path = self.settings.conversations
        lines = Path(path).read_text().splitlines() if path else [json.dumps(talk) for talk in library_conversations()]
        if len(lines) < 2:
            raise DataError(f"--conversations {path} has fewer than 2 lines; one of them is for validation")
        random.Random(0).shuffle(lines)
        held_out = max(1, len(lines) // 20)
        self.talks["valid"].write_text("\n".join(lines[:held_out]) + "\n")
        self.talks["train"].write_text("\n".join(lines[held_out:]) + "\n")
        print(f"    {len(lines):,} conversations, {held_out} of them for validation", flush=True)

    def pretrain(self, plan: HourPlan) -> None:
        """A quarter of the steps in each layout; each continues from the checkpoint of the one before."""
        common = [
            *self.tokenizer_flags, "--data-path", self.folder / "corpus_text_document", "--split", "95,5,0",
            "--lr", "3e-3", "--lr-warmup-iters", plan.pretraining // 20,
            "--lr-decay-style", "cosine", "--lr-decay-iters", plan.pretraining, "--min-lr", "3e-4",
            "--weight-decay", "0.1", "--adam-beta2", "0.98", "--save", self.pretrained, "--eval-iters", 4,
            "--log-interval", max(1, plan.pretraining // 20),
        ]  # fmt: skip
        for number, (name, layout) in enumerate(LAYOUTS.items(), 1):
            final_step = plan.pretraining * number // len(LAYOUTS)
            load_and_length: list[object] = ["--load", self.pretrained] if number > 1 else ["--overwrite-checkpoints"]
            load_and_length += ["--train-iters", final_step, "--eval-interval", final_step]
            self._train(f"pretraining, {name}", plan, *common, *layout, *load_and_length)

    def fine_tune(self, plan: HourPlan) -> None:
        """Train on conversations; evaluate the loss of held-out answers before and after it."""
        steps = plan.fine_tuning
        common = [
            *self.tokenizer_flags, *LAYOUTS["dp2 zero2"], "--sft", "--chat-template", self.template,
            "--train-data-path", self.talks["train"], "--valid-data-path", self.talks["valid"],
            "--train-iters", steps, "--eval-iters", 8, "--load", self.pretrained, "--finetune",
        ]  # fmt: skip
        before = ["--skip-train", "--metrics-file", self.folder / "before.jsonl"]
        self._train("before fine-tuning", plan, *common, *before)
        self._train(
            "fine-tuning", plan, *common, "--lr", "1e-3", "--min-lr", "1e-5", "--lr-decay-style", "cosine",
            "--lr-warmup-iters", steps // 20, "--eval-interval", steps, "--log-interval", max(1, steps // 5),
            "--save", self.tuned, "--overwrite-checkpoints",
        )  # fmt: skip

    def prove(self, plan: HourPlan) -> None:
        """Compare the four layouts with one process."""
        self.steps.run(
            "proof", "verify_layout", *plan.flags(), "--layouts", *LAYOUTS, "--markdown", self.folder / "proof.md"
        )

    def write_card(self, plan: HourPlan, began: float) -> Path:
        """Write the model's page: data, shape, losses, curve and proof."""
        self.steps.run("curve", "plot_metrics", self.pretrained / "metrics.jsonl", "--out", self.folder / "loss.png")
        rows = {
            "Text": self.settings.corpus or "source code of Python's standard library (PSF License)",
            "Conversations": self.settings.conversations or "questions about its functions, from their docstrings",
            "Model": plan.shape,
            "Pretraining": f"{plan.pretraining} steps of {BATCH * SEQUENCE} tokens in {', '.join(LAYOUTS)}, in turn",
            "Fine-tuning": f"{plan.fine_tuning} steps of {BATCH} conversations",
            "Validation loss of the text": f"{validation_loss(self.pretrained / 'metrics.jsonl'):.3f}",
            "Validation loss of answers, before fine-tuning": f"{validation_loss(self.folder / 'before.jsonl'):.3f}",
            "Validation loss of answers, after it": f"{validation_loss(self.tuned / 'metrics.jsonl'):.3f}",
            "Time": f"{(time.monotonic() - began) / 60:.1f} minutes on {os.cpu_count()} cores",
        }
        card = self.folder / "card.md"
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        proof = (self.folder / "proof.md").read_text()
        card.write_text(
            f"# A model of the first hour\n\n| | |\n|---|---|\n{table}\n\n![loss of pretraining](loss.png)\n\n"
            f"## The four layouts compared with one process\n\n{proof[proof.index('|') :]}"
        )
        return card

    def chat(self) -> None:
        """Print the command of the chat page, or start it, ask it a question, and open it in the browser."""
        flags = ["--load", self.tuned, "--chat-template", self.template, "--port", self.settings.port]
        if not self.settings.serve:
            print(f"chat with it in the browser: {command_name('serve')} {shlex.join(map(str, flags))}")
            return
        with self.steps.started("serve", *flags) as server:
            assert server.stdout is not None
            address = re.search(r"http://\S+\d", first := server.stdout.readline())
            if address is None:
                raise MegatronError(f"the chat page did not start: {first}{server.stdout.read()}")
            question = "What does os.path.join do?"
            print(f"\nquestion  {question}\nanswer    {ask(address[0], question)}")
            print(f"\nchat with it at {address[0]} (Ctrl-C ends it)", flush=True)
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                webbrowser.open(address[0])
            server.wait()

    def _train(self, title: str, plan: HourPlan, *flags: object) -> None:
        self.steps.run(title, "train", "--nproc-per-node", 2, *plan.flags(), "--global-batch-size", BATCH, *flags)


def validation_loss(metrics: Path) -> float:
    """The last validation loss of a run."""
    return [float(record["loss"]) for record in read_metrics(metrics) if record["kind"] == "validation"][-1]


def ask(address: str, question: str) -> str:
    """The likeliest answer of the server at ``address``."""
    fields = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(fields).encode(), kind)
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def first_hour(settings: FirstHourFlags) -> None:
    """Run all steps. Errors: ``ConfigError`` before the first step if the last one would fail."""
    began = time.monotonic()
    if settings.minutes <= 0:
        raise ConfigError(f"--minutes {settings.minutes} must be positive")
    missing = [name for name in ("starlette", "uvicorn", "h11", "pydantic") if not importlib.util.find_spec(name)]
    if settings.serve and missing:
        names = " ".join(missing)
        raise ConfigError(f"the chat page needs {names}: pip install {names}, or give --no-serve")
    hour = FirstHour(settings)
    plan = hour.make_plan()
    hour.prepare_data()
    hour.pretrain(plan)
    hour.fine_tune(plan)
    hour.prove(plan)
    print(f"\nthe model's card: {hour.write_card(plan, began)}")
    hour.chat()


def main() -> None:
    """Parse the flags and run."""
    # The default action of SIGTERM would leave the running step, or the server of the chat page, behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    first_hour(parse_flags(FirstHourFlags, description=__doc__))
