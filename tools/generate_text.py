"""Continue a prompt with a trained model.

python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def main("

torchrun --nproc-per-node 2 tools/generate_text.py --load ... --prompt ... --tensor-model-parallel-size 2
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from megatron_core import parallel_state
from megatron_core.checkpoint import CheckpointReader, find_checkpoint
from megatron_core.config import DataConfig, RunConfig
from megatron_core.config.parallel import BALANCED_STAGES
from megatron_core.config.rules_layout import parallel_problems
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.inference import Generator, Sampling
from megatron_core.parallel import World, run_job, start_world
from megatron_core.tokenizers import Tokenizer, tokenizer_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Continue a prompt with a trained model, in any layout."""

    load: str
    """Folder of checkpoints, or of one checkpoint."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Tokens to write at most."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 1234
    """Seed of the choice."""
    ckpt_step: int | None = None
    """Iteration to load; default the latest."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""


def generate_text(settings: Settings, world: World) -> None:
    """Load, generate, and print on rank 0 as the text comes."""
    sampling = Sampling(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed
    )
    folder = find_checkpoint(settings.load, settings.ckpt_step)
    if folder is None:
        raise CheckpointError(f"load={settings.load!r} holds no checkpoint; give a folder written by --save")
    with CheckpointReader(folder) as reader:
        config = run_config(reader, settings)
        tokenizer = stored_tokenizer(config.data, folder)
        check_layout(config, world)
        start_world(world)
        groups = parallel_state.make_groups(config.parallel, world)
        generator = Generator.load(reader, config, groups, world.device)
    prompt = tokenizer.tokenize(settings.prompt)
    written: list[int] = []
    shown = ""
    show(settings.prompt, world)
    for token in generator.generate(prompt, settings.max_new_tokens, sampling, end=tokenizer.eod):
        if token == tokenizer.eod:
            break
        written.append(token)
        # A token may end within a character: print only what no further token can change.
        text = tokenizer.detokenize(written)
        if not text.endswith("\ufffd"):
            show(text[len(shown) :], world)
            shown = text
    show("\n", world)
    room = generator.room_after(len(prompt))
    if len(written) == room and world.rank == 0:
        print(f"(ended at the last of the model's {config.max_positions} positions)", file=sys.stderr)


def run_config(reader: CheckpointReader, settings: Settings) -> RunConfig:
    """The configuration of the training run in the layout that is asked for here."""
    config = RunConfig.from_flat(reader.state["config"])
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        **BALANCED_STAGES,
        pipeline_schedule=None,
        pipeline_plan=None,
        sequence_parallel=False,  # one new position cannot be split
    )
    return replace(config, parallel=parallel)


def check_layout(config: RunConfig, world: World) -> None:
    """Refuse a split that the model does not have."""
    found = list(parallel_problems(config, world.size))
    if found:
        raise ConfigError("\n".join(found))


def stored_tokenizer(data: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer whose files lie in the checkpoint."""

    def stored(path: str | None) -> str | None:
        return None if path is None else str(folder / "tokenizer" / Path(path).name)

    files = {name: stored(getattr(data, name)) for name in ("vocab_file", "merge_file")}
    model = data.tokenizer_model
    if model is not None:
        model = str(folder / "tokenizer") if not Path(stored(model) or "").is_file() else stored(model)
    tokenizer = tokenizer_of(replace(data, tokenizer_model=model, **files))
    if tokenizer is None:
        raise ConfigError(f"{folder} was trained without a tokenizer; there is nothing to read the prompt with")
    return tokenizer


def show(text: str, world: World) -> None:
    """Print on rank 0, at once."""
    if world.rank == 0:
        print(text, end="", flush=True)


def main() -> None:
    """Parse the flags, run and exit."""
    world = World.from_environment()
    settings = tyro.cli(Settings, description=__doc__, console_outputs=world.rank == 0)
    run_job(world, lambda: generate_text(settings, world))


if __name__ == "__main__":
    main()
