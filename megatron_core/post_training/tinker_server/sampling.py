"""Samples of requests with settings of their own, from the weights of any training."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.errors import DataError
from megatron_core.inference.requests import TokenScore
from megatron_core.inference.sampling import Sampling
from megatron_core.post_training.answers import Answer, RolloutRequest
from megatron_core.post_training.sampler import RolloutSampler
from megatron_core.post_training.tinker_server.bodies import SampleBody
from megatron_core.post_training.tinker_server.trainings import Trainings
from megatron_core.post_training.trainer import Trainer
from megatron_core.tokenizers.base import Tokenizer, end_ids
from megatron_core.training.setup import Run

Json = dict[str, Any]


TOKENS_TOGETHER = 32
"""Tokens of each sample between two looks at the requests that have arrived."""


@dataclass(frozen=True)
class _Sampled:
    """A request, the numbers of its samples, and those that have ended."""

    request: Json
    numbers: Sequence[int]
    answers: dict[int, Answer] = field(default_factory=dict)


class RequestSampler(RolloutSampler):
    """A ``RolloutSampler`` whose requests have settings of their own, and name the training to sample with.

    Requests may be added while others are sampled; an answer does not depend on that.
    """

    def __init__(self, trainer: Trainer, trainings: Trainings, **layout: Any) -> None:
        super().__init__(trainer, **layout)
        self._trainings = trainings
        self._weights = ""
        self._requests: dict[str, _Sampled] = {}
        self._errors: dict[str, str] = {}
        self._next_group = 0

    @property
    def busy(self) -> bool:
        """Whether requests have no answer yet."""
        return bool(self._requests or self._errors)

    def has_weights(self, name: str) -> bool:
        """Whether the present weights are those of a training, or of a copy of one."""
        return self._weights == name

    def use_weights(self, name: str) -> None:
        """Copy the weights of a training, or of a copy of one; no request may be under way with others."""
        assert not self.busy, "samples under way would continue with other weights"
        self._trainings.activate(name)
        self.update_weights()
        self._weights = name
        self._trainings.scale_adapters(self._generator.stages, name)

    def forget(self, name: str) -> None:
        """Copy the weights of this name again when they are used next."""
        if self._weights == name:
            self._weights = ""

    def add(self, number: str, request: Json) -> None:
        """Add a request under a number of the caller, for ``advance_requests``."""
        rollouts = [self._request(request, self._next_group, copy) for copy in range(request["num_samples"])]
        self._next_group += 1
        error = next(filter(None, map(self.problem, rollouts)), "")
        if error:
            self._errors[number] = error
        else:
            self._requests[number] = _Sampled(request, self.submit(rollouts))

    def drop(self, number: str) -> None:
        """Drop a request whose answer is no longer needed."""
        sampled = self._requests.pop(number, None)
        if sampled is not None:
            self.abort([other for other in sampled.numbers if other not in sampled.answers])

    def advance_requests(self) -> dict[str, Json]:
        """Continue samples of all requests; returns the answers, or the ``error``, of those that are complete.

        Each request has its turn, so that one with many samples does not hold up the others.
        """
        complete: dict[str, Json] = {number: {"error": error} for number, error in self._errors.items()}
        self._errors = {}
        remaining = [
            [number for number in sampled.numbers if number not in sampled.answers]
            for sampled in self._requests.values()
        ]
        turns = [number for turn in zip_longest(*remaining) for number in turn if number is not None]
        # Twice as many as are sampled at a time, so that no place is empty before the next look.
        chosen = turns[: 2 * self._max_batch_size * self._groups.size("dp")]
        answers = self._advance(chosen, TOKENS_TOGETHER) if chosen else {}
        for number, sampled in list(self._requests.items()):
            sampled.answers.update((other, answers[other]) for other in sampled.numbers if other in answers)
            if len(sampled.answers) == len(sampled.numbers):
                complete[number] = _answer(sampled.request, [sampled.answers[other] for other in sampled.numbers])
                del self._requests[number]
        return complete

    def _request(self, request: Json, group: int, copy: int) -> RolloutRequest:
        params = request["sampling_params"]
        limit = self.engine.max_length or self._generator.config.data.seq_length
        room = max(limit - len(request["prompt"]), 0)
        top = max(request["topk_prompt_logprobs"], request["topk_sample_logprobs"])
        return RolloutRequest(
            prompt=tuple(request["prompt"]),
            max_new_tokens=room if params["max_tokens"] is None else params["max_tokens"],
            sampling=Sampling(
                temperature=params["temperature"],
                top_k=max(params["top_k"], 0),
                top_p=params["top_p"],
                seed=mix64(params["seed"], 0, copy) % 2**63,
            ),
            ends=end_tokens(params["stop"], self.run.tokenizer),
            logprobs=top,
            score_prompt=copy == 0 and bool(request["prompt_logprobs"] or request["topk_prompt_logprobs"]),
            stop_strings=tuple(stop_strings(params["stop"])),
            group=group,
        )


def sample_operation(request: SampleBody, weights: str, run: Run) -> Json:
    """The operation of a request, whose seed is drawn if it has none; ``DataError`` for what is not legal."""
    prompt = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    if not prompt or min(prompt) < 0 or max(prompt) >= run.vocab_size:
        raise DataError(f"the prompt must have at least one token, each from 0 to {run.vocab_size - 1}")
    num_scored = request.prompt_logprobs_last_n
    if num_scored is not None and (not request.prompt_logprobs or num_scored >= len(prompt)):
        raise DataError(f"prompt_logprobs_last_n={num_scored} needs prompt_logprobs, and must be below {len(prompt)}")
    stop = request.sampling_params.stop
    if stop_strings(stop) and (run.tokenizer is None or "" in stop_strings(stop)):
        raise DataError("stop: strings need a tokenizer on the server (--tokenizer-type), and must not be empty")
    if any(not 0 <= token < run.vocab_size for token in end_tokens(stop, None)):
        raise DataError(f"stop: tokens must be from 0 to {run.vocab_size - 1}")
    params = request.sampling_params.model_dump(exclude={"type"})
    params["seed"] = secrets.randbits(62) if params["seed"] is None else params["seed"]
    names = {"num_samples", "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_logprobs_last_n"}
    return {
        "kind": "sample",
        "weights": weights,
        "prompt": prompt,
        "sampling_params": params,
        **request.model_dump(include=names),
    }


def stop_strings(stop: str | Sequence[str] | Sequence[int] | None) -> list[str]:
    """The stop strings of a request."""
    if isinstance(stop, str):
        return [stop]
    return [entry for entry in stop or () if isinstance(entry, str)]


def end_tokens(stop: str | Sequence[str] | Sequence[int] | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a sample: those of ``stop``, or without it the ends of texts of the tokenizer."""
    if stop is None:
        return frozenset() if tokenizer is None else end_ids(tokenizer)
    return frozenset(entry for entry in stop if isinstance(entry, int))


