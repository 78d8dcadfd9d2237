"""Continue prompts with a trained model.

megatron-generate --load runs/quickstart/checkpoints --prompt "def main("

megatron-generate --load ... --prompt-file prompts.jsonl --output texts.jsonl --logprobs 2

megatron-generate --nproc-per-node 2 --load ... --prompt ... --tensor-model-parallel-size 2
"""

from __future__ import annotations

from megatron_core.commands.start import run_ranked, start

if __name__ == "__main__":
    start("generate_text")

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_core.errors import CheckpointError, ConfigError, DataError
from megatron_core.inference.settings import GenerationLayout, InferenceConfig
from megatron_core.output_file import Kind, Output
from megatron_core.parallel.grid import WORLD
from megatron_core.prepared_output import json_keys, prepare_output
from megatron_core.text_file import read_text
from megatron_core.tokenizers import Tokenizer, end_ids

if TYPE_CHECKING:
    from megatron_core.inference import Generator, Progress, TextStream
    from megatron_core.parallel import World

INTERACTIVE_TIMEOUT = 7 * 24 * 60.0
"""Minutes for which the other ranks wait for typed input."""

GENERATED = Kind(
    "file of this tool",
    lambda data: {"prompt", "text", "finish_reason", "tokens"} <= json_keys(data.split(b"\n", 1)[0]),
)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(InferenceConfig, GenerationLayout):
    """Continue prompts with a trained model, in any layout."""

    load: str
    """Folder of checkpoints (--save of the training, also of Megatron-LM), of a single checkpoint, or of a Hugging Face
    model."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; several are generated together."""
    prompt_file: str | None = None
    """File of prompts: one per line, or in a .jsonl file an object {"prompt": text} per line."""
    interactive: bool = False
    """Read prompts from standard input, one per line, until its end."""
    output: str | None = None
    """Write a JSON object per prompt to this file: prompt, text, tokens, finish_reason, log-probabilities."""
    max_new_tokens: int = 64
    """Maximum number of new tokens; the text also ends at an end-of-document, end-of-sequence or end-of-turn token."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not printed."""
    temperature: float = 0.0
    """Divides the logits; 0: always choose the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this number."""
    seed: int = 1234
    """Seed for sampling; the same for every prompt."""
    logprobs: int | None = None
    """Also print each token's log-probability, and this number of most likely tokens with theirs."""
    max_length: int | None = None
    """Maximum number of tokens of a prompt with its continuation; default: the model's positions, if it has learned
    ones. With --rope-scaling-type longrope it chooses short or long factors; the default is the model's positions."""
    max_batch_size: int = 32
    """Maximum number of prompts that are generated together."""
    ckpt_step: int | None = None
    """Iteration to load; default: the latest."""


@dataclass
class PromptText:
    """A prompt and its continuation so far."""

    prompt: str
    stream: TextStream
    progress: list[Progress] = field(default_factory=list)
    finished: str | None = None

    def add(self, progress: Progress) -> str:
        """Add the engine's progress; returns the text to show."""
        assert progress.token is not None, "requests have at least one new token"
        visible = ""
        if progress.finished != "stop":
            self.progress.append(progress)
            visible = self.stream.add(progress.token)
        if progress.finished:
            visible += self.stream.finish()
        self.finished = "stop" if self.stream.stopped else progress.finished
        return visible

    def as_json(self) -> dict[str, Any]:
        """The JSON object for --output."""
        content: dict[str, Any] = {"prompt": self.prompt, "text": self.stream.text, "finish_reason": self.finished}
        scores = [progress.score for progress in self.progress if progress.score is not None]
        content["tokens"] = [progress.token for progress in self.progress]
        if scores:
            content["logprobs"] = [score.logprob for score in scores]
            content["alternatives"] = [[list(pair) for pair in score.alternatives] for score in scores]
        return content


def generate_text(settings: GenerateFlags, world: World) -> None:
    """Load the model, generate, and print on rank 0 during generation."""
    from megatron_core.inference.generator import start_generator
    from megatron_core.training.compatibility import open_model

    if settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={settings.max_new_tokens}: give 1 or more")
    prompts = [*settings.prompt, *(read_prompts(settings.prompt_file) if settings.prompt_file else ())]
    if not prompts and not settings.interactive:
        raise ConfigError("no prompt was given; use --prompt, --prompt-file or --interactive")
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, as Python represents bytes that are not UTF-8
            fault = f"the prompt is not valid Unicode ({error}); correct it"
            raise DataError(f"{shortened_prompt(prompt)}: {fault}") from None
    output: Output | None = None
    if settings.output is not None and world.rank == 0:
        output = prepare_output(settings, "output", GENERATED)
    reader, trained = open_model(settings.load, settings.ckpt_step)
    timeout = {"timeout_minutes": INTERACTIVE_TIMEOUT} if settings.interactive else {}
    generator, tokenizer = start_generator(reader, trained, settings, world, **timeout)
    texts = continue_all(settings, prompts, generator, tokenizer, world) if prompts else []
    if output is not None:
        output.write("".join(json.dumps(text.as_json(), ensure_ascii=False) + "\n" for text in texts))
    for prompt in typed_prompts(generator, world) if settings.interactive else ():
        try:
            continue_all(settings, [prompt], generator, tokenizer, world)
        except ConfigError as error:
            print_on_first_rank(f"error: {error}\n", world)


