"""Chapter 13 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 13. Reinforcement learning
#
# In the chapters before, the training text contained the right token for each position. In reinforcement learning the
# right answer is unknown, but a program can score an answer: the model writes answers, each answer gets a reward, and
# training makes the answers with high rewards more probable. Two new questions arise. How does a number for a whole
# answer become a gradient for each token? And what happens if the program that writes the answers computes slightly
# different probabilities than the one that trains?
#
# ## Rewards become gradients
#
# Our model has a vocabulary of 16 tokens and knows nothing. The reward of an answer of eight tokens is the share of
# even ones:

# %%
import random

from small_runs import COLOURS, new_figure, print_table, save

from megatron_core.config import RunConfig
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, largest_difference, objectives
from megatron_core.post_training.advantages import group_advantages
from megatron_core.verify import run_ranks, this_world

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "position_embedding_type": "rope",
    "vocab_size": 16,
    "make_vocab_size_divisible_by": 16,
    "seq_length": 64,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 100,
    "lr": 3e-3,
    "lr_decay_style": "constant",
}
LENGTH, ANSWERS = 8, 8
CLIP = 0.2


def reward(answer: tuple[int, ...]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


def prompts(step: int) -> list[list[int]]:
    """Four prompts of three tokens."""
    draw = random.Random(step)
    return [[draw.randrange(16) for _ in range(3)] for _ in range(4)]


# %% [markdown]
# The policy gradient (Williams 1992) weights the gradient of each token's log-probability by the answer's *advantage*
# A: the loss of a token is -A log π. If A is the reward itself, which is never negative here, every answer becomes
# more probable, and only the differences between answers teach anything. GRPO (Shao et al. 2024) writes several
# answers to each prompt and subtracts the mean reward of the group, so that half of the answers become less probable:


# %%
def learn(by_group: bool, steps: int = 25) -> list[float]:
    """Train with the rewards, or with advantages within each group; returns the mean reward of each step."""
    trainer = Trainer(RunConfig.from_flat(TINY), this_world())
    sampler = RolloutSampler(trainer)
    means = []
    for step in range(steps):
        groups = sampler.sample(prompts(step), answers=ANSWERS, max_new_tokens=LENGTH, seed=step)
        trajectories, rewards = [], []
        for prompt, group in zip(prompts(step), groups, strict=True):
            of_group = [reward(answer.tokens) for answer in group]
            rewards += of_group
            advantages = group_advantages(of_group) if by_group else of_group
            for answer, advantage in zip(group, advantages, strict=True):
                trajectories.append(Trajectory.of_answer(prompt, answer.tokens, advantages=advantage))
        trainer.train_on(trajectories, objectives.reinforce())
        sampler.update_weights()
        means.append(sum(rewards) / len(rewards))
    return means


figure, axes = new_figure("step", "share of even tokens")
(by_reward,) = run_ranks(1, learn, False)
(by_group,) = run_ranks(1, learn, True)
axes.plot(by_reward, color=COLOURS[0], label="A = reward")
axes.plot(by_group, color=COLOURS[1], label="A = reward minus the mean of the group")
save(figure, "policy_gradient", "mean reward of two ways to compute advantages")
print(f"last step: {by_reward[-1]:.2f} with the reward, {by_group[-1]:.2f} within groups")

# %% [markdown]
# ## Answers of an earlier policy
#
# Writing answers costs more than a step, so one would like to take several steps on the same answers. But after the
# first step they are answers of an *old* policy μ, and the weight of a token has to be the ratio r = π / μ, which may
# become large. PPO (Schulman et al. 2017) stops the gradient of a token whose ratio has moved by more than ε in the
# direction of its advantage: the loss is -min(r A, clip(r, 1 - ε, 1 + ε) A). The share of such tokens shows how far
# the answers can be reused:


# %%
def reuse(steps: int = 6) -> list[tuple[float, float]]:
    """Take several steps on the same answers; returns the clipped share and the largest change of a log-probability."""
    trainer = Trainer(RunConfig.from_flat(TINY), this_world())
    sampler = RolloutSampler(trainer)
    groups = sampler.sample(prompts(0), answers=ANSWERS, max_new_tokens=LENGTH, seed=0)
    trajectories, answers = [], []
    for prompt, group in zip(prompts(0), groups, strict=True):
        advantages = group_advantages([reward(answer.tokens) for answer in group])
        for answer, advantage in zip(group, advantages, strict=True):
            values = {"advantages": advantage, "old_log_probs": answer.log_probs}
            trajectories.append(Trajectory.of_answer(prompt, answer.tokens, **values))
            answers.append(answer)
    results = []
    for _ in range(steps):
        changed = largest_difference(answers, trainer.log_probs(trajectories).log_probs)
        result = trainer.train_on(trajectories, objectives.ppo(CLIP))
        results.append((result.breakdown["clip fraction"], changed))
    return results


(shares,) = run_ranks(1, reuse)
print_table(
    ["step on the same answers", "clipped tokens", "largest change of log π"],
    [[number, f"{share:.0%}", f"{changed:.2g}"] for number, (share, changed) in enumerate(shares, 1)],
)

# %% [markdown]
# ## On-policy, or almost
#
# At the first step the change is not quite 0. The sampler computes one token at a time with a cache, the trainer
# whole rows: the same formula, but sums in another order. In large systems the two are different programs in
# different layouts, the difference is larger, and "on-policy" training is quietly off-policy. `--layout-invariant`
# ([equal bits](../equal_bits.md)) fixes the order of all sums, also in generation. We compare the sampler with the
# trainer in four pairs of layouts, in float32 and in bfloat16:

# %%
PAIRS = {
    "one process, one process": (1, {}, {}),
    "tp2, two copies": (2, {"tensor_model_parallel_size": 2}, {}),
    "pp2, tp2": (2, {"pipeline_model_parallel_size": 2}, {"tensor_parallel": 2}),
    "dp2 ZeRO-3, pp2": (2, {"zero_stage": 3}, {"pipeline_parallel": 2}),
}


def mismatch(settings: dict, layout: dict) -> float:
    """The largest difference of a log-probability between sampler and trainer."""
    trainer = Trainer(RunConfig.from_flat(TINY | settings), this_world())
    groups = RolloutSampler(trainer, **layout).sample(prompts(0), answers=ANSWERS, max_new_tokens=LENGTH)
    trajectories = [
        Trajectory.of_answer(prompt, answer.tokens)
        for prompt, group in zip(prompts(0), groups, strict=True)
        for answer in group
    ]
    answers = [answer for group in groups for answer in group]
    return largest_difference(answers, trainer.log_probs(trajectories).log_probs)


rows = []
for name, (ranks, trained, sampled) in PAIRS.items():
    cells = []
    for settings in ({}, {"bf16": True}, {"layout_invariant": True}, {"layout_invariant": True, "bf16": True}):
        cells.append(f"{run_ranks(ranks, mismatch, trained | settings, sampled)[0]:.1e}")
    rows.append([name, *cells])
print_table(["trainer, sampler", "float32", "bfloat16", "float32, invariant", "bfloat16, invariant"], rows)

# %% [markdown]
# With equal bits the difference is exactly 0 in every pair, and the first ratio of every token is exactly 1. The
# whole loop then has the same bits in every layout, too: `examples/grpo.py` teaches a small model to add numbers, and
# prints the same curve on one process and on two.
#
# ## Experiment
#
# Change `CLIP = 0.2` to `CLIP = 0.02`. How does the clipped share change, and how far do the log-probabilities move in
# six steps? [The page on reinforcement learning](../post_training.md) has the other objectives.
