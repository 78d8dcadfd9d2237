"""Objectives of post-training: functions of log-probabilities, one for each paper.

Each function returns the loss of each token ``[b, n]``; ``log_probs`` are the log-probabilities of the tokens under the
model that is trained. With pi the trained policy, mu the policy that has sampled the tokens (``old_log_probs``) and A
the advantages, r = pi / mu is the ratio of a token. ``TokenObjective`` adds how losses of tokens are averaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megatron_core.errors import ConfigError, DataError
from megatron_core.post_training.token_batch import TokenBatch, TokenLoss

MeanOver = Literal["tokens", "trajectories", "length", "sum"]
"""Denominator of a step's loss: learned tokens; trajectories, each of which is a mean over its own tokens; trajectories
times a constant length; 1."""
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Reads = Literal["log_probs", "values", "divergences"]
"""The numbers of tokens that a model computes: log-probabilities, or values with --value-head; and divergences of its
distributions from those of --kd-teacher."""


@dataclass(frozen=True, kw_only=True)
class TokenObjective:
    """A loss of tokens, and the mean over the global batch that is minimised."""

    loss: TokenLoss
    mean_over: MeanOver = "tokens"
    length: int | None = None
    """The constant length for ``mean_over="length"``."""
    metrics: tuple[str, ...] = ()
    """Names that ``loss`` reports (``TokenBatch.report``)."""
    entropy_coefficient: float = 0.0
    """Weight of the mean entropy, which is maximised, in nats (Mnih et al. 2016, arXiv 1602.01783, section 4)."""
    reports_entropy: bool = False
    """Compute and report the entropy even if its coefficient is 0."""
    reads: Reads = "log_probs"
    """The first argument of ``loss``."""
    beta: float | None = None
    """The weight of the teacher in divergences (``teacher.token_divergence``)."""

    def __post_init__(self) -> None:
        if (self.reads == "divergences") != (self.beta is not None) or not 0.0 <= (self.beta or 0.0) <= 1.0:
            raise ConfigError(f"reads={self.reads} with beta={self.beta}: a beta from 0 to 1 goes with 'divergences'")
        if (self.mean_over == "length") != (self.length is not None) or (self.length or 1) < 1:
            raise ConfigError(f"mean_over={self.mean_over} with length={self.length}: length >= 1 goes with 'length'")

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy of each token is computed."""
        return self.reports_entropy or self.entropy_coefficient != 0.0

    def __call__(self, log_probs: Tensor, batch: TokenBatch) -> Tensor:
        """The loss of each token ``[b, n]``, with the entropy."""
        losses = self.loss(log_probs, batch)
        if self.uses_entropy:
            assert batch.entropy is not None
            batch.report("entropy", batch.entropy)
            losses = losses - self.entropy_coefficient * batch.entropy
        return losses

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return (*self.metrics, "entropy") if self.uses_entropy else self.metrics


# Losses of tokens.


def cross_entropy_loss(log_probs: Tensor, batch: TokenBatch) -> Tensor:
    """-log pi."""
    return -log_probs


def reinforce_loss(log_probs: Tensor, batch: TokenBatch) -> Tensor:
    """-A log pi (Williams 1992, section 4)."""
    return -batch["advantages"] * log_probs


def importance_sampling_loss(log_probs: Tensor, batch: TokenBatch) -> Tensor:
    """-r A, whose gradient is that of ``reinforce_loss`` with the weight r for tokens of an earlier policy."""
    ratio = _ratio(log_probs, batch)
    return -ratio * batch["advantages"]