def _answer(request: Json, samples: Sequence[Answer]) -> Json:
    """The answer to a request, from its samples."""
    error = next((sample.error for sample in samples if sample.error), None)
    if error is not None:
        return {"error": error}
    count = request["topk_sample_logprobs"]
    sequences = [
        {
            "tokens": list(sample.tokens),
            "logprobs": list(sample.log_probs),
            "stop_reason": sample.finished,
            "top": [likely[:count] for likely in sample.alternatives] if count else None,
        }
        for sample in samples
    ]
    return {"sequences": sequences, **_prompt_scores(request, samples[0].prompt_scores)}


def _prompt_scores(request: Mapping[str, Any], scores: Sequence[TokenScore]) -> Json:
    """The scores of the prompt's tokens: None for the first one, and before the last ones of a request."""
    num_scored = request["prompt_logprobs_last_n"]
    skipped = 0 if num_scored is None else len(scores) - num_scored
    scored = [None, *(None if position < skipped else score for position, score in enumerate(scores))]
    log_probs = [None if score is None else score.logprob for score in scored]
    count = request["topk_prompt_logprobs"]
    top = [[] if score is None else score.alternatives[:count] for score in scored]
    return {
        "prompt_logprobs": log_probs if request["prompt_logprobs"] else None,
        "prompt_top": top if count else None,
    }
