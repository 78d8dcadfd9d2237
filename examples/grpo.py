"""Teach a small model to add two numbers by reinforcement learning (GRPO), in any layout, on two cores in minutes.

The reward is verifiable: an answer is right if it is the sum, followed by the end of the text. Every step samples
several answers to each question, compares each reward with the mean of its group, and trains on the difference:

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --tensor-model-parallel-size 2 --sequence-parallel

All flags of ``pretrain_gpt.py`` are accepted and override ``MODEL``. With ``--layout-invariant`` (the default here) the
log-probabilities of the sampler and of the trainer have the same bits, which is checked in every step, and the whole
run has the same bits in every layout. The script writes a line for each step. With ``--save FOLDER --load FOLDER
--save-interval N`` it saves every N steps and resumes from the last one, with the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable

import torch

from megatron_core.config.cli import parse_run_config
from megatron_core.config.run import RunConfig
from megatron_core.parallel import World
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, largest_difference, objectives
from megatron_core.post_training.advantages import group_advantages

SYMBOLS = "0123456789+=\n"
END = SYMBOLS.index("\n")
LARGEST = 9
WARM_UP = 80
"""Supervised steps, after which about a third of the answers are right."""
WARM_UP_RATE = 3e-3
QUESTIONS, ANSWERS, LONGEST = 16, 8, 3
"""Questions in a step, answers to each, and tokens of an answer."""
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": 16,
    "make_vocab_size_divisible_by": 16,
    "seq_length": 64,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_iters": 1000,
    "lr": 5e-4,
    "weight_decay": 0.0,
    "lr_decay_style": "constant",
    "adam_beta2": 0.95,
    "layout_invariant": True,
    "dataloader_type": "external",
}


def encode(text: str) -> list[int]:
    """The tokens of a text, one for each character."""
    return [SYMBOLS.index(symbol) for symbol in text]


def questions(step: int, count: int) -> list[tuple[int, int]]:
    """Pairs of numbers to add, as a function of the step, so that a resumed run asks the same ones."""
    draw = random.Random(step)
    return [(draw.randint(0, LARGEST), draw.randint(0, LARGEST)) for _ in range(count)]


def prompt(pair: tuple[int, int]) -> list[int]:
    """The tokens of a question."""
    return encode(f"{pair[0]}+{pair[1]}=")


def reward(pair: tuple[int, int], answer: tuple[int, ...]) -> float:
    """1 for the sum followed by the end of the text, else 0."""
    return float(list(answer) == encode(f"{sum(pair)}\n"))


def warm_up(trainer: Trainer, step: int) -> None:
    """Take a supervised step on correct answers."""
    pairs = questions(-1 - step, QUESTIONS * ANSWERS // 2)
    examples = [Trajectory.of_answer(prompt(pair), encode(f"{sum(pair)}\n")) for pair in pairs]
    trainer.train_on(examples, objectives.cross_entropy(), lr=WARM_UP_RATE)


def learn(trainer: Trainer, sampler: RolloutSampler, step: int) -> dict[str, float]:
    """Sample, score and train; returns the mean reward and the difference between sampler and trainer."""
    pairs = questions(step, QUESTIONS)
    prompts = [prompt(pair) for pair in pairs]
    groups = sampler.sample(prompts, answers=ANSWERS, max_new_tokens=LONGEST, ends=[END], seed=step)
    trajectories = []
    rewards = []
    for pair, tokens, group in zip(pairs, prompts, groups, strict=True):
        of_group = [reward(pair, answer.tokens) for answer in group]
        rewards += of_group
        for answer, advantage in zip(group, group_advantages(of_group), strict=True):
            values = {"advantages": advantage, "old_log_probs": answer.log_probs}
            trajectories.append(Trajectory.of_answer(tokens, answer.tokens, **values))
    answers = [answer for group in groups for answer in group]
    difference = largest_difference(answers, trainer.log_probs(trajectories).log_probs)
    result = trainer.train_on(trajectories, objectives.grpo())
    sampler.update_weights()
    return {"reward": sum(rewards) / len(rewards), "loss": result.loss, "largest difference": difference}


def run(
    args: list[str],
    world: World | None = None,
    warm_up_steps: int = WARM_UP,
    warm_up: Callable[[Trainer, int], None] = warm_up,
    learn: Callable[[Trainer, RolloutSampler, int], dict[str, float]] = learn,
) -> list[dict[str, float]]:
    """Take the remaining steps; returns the values of each step after the warm-up."""
    defaults = RunConfig.from_flat(RunConfig().flat() | MODEL)
    config = parse_run_config(args, prog="grpo.py", defaults=defaults)
    trainer = Trainer(config, world)
    interval = config.checkpoint.save_interval
    sampler = None
    history = []
    for step in range(trainer.iteration, config.training.train_iters or 0):
        if step < warm_up_steps:
            warm_up(trainer, step)
        else:
            sampler = sampler or RolloutSampler(trainer)
            values = {"step": step + 1, **learn(trainer, sampler, step)}
            if config.parallel.layout_invariant and values["largest difference"] != 0.0:
                raise SystemExit(f"step {step + 1}: sampler and trainer differ by {values['largest difference']}")
            history.append(values)
            if trainer.is_first_rank:
                print(json.dumps(values), flush=True)
        if interval is not None and (step + 1) % interval == 0:
            trainer.save()
    trainer.close()
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1:])