def continue_all(
    settings: GenerateFlags, prompts: Sequence[str], generator: Generator, tokenizer: Tokenizer, world: World
) -> list[PromptText]:
    """Continue ``prompts`` together; one is printed while it grows, several each when it and those before are done."""
    from megatron_core.inference import Engine, Request, Sampling, TextStream

    engine = Engine(generator, max_batch_size=settings.max_batch_size, max_length=settings.max_length, config=settings)
    tokens = [generator.before_prompt(ids) for ids in tokenizer.tokenize_batch(prompts)]
    texts = [PromptText(p, TextStream(tokenizer, settings.stop, ids)) for p, ids in zip(prompts, tokens, strict=True)]
    ends = end_ids(tokenizer)
    sampling = Sampling(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed
    )
    for number, ids in enumerate(tokens):
        request = Request(
            prompt=tuple(ids),
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            ends=ends,
            logprobs=settings.logprobs,
        )
        try:
            assert engine.submit(request) == number
        except ConfigError as error:
            raise ConfigError(f"{shortened_prompt(prompts[number])}: {error}") from None
    alone = len(prompts) == 1
    printed = 0
    print_on_first_rank(prompts[0] if alone else "", world)
    while engine.busy:
        for progress in engine.step():
            text = texts[progress.number]
            if progress.error is not None:
                raise CheckpointError(f"{shortened_prompt(text.prompt)}: {progress.error}")
            new = text.add(progress)
            print_on_first_rank(new if alone else "", world)
            if text.finished is not None:
                engine.cancel(progress.number)
        while printed < len(texts) and texts[printed].finished is not None:
            print_on_first_rank(conclusion(texts[printed], tokenizer, alone), world)
            printed += 1
    limit = engine.max_length
    if world.rank == 0 and any(t.finished == "length" and len(t.progress) < settings.max_new_tokens for t in texts):
        print(f"(ended at the last of the model's {limit} positions)", file=sys.stderr)
    return texts


def conclusion(text: PromptText, tokenizer: Tokenizer, alone: bool) -> str:
    """The output for a finished text: the text, unless it was printed during generation, and its probabilities."""
    from megatron_core.inference import TokenTexts

    text_of = TokenTexts(tokenizer)
    output = "\n" if alone else f"{text.prompt}{text.stream.text}\n"
    for progress in text.progress:
        if progress.score is not None and progress.token is not None:
            alternatives = [f"{text_of(i)!r} {value:.4f}" for i, value in progress.score.alternatives]
            output += f"{progress.score.logprob:10.4f}  {text_of(progress.token)!r}  {'  '.join(alternatives)}\n"
    return output if alone else output + "-" * 40 + "\n"


def read_prompts(path: str) -> list[str]:
    """The prompts in the lines of a file that are not blank; ``DataError`` with the line that has none."""
    try:
        lines = read_text(path).split("\n")  # texts may contain other line separators
    except (OSError, ValueError) as error:
        raise DataError(f"prompt_file={path!r} cannot be read: {error}") from None
    if not path.endswith(".jsonl"):
        return [line.removesuffix("\r") for line in lines if line.strip()]
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, RecursionError, TypeError, KeyError):
            prompt = None
        if not isinstance(prompt, str):
            raise DataError(f'{path}:{number}: this is not an object with a string "prompt"')
        prompts.append(prompt)
    return prompts


def typed_prompts(generator: Generator, world: World) -> Iterator[str]:
    """Yield lines typed on rank 0 on all ranks."""
    from megatron_core.parallel.texts import gather_strings

    while True:
        line = ""
        if world.rank == 0:
            print_on_first_rank("> " if sys.stdin.isatty() else "", world)
            line = sys.stdin.readline()
        line = gather_strings(line, generator.groups.group(WORLD), world.device)[0]
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def shortened_prompt(prompt: str, most: int = 40) -> str:
    """The beginning of a prompt, for a message."""
    return repr(prompt if len(prompt) <= most else prompt[:most] + "...")


def print_on_first_rank(text: str, world: World) -> None:
    """Print on rank 0 immediately."""
    if world.rank == 0:
        print(text, end="", flush=True)


def main() -> None:
    """Parse the flags, run and exit."""
    run_ranked(GenerateFlags, __doc__, generate_text)