def clipped_loss(
    log_probs: Tensor, batch: TokenBatch, *, clip: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - clip, 1 + clip_high) A) (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    ``dual_clip`` c > 1: losses of tokens with A < 0 are at most -c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    return _clipped(_ratio(log_probs, batch), batch, clip, clip_high, dual_clip)


def sequence_clipped_loss(log_probs: Tensor, batch: TokenBatch, *, clip: float, clip_high: float) -> Tensor:
    """As ``clipped_loss`` with the ratio of a trajectory, exp(mean over its tokens of log r), for each token.

    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, equations 5 and 7.
    """
    log_ratio = log_probs - batch["old_log_probs"]
    return _clipped(batch.trajectory_mean(log_ratio).exp(), batch, clip, clip_high, None)


def soft_gated_loss(log_probs: Tensor, batch: TokenBatch, *, positive: float, negative: float) -> Tensor:
    """-4 / t sigmoid(t (r - 1)) A with t = ``positive`` for A > 0, else ``negative``.

    Source: Gao et al. 2025 (SAPO), arXiv 2511.20347, section 3.
    """
    advantages = batch["advantages"]
    sharpness = torch.where(advantages > 0, positive, negative).to(log_probs.dtype)
    return -4.0 / sharpness * torch.sigmoid(sharpness * (_ratio(log_probs, batch) - 1.0)) * advantages


def weight_clipped_loss(log_probs: Tensor, batch: TokenBatch, *, clip_high: float, clip: float = 1.0) -> Tensor:
    """-stop(clip(r, 1 - clip, 1 + clip_high)) A log pi (MiniMax-M1 2025, CISPO, arXiv 2506.13585, equations 4 and 5).

    With ``clip=1`` there is no lower limit, as in the experiments of the paper.
    """
    ratio = _ratio(log_probs, batch).detach()
    limited = ratio.clamp(1.0 - clip, 1.0 + clip_high)
    batch.report("clip fraction", (ratio != limited).to(ratio.dtype))
    return -limited * batch["advantages"] * log_probs


def _ratio(log_probs: Tensor, batch: TokenBatch) -> Tensor:
    """pi / mu of each token; 1 where a token is not learned, whose log-probability may be of any size."""
    return ((log_probs - batch["old_log_probs"]) * batch.mask).exp()


def _clipped(ratio: Tensor, batch: TokenBatch, clip: float, clip_high: float, dual_clip: float | None) -> Tensor:
    advantages = batch["advantages"]
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip, 1.0 + clip_high) * advantages
    batch.report("clip fraction", (clipped > plain).to(ratio.dtype))
    losses = torch.maximum(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses


def value_loss(values: Tensor, batch: TokenBatch, *, clip: float | None) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), with the returns R and the values V_old of the critic
    that has computed them; without ``clip`` c: 1/2 (V - R)^2.

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 9; the limits are those of its authors' code and of trl.
    """
    returns = batch["returns"]
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    old = batch["old_values"]
    limited = (old + (values - old).clamp(-clip, clip) - returns).square()
    batch.report("clip fraction", (limited > plain).to(values.dtype))
    return 0.5 * torch.maximum(plain, limited)


# Divergence from a reference, and corrections for another sampling program.


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(pi || reference) of each token, which was sampled from pi, with log q = log reference - log pi.

    k1 = -log q; k2 = (log q)^2 / 2; k3 = q - 1 - log q, without bias and never negative; low_var_kl is k3, at most 10,
    as verl and slime compute it. Source: Schulman 2020, "Approximating KL divergence".
    """
    log_q = reference - log_probs
    if estimator == "k1":
        return -log_q
    if estimator == "k2":
        return 0.5 * log_q.square()
    k3 = torch.expm1(log_q) - log_q
    return k3.clamp_max(10.0) if estimator == "low_var_kl" else k3


def with_kl(loss: TokenLoss, coefficient: float, estimator: KLEstimator = "k3", *, weighted: bool = False) -> TokenLoss:
    """Add ``coefficient`` times the divergence from ``reference_log_probs`` to a loss, and report it.

    ``weighted``: times r, so that the estimate has no bias for tokens of an earlier policy (DeepSeek-AI 2025,
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """

    def combined(log_probs: Tensor, batch: TokenBatch) -> Tensor:
        reference = batch["reference_log_probs"].where(batch.mask > 0, log_probs.detach())
        divergence = kl_estimate(log_probs, reference, estimator)
        if weighted:
            divergence = _ratio(log_probs, batch) * divergence
        batch.report("kl", divergence)
        return loss(log_probs, batch) + coefficient * divergence

    return combined


def with_sampler_correction(
    loss: TokenLoss, cap: float, level: Literal["token", "trajectory"] = "token", *, floor: float = 0.0
) -> TokenLoss:
    """Weight a loss by mu / sampler, from ``floor`` to ``cap``, if another program has sampled (``sampler_log_probs``).

    mu are the log-probabilities of the trainer before the update (``old_log_probs``). ``trajectory``: the weight is the
    product over the trajectory. Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training" (truncated importance sampling).
    """

    def combined(log_probs: Tensor, batch: TokenBatch) -> Tensor:
        log_weight = (batch["old_log_probs"] - batch["sampler_log_probs"]) * batch.mask
        if level == "trajectory":
            log_weight = batch.trajectory_sum(log_weight)
        weight = log_weight.exp()
        batch.report("truncated fraction", (weight > cap).to(weight.dtype))
        return loss(log_probs, batch) * weight.clamp(floor, cap)

    return combined


# Objectives by name.


def cross_entropy() -> TokenObjective:
    """Supervised learning: the mean over tokens."""
    return TokenObjective(loss=cross_entropy_loss)


def reinforce() -> TokenObjective:
    """REINFORCE: the mean over tokens of ``reinforce_loss``."""
    return TokenObjective(loss=reinforce_loss)


def importance_sampling() -> TokenObjective:
    """The mean over tokens of ``importance_sampling_loss``."""
    return TokenObjective(loss=importance_sampling_loss)


def ppo(clip: float = 0.2, *, dual_clip: float | None = None, entropy_coefficient: float = 0.0) -> TokenObjective:
    """PPO's policy loss: the mean over tokens of ``clipped_loss``."""
    loss = partial(clipped_loss, clip=clip, clip_high=clip, dual_clip=dual_clip)
    return TokenObjective(loss=loss, metrics=("clip fraction",), entropy_coefficient=entropy_coefficient)


