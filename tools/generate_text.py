"""Continue a prompt with a trained model.

python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def main("

torchrun --nproc-per-node 2 tools/generate_text.py --load ... --prompt ... --tensor-model-parallel-size 2
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import tyro

from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.config.parallel import BALANCED_STAGES
from megatron_core.config.rules_layout import parallel_problems
from megatron_core.errors import ConfigError
from megatron_core.inference import Generator, Sampling, until_stop
from megatron_core.parallel import World, run_job, start_world
from megatron_core.tokenizers import end_ids, tokenizer_of
from megatron_core.training.compatibility import open_model


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Continue a prompt with a trained model, in any layout."""

    load: str
    """Folder of checkpoints (--save of the training), of a single checkpoint, or of a Hugging Face model."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Largest number of new tokens; the text also ends at an end-of-document, end-of-sequence or end-of-turn token."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not printed."""
    temperature: float = 0.0
    """Logits are divided by it; 0: always the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    seed: int = 1234
    """Seed for sampling."""
    ckpt_step: int | None = None
    """Iteration to load; default the latest."""
    tensor_model_parallel_size: int = 1
    """Ranks over which the matrices of each layer are split."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are split."""


def generate_text(settings: Settings, world: World) -> None:
    """Load, generate, and print on rank 0 while generating."""
    sampling = Sampling(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed
    )
    reader, trained = open_model(settings.load, settings.ckpt_step)
    with reader:
        config = run_config(trained, settings)
        tokenizer = tokenizer_of(config.data)
        if tokenizer is None:
            raise ConfigError(f"{reader.folder} has no tokenizer, which the prompt needs; train with --tokenizer-type")
        check_layout(config, world)
        start_world(world)
        groups = parallel_state.make_groups(config.parallel, world)
        generator = Generator.load(reader, config, groups, world.device)
    prompt = tokenizer.tokenize(settings.prompt)
    written: list[int] = []
    shown = ""
    show(settings.prompt, world)
    ends, text, stopped = end_ids(tokenizer), "", False
    for token in generator.generate(prompt, settings.max_new_tokens, sampling, ends=ends):
        if token in ends:
            break
        written.append(token)
        text = tokenizer.detokenize(written)
        settled, stopped = until_stop(text, settings.stop)
        show(settled[len(shown) :], world)
        shown = settled
        if stopped:
            break
    show("\n" if stopped else text[len(shown) :] + "\n", world)
    room = generator.room_after(len(prompt))
    if len(written) == room and world.rank == 0:
        print(f"(ended at the last of the model's {config.max_positions} positions)", file=sys.stderr)


def run_config(config: RunConfig, settings: Settings) -> RunConfig:
    """The configuration of the training run, with the layout of ``settings``."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        **BALANCED_STAGES,
        pipeline_schedule=None,
        pipeline_plan=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        sequence_parallel=False,  # one new position cannot be split
    )
    return replace(config, parallel=parallel)


def check_layout(config: RunConfig, world: World) -> None:
    """``ConfigError`` if the model cannot be split in this layout."""
    found = list(parallel_problems(config, world.size))
    if found:
        raise ConfigError("\n".join(found))


def show(text: str, world: World) -> None:
    """Print on rank 0 immediately."""
    if world.rank == 0:
        print(text, end="", flush=True)


def main() -> None:
    """Parse the flags, run and exit."""
    world = World.from_environment()
    settings = tyro.cli(Settings, description=__doc__, console_outputs=world.rank == 0)
    run_job(world, lambda: generate_text(settings, world))


if __name__ == "__main__":
    main()
