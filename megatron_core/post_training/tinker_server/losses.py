"""The loss functions of Tinker's API: sums over tokens, from the numbers that come with each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_core.errors import DataError
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.post_training.trajectories import Trajectory

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CALL = "call"
"""The value of each token that names its call of ``forward_backward``."""
RATIO_MASK = "sequence_ratio_mask"
SEQUENCE_LOG_RATIO = "sequence_log_ratio"
"""The mean of log(p / q) over the tokens of a datum with ``RATIO_MASK``, equal at each of its tokens."""


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of tokens: its inputs, the settings with their defaults, and the function."""

    inputs: tuple[str, ...]
    settings: Mapping[str, float | None]
    """Defaults of numbers that apply to all tokens; None for one that a request must give."""
    of_tokens: Callable[[Tensor, Any], Tensor]
    """Log-probabilities, and inputs and settings by name -> the loss of each token."""


def _ratio(log_probs: Tensor, inputs: Any) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _clamped(ratio: Tensor, inputs: Any) -> Tensor:
    return ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped(ratio: Tensor, inputs: Any) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clamped(ratio, inputs) * advantages)


def _gspo(log_probs: Tensor, inputs: Any) -> Tensor:
    """The ratio has the value of the sequence's and the gradient of the token's."""
    return _clipped((inputs[SEQUENCE_LOG_RATIO] + log_probs - log_probs.detach()).exp(), inputs)


def _cispo(log_probs: Tensor, inputs: Any) -> Tensor:
    return -_clamped(_ratio(log_probs, inputs), inputs).detach() * log_probs * inputs["advantages"]


def _dro(log_probs: Tensor, inputs: Any) -> Tensor:
    return 0.5 * inputs["beta"] * (log_probs - inputs["logprobs"]).square() - log_probs * inputs["advantages"]


