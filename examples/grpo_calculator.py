"""Train a small model that multiplies with a calculator, by reinforcement learning with an environment of several turns.

A question such as ``37*46=`` is too hard for the model alone. It may write a call, ``<37*46>``; the environment then
writes the result and ``=``, which are not learned, and the model writes the answer in its next turn:

    37*46=<37*46>1702=1702

The reward is 1 for the right number at the end. All else is as in ``grpo.py``, also the flags and the equal bits:

    python examples/grpo_calculator.py
    torchrun --nproc-per-node 2 examples/grpo_calculator.py --tensor-model-parallel-size 2 --sequence-parallel
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence

import grpo
import torch

from megatron_core.post_training import (
    EpisodePlayer,
    Reply,
    RolloutSampler,
    Trainer,
    Trajectory,
    Turn,
    largest_difference,
    objectives,
)
from megatron_core.post_training.advantages import group_advantages
from megatron_core.post_training.rewards import number_reward

SYMBOLS = "0123456789*=<>\n"
LARGEST = 99
WARM_UP = 90
"""Supervised steps on examples, after which some calls and answers are right."""
QUESTIONS, EPISODES = 16, 8
"""Questions in a step, and episodes of each."""
LONGEST, TURNS = 9, 3
"""Tokens of a turn, and turns of an episode."""


class Symbols:
    """A token for each character."""

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [SYMBOLS.index(symbol) for symbol in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens; the model has one more token than there are symbols."""
        return "".join(SYMBOLS[token] if token < len(SYMBOLS) else "?" for token in ids)


encode = Symbols().tokenize


def product(call: str) -> str:
    """The result of a call such as ``<37*46>``, or "" if it is not a multiplication."""
    match = re.fullmatch(r"<([0-9]{1,4})\*([0-9]{1,4})>", call)
    return str(int(match[1]) * int(match[2])) if match else ""


class Calculator:
    """A question, and a calculator that answers calls."""

    def __init__(self, pair: tuple[int, int]) -> None:
        self._pair = pair

    def reset(self) -> list[int]:
        """The question."""
        return encode(f"{self._pair[0]}*{self._pair[1]}=")

    def step(self, turn: Turn) -> Reply:
        """The result of a call, or the reward of an answer."""
        text = Symbols().detokenize(turn.tokens)
        if text.endswith(">"):
            return Reply(text=encode(product(text) + "="))
        expected = self._pair[0] * self._pair[1]
        right = text.endswith("\n") and number_reward(text, expected)
        return Reply(float(right), done=True)


def questions(step: int, count: int) -> list[tuple[int, int]]:
    """Pairs of numbers to multiply, as a function of the step."""
    draw = random.Random(step)
    return [(draw.randint(10, LARGEST), draw.randint(10, LARGEST)) for _ in range(count)]


def example(pair: tuple[int, int]) -> Trajectory:
    """A correct episode; the result of the calculator is not learned."""
    result = str(pair[0] * pair[1])
    parts = [(f"{pair[0]}*{pair[1]}=", 0), (f"<{pair[0]}*{pair[1]}>", 1), (f"{result}=", 0), (f"{result}\n", 1)]
    tokens = [token for text, _ in parts for token in encode(text)]
    mask = [learned for text, learned in parts for _ in text]
    return Trajectory(tokens, mask[1:])


def warm_up(trainer: Trainer, step: int) -> None:
    """Take a supervised step on correct episodes."""
    examples = [example(pair) for pair in questions(-1 - step, QUESTIONS * EPISODES // 2)]
    trainer.train_on(examples, objectives.cross_entropy(), lr=grpo.WARM_UP_RATE)


def learn(trainer: Trainer, sampler: RolloutSampler, step: int) -> dict[str, float]:
    """Play episodes and train on them; returns the mean reward and the difference between sampler and trainer."""
    ends = encode(">\n")
    player = EpisodePlayer(sampler, max_new_tokens=LONGEST, max_turns=TURNS, ends=ends)
    environments = [Calculator(pair) for pair in questions(step, QUESTIONS) for _ in range(EPISODES)]
    groups = [number // EPISODES for number in range(len(environments))]
    episodes = player.play(environments, groups=groups, seed=step)
    trajectories = []
    for start in range(0, len(episodes), EPISODES):
        group = episodes[start : start + EPISODES]
        advantages = group_advantages([episode.reward for episode in group])
        trajectories += [
            episode.trajectory(advantages=advantage) for episode, advantage in zip(group, advantages, strict=True)
        ]
    difference = largest_difference(episodes, trainer.log_probs(trajectories).log_probs)
    result = trainer.train_on(trajectories, objectives.grpo())
    sampler.update_weights()
    calls = sum(len(episode.rewards) > 1 for episode in episodes)
    reward = sum(episode.reward for episode in episodes) / len(episodes)
    return {
        "reward": reward,
        "calls": calls / len(episodes),
        "loss": result.loss,
        "largest difference": difference,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    grpo.run(sys.argv[1:], warm_up_steps=WARM_UP, warm_up=warm_up, learn=learn)