def generalized_jsd(beta: float = 0.5) -> TokenObjective:
    """The mean over tokens of the divergence from the distributions of --kd-teacher (Agarwal et al. 2024, GKD, arXiv
    2306.13649, equation 1): 0 is the forward, 1 the reverse KL divergence, as in trl."""
    return TokenObjective(loss=lambda divergences, batch: divergences, reads="divergences", beta=beta)


def value(clip: float | None = 0.2) -> TokenObjective:
    """The critic of PPO: the mean over tokens of ``value_loss``, for a model with --value-head."""
    metrics = () if clip is None else ("clip fraction",)
    return TokenObjective(loss=partial(value_loss, clip=clip), metrics=metrics, reads="values")


def grpo(
    clip: float = 0.2,
    *,
    dual_clip: float | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> TokenObjective:
    """GRPO (Shao et al. 2024, arXiv 2402.03300, equation 3): the mean over trajectories of means over their tokens."""
    loss = partial(clipped_loss, clip=clip, clip_high=clip, dual_clip=dual_clip)
    return _grouped(loss, kl_coefficient, kl_estimator, mean_over="trajectories")


def dr_grpo(length: int, clip: float = 0.2, *, kl_coefficient: float = 0.0) -> TokenObjective:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2): sums over tokens / (trajectories x ``length``).

    ``length`` is a constant, such as the largest number of new tokens, so that long answers are not weighted less.
    """
    loss = partial(clipped_loss, clip=clip, clip_high=clip)
    return _grouped(loss, kl_coefficient, "k3", mean_over="length", length=length)


def dapo(clip: float = 0.2, clip_high: float = 0.28) -> TokenObjective:
    """DAPO (Yu et al. 2025, arXiv 2503.14476, equation 8): the mean over tokens, with a larger upper limit."""
    return _grouped(partial(clipped_loss, clip=clip, clip_high=clip_high), 0.0, "k3", mean_over="tokens")


def gspo(clip: float = 3e-4, clip_high: float = 4e-4, *, kl_coefficient: float = 0.0) -> TokenObjective:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, equation 5): the mean over trajectories, with their ratios."""
    loss = partial(sequence_clipped_loss, clip=clip, clip_high=clip_high)
    return _grouped(loss, kl_coefficient, "k3", mean_over="trajectories")


def cispo(clip_high: float = 5.0) -> TokenObjective:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, equation 4): the mean over tokens of ``weight_clipped_loss``."""
    return _grouped(partial(weight_clipped_loss, clip_high=clip_high), 0.0, "k3", mean_over="tokens")


def sapo(positive: float = 1.0, negative: float = 1.05) -> TokenObjective:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): the mean over trajectories of ``soft_gated_loss``."""
    loss = partial(soft_gated_loss, positive=positive, negative=negative)
    return TokenObjective(loss=loss, mean_over="trajectories")


def _grouped(
    loss: TokenLoss, kl_coefficient: float, kl_estimator: KLEstimator, *, mean_over: MeanOver, length: int | None = None
) -> TokenObjective:
    metrics: tuple[str, ...] = ("clip fraction",)
    if kl_coefficient:
        loss = with_kl(loss, kl_coefficient, kl_estimator)
        metrics += ("kl",)
    return TokenObjective(loss=loss, mean_over=mean_over, length=length, metrics=metrics)


# Losses of scores, for reward models.


def bradley_terry(
    margins: Sequence[float] | None = None, *, center_rewards_coefficient: float = 0.0
) -> Callable[[list[Tensor]], Tensor]:
    """The mean over pairs of ``bradley_terry_loss`` for ``Trainer.train_on_loss``, with ``Trajectory.of_text`` of each
    chosen text followed by its rejected one.

    ``center_rewards_coefficient`` c adds the mean of c (chosen + rejected)^2 (Eisenstein et al. 2023, arXiv 2312.09244,
    section 3). ``margins``: one for each pair.
    """

    def loss(scores: list[Tensor]) -> Tensor:
        rewards = torch.cat(scores)
        if len(rewards) % 2 or any(len(of_text) != 1 for of_text in scores):
            raise DataError(
                f"{len(scores)} texts with {len(rewards)} learned positions are not pairs; give Trajectory.of_text of "
                "each chosen text, followed by that of the rejected one"
            )
        chosen, rejected = rewards[0::2], rewards[1::2]
        margin = 0.0 if margins is None else rewards.new_tensor(margins)
        losses = bradley_terry_loss(chosen, rejected, margin)
        return (losses + center_rewards_coefficient * (chosen + rejected).square()).mean()

    return loss


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) of pairs of scores ``[n]``.

    Source: Ouyang et al. 2022, arXiv 2203.02155, equation 1; Touvron et al. 2023, arXiv 2307.09288, equation 2, for the
    margin.
    """
    return softplus(rejected - chosen + margin)