_OF_POLICIES = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": TinkerLoss(("weights",), {}, lambda log_probs, inputs: -inputs["weights"] * log_probs),
    "importance_sampling": TinkerLoss(
        _OF_POLICIES, {}, lambda log_probs, inputs: -_ratio(log_probs, inputs) * inputs["advantages"]
    ),
    "ppo": TinkerLoss(_OF_POLICIES, CLIP, lambda log_probs, inputs: _clipped(_ratio(log_probs, inputs), inputs)),
    "cispo": TinkerLoss(_OF_POLICIES, CLIP, _cispo),
    # The documentation tells the formulas of these two, and not the defaults of their settings.
    "gspo": TinkerLoss((*_OF_POLICIES, RATIO_MASK), dict.fromkeys(CLIP), _gspo),
    "dro": TinkerLoss(_OF_POLICIES, {"beta": None}, _dro),
}
"""By ``loss_fn``; all inputs also have ``target_tokens``. Source: tinker-docs.thinkingmachines.ai/tinker/losses."""
VALUES = ("weights", *_OF_POLICIES, *CLIP, "beta", SEQUENCE_LOG_RATIO)


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
    """The checked data of one call of ``forward_backward``.

    A text whose tokens have K targets each is computed K times, once for each target.
    """

    loss_fn: str
    settings: Mapping[str, float]
    data: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, request: Mapping[str, Any], *, vocab_size: int, longest: int) -> "LossCall":
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
            if value is None:
                raise DataError(f"loss_fn_config of {name} lacks {setting}, which has no default here; give it")
            if not (isinstance(value, float) and np.isfinite(value)):
                raise DataError(f"loss_fn_config of {name}: {setting}={value!r} must be a finite number")
        if not request["data"]:
            raise DataError("data is empty; give at least one datum")
        for number, datum in enumerate(request["data"]):
            _check_datum(datum, name, f"datum {number}", vocab_size, longest)
        if len({np.shape(datum["inputs"]["target_tokens"])[1:] for datum in request["data"]}) > 1:
            raise DataError("target_tokens: the tokens of all data must have the same number of targets")
        return cls(name, settings, request["data"])

    def trajectories(self, number: int) -> list[Trajectory]:
        """The data as trajectories whose tokens are all scored, with the ``number`` of this call as a value."""
        return [self._trajectory(datum["tokens"], column, number) for datum in self.data for column in _columns(datum)]

    def trained(self, number: int) -> list[Trajectory]:
        """The ``trajectories`` without those of targets whose weights are all zero."""
        trajectories = self.trajectories(number)
        if self.loss_fn != "cross_entropy":
            return trajectories
        return [entry for entry in trajectories if np.any(entry.values["weights"])] or trajectories[:1]

    def _trajectory(self, tokens: Sequence[int], inputs: Mapping[str, Any], number: int) -> Trajectory:
        targets = inputs["target_tokens"]
        return TargetTrajectory(
            tokens=[*tokens, targets[-1]],
            mask=[1] * len(targets),
            values={
                **{name: inputs.get(name, self.settings.get(name, 0.0)) for name in VALUES},
                CALL: float(number),
            },
            targets=targets,
        )

    def losses(self, log_probs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The log-probability and the loss of each token of each datum ``[n]``, or ``[n, K]`` of K targets.

        Keeps the ratios of sequences for the gradients: weights do not change before these are computed.
        """
        remaining = iter(log_probs)
        scores: list[Tensor] = []
        losses: list[Tensor] = []
        for datum in self.data:
            columns = _columns(datum)
            rows = [next(remaining) for _ in columns]
            if RATIO_MASK in datum["inputs"]:
                (row,) = rows
                marked = row.new_tensor(datum["inputs"][RATIO_MASK]) != 0
                log_ratios = row - row.new_tensor(datum["inputs"]["logprobs"])
                columns[0][SEQUENCE_LOG_RATIO] = float(log_ratios[marked].detach().mean())
            of_columns = [self._losses(row, column) for row, column in zip(rows, columns, strict=True)]
            several = np.ndim(datum["inputs"]["target_tokens"]) > 1
            scores.append(torch.stack(rows, -1) if several else rows[0])
            losses.append(torch.stack(of_columns, -1) if several else of_columns[0])
        return scores, losses

    def _losses(self, log_probs: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        numbers = {**self.settings, **inputs}
        tensors = {name: log_probs.new_tensor(numbers[name]) for name in VALUES if name in numbers}
        return LOSSES[self.loss_fn].of_tokens(log_probs, tensors)


def _columns(datum: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of a datum, or those of each of its tokens' K targets."""
    inputs = datum["inputs"]
    if np.ndim(inputs["target_tokens"]) == 1:
        return [inputs]
    columns = zip(zip(*inputs["target_tokens"], strict=True), zip(*inputs["weights"], strict=True), strict=True)
    return [{"target_tokens": targets, "weights": weights} for targets, weights in columns]


def joint_objective(calls: Sequence[LossCall]) -> TokenObjective:
    """The sum of the losses of several calls, whose tokens have the number of their call as a value."""

    def sum_calls(log_probs: Tensor, batch: TokenBatch) -> Tensor:
        total = torch.zeros_like(log_probs)
        for number, call in enumerate(calls):
            losses = LOSSES[call.loss_fn].of_tokens(log_probs, batch)
            # Tokens of other calls have the inputs 0, with which every loss is finite.
            total = total + losses.where(batch[CALL] == number, 0.0)
        return total

    return TokenObjective(loss=sum_calls, mean_over="sum")


def _check_datum(datum: Mapping[str, Any], name: str, title: str, vocab_size: int, longest: int) -> None:
    """Check one datum, and give ``weights`` of 1 to a cross entropy without them."""
    inputs = datum["inputs"]
    length = len(datum["tokens"])
    if not 0 < length <= longest:
        raise DataError(f"{title} has {length} tokens; give 1 to {longest} (--seq-length)")
    if name == "cross_entropy" and np.ndim(inputs.get("target_tokens", ())) == 1:
        inputs.setdefault("weights", [1.0] * length)
    needed = {"target_tokens", *LOSSES[name].inputs}
    if missing := sorted(needed - set(inputs)):
        raise DataError(f"{title}: loss_fn_inputs of {name} lack {', '.join(missing)}")
    # Thresholds may differ between tokens.
    if unknown := sorted(set(inputs) - needed - (set(CLIP) & set(LOSSES[name].settings))):
        raise DataError(f"{title}: loss_fn_inputs of {name} have {', '.join(unknown)}; remove them")
    shape = np.shape(inputs["target_tokens"])
    if len(shape) > 1 and (name != "cross_entropy" or 0 in shape):
        raise DataError(f"{title}: target_tokens have the shape {list(shape)}; only cross_entropy has several targets")
    for key, numbers in inputs.items():
        if len(numbers) != length or np.shape(numbers) != shape:
            raise DataError(f"{title}: {key} has {len(numbers)} numbers for {length} tokens; give one for each")
        if not np.isfinite(numbers).all():
            raise DataError(f"{title}: {key} has numbers that are not finite")
    if np.asarray(inputs["target_tokens"]).dtype.kind != "i":
        raise DataError(f"{title}: target_tokens are float32; give int64")
    if not any(inputs.get(RATIO_MASK, [1])):
        raise DataError(f"{title}: {RATIO_MASK} marks no token; mark those of the answer")
    for key, tokens in (("model_input", datum["tokens"]), ("target_tokens", inputs["target_tokens"])):
        if np.min(tokens) < 0 or np.max(tokens) >= vocab_size:
            raise DataError(f"{title}: {key} has tokens outside of the vocabulary, 0 to {vocab_size - 1}")
