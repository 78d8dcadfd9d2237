"""The loss functions of Tinker's API: sums over tokens, from the numbers that come with each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import DataError
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.post_training.trajectories import Trajectory

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CALL = "call"
"""The value of each token that names its call of ``forward_backward``."""


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of tokens: its inputs, the settings with their defaults, and the function."""

    inputs: tuple[str, ...]
    settings: Settings
    of_tokens: Callable[[Tensor, Any, Settings], Tensor]
    """Log-probabilities, inputs by name and settings -> the loss of each token."""


def _cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -inputs["weights"] * log_probs


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_ratio(log_probs, inputs) * inputs["advantages"]


def _clamped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ppo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio = _ratio(log_probs, inputs)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clamped(ratio, settings) * advantages)


def _cispo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_clamped(_ratio(log_probs, inputs), settings).detach() * log_probs * inputs["advantages"]


_OF_POLICIES = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": TinkerLoss(("weights",), {}, _cross_entropy),
    "importance_sampling": TinkerLoss(_OF_POLICIES, {}, _importance_sampling),
    "ppo": TinkerLoss(_OF_POLICIES, CLIP, _ppo),
    "cispo": TinkerLoss(_OF_POLICIES, CLIP, _cispo),
}
"""By ``loss_fn``; all inputs also have ``target_tokens``. Source: tinker-docs.thinkingmachines.ai/losses."""
VALUES = ("weights", *_OF_POLICIES)


@dataclass(frozen=True)
class TargetTrajectory(Trajectory):
    """A trajectory whose targets need not be the tokens after the inputs: programs give any where the weight is 0."""

    targets: Sequence[int] = ()

    @property
    def labels(self) -> Sequence[int]:
        """The target of each token but the last, which is not an input."""
        return self.targets


@dataclass(frozen=True)
class LossCall:
    """The checked data of one call of ``forward_backward``."""

    loss_fn: str
    settings: Settings
    data: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, request: Mapping[str, Any], *, vocab_size: int, longest: int) -> LossCall:
        """Check a request; ``DataError`` with the name of what is not legal."""
        name = request["loss_fn"]
        if name not in LOSSES:
            raise DataError(f"loss_fn={name!r} is not supported; give one of {', '.join(LOSSES)}")
        loss = LOSSES[name]
        if unknown := sorted(set(request["loss_fn_config"]) - set(loss.settings)):
            legal = ", ".join(loss.settings) or "none"
            raise DataError(f"loss_fn_config of {name} has {', '.join(unknown)}; legal: {legal}")
        settings = {**loss.settings, **request["loss_fn_config"]}
        for setting, value in settings.items():
            if not (isinstance(value, float) and math.isfinite(value)):
                raise DataError(f"loss_fn_config of {name}: {setting}={value!r} must be a finite number")
        if not request["data"]:
            raise DataError("data is empty; give at least one datum")
        for number, datum in enumerate(request["data"]):
            _check_datum(datum, name, f"datum {number}", vocab_size, longest)
        return cls(name, settings, request["data"])

    def trajectories(self, number: int) -> list[Trajectory]:
        """The data as trajectories whose tokens are all scored, with the ``number`` of this call as a value."""
        return [_trajectory(datum, number) for datum in self.data]

    def losses(self, log_probs: Sequence[Tensor]) -> list[Tensor]:
        """The loss of each token of each datum."""
        loss = LOSSES[self.loss_fn]
        return [
            loss.of_tokens(
                scores, {name: scores.new_tensor(datum["inputs"][name]) for name in loss.inputs}, self.settings
            )
            for scores, datum in zip(log_probs, self.data, strict=True)
        ]


def joint_objective(calls: Sequence[LossCall]) -> TokenObjective:
    """The sum of the losses of several calls, whose tokens have the number of their call as a value."""

    def sum_calls(log_probs: Tensor, batch: TokenBatch) -> Tensor:
        total = torch.zeros_like(log_probs)
        for number, call in enumerate(calls):
            losses = LOSSES[call.loss_fn].of_tokens(log_probs, batch, call.settings)
            # Tokens of other calls have the inputs 0, with which every loss is finite.
            total = total + losses.where(batch[CALL] == number, 0.0)
        return total

    return TokenObjective(loss=sum_calls, mean_over="sum")


def _trajectory(datum: Mapping[str, Any], call: int) -> Trajectory:
    targets = datum["inputs"]["target_tokens"]
    values: dict[str, Any] = {name: datum["inputs"].get(name, 0.0) for name in VALUES}
    return TargetTrajectory(
        tokens=[*datum["tokens"], targets[-1]],
        mask=[1] * len(targets),
        values={**values, CALL: float(call)},
        targets=targets,
    )


def _check_datum(datum: Mapping[str, Any], name: str, title: str, vocab_size: int, longest: int) -> None:
    """Check one datum, and give ``weights`` of 1 to a cross entropy without them."""
    inputs = datum["inputs"]
    length = len(datum["tokens"])
    if not 0 < length <= longest:
        raise DataError(f"{title} has {length} tokens; give 1 to {longest} (--seq-length)")
    if name == "cross_entropy":
        inputs.setdefault("weights", [1.0] * length)
    needed = {"target_tokens", *LOSSES[name].inputs}
    if missing := sorted(needed - set(inputs)):
        raise DataError(f"{title}: loss_fn_inputs of {name} lack {', '.join(missing)}")
    if unknown := sorted(set(inputs) - needed):
        raise DataError(f"{title}: loss_fn_inputs of {name} have {', '.join(unknown)}; remove them")
    for key, numbers in inputs.items():
        if len(numbers) != length:
            raise DataError(f"{title}: {key} has {len(numbers)} numbers for {length} tokens; give one for each")
        if not all(map(math.isfinite, numbers)):
            raise DataError(f"{title}: {key} has numbers that are not finite")
    if any(isinstance(token, float) for token in inputs["target_tokens"]):
        raise DataError(f"{title}: target_tokens are float32; give int64")
    for key, tokens in (("model_input", datum["tokens"]), ("target_tokens", inputs["target_tokens"])):
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise DataError(f"{title}: {key} has tokens outside of the vocabulary, 0 to {vocab_size - 1}")
