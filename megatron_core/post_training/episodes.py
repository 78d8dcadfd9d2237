"""Episodes of a policy with environments: turns that the policy samples, and replies of one rank's environments."""

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.errors import ConfigError, DataError, MegatronError, quoted
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream
from megatron_core.parallel.texts import broadcast_from_rank
from megatron_core.post_training.answers import Answer, RolloutRequest
from megatron_core.post_training.environments import Environment, Reply, TextOrTokens, Turn
from megatron_core.post_training.sampler import RolloutSampler
from megatron_core.post_training.trajectories import Trajectory
from megatron_core.tokenizers.base import Tokenizer

_R = TypeVar("_R")


class EnvironmentFailure(MegatronError):
    """An environment has raised an exception, has not replied in time, or has given an illegal reply."""


@dataclass(frozen=True)
class Episode:
    """A finished episode: exactly the sampled tokens and those of the environment, in their order."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """For each token after the first: 1 if the policy has sampled it, 0 if the environment has written it."""
    log_probs: tuple[float, ...]
    """Of each sampled token, at temperature 1, when it was sampled."""
    versions: tuple[int, ...]
    """Of each sampled token: the version of the weights, as in ``Answer.versions``."""
    rewards: tuple[float, ...]
    """Of each turn."""
    finished: str
    """``done``: by the environment; ``turns``: after ``max_turns``; ``length``: no room for a further turn."""
    group: int
    experts: np.ndarray | None = None

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)

    def trajectory(self, **values: Any) -> Trajectory:
        """The text that the trainer learns, with ``old_log_probs`` and ``values``."""
        return Trajectory(self.tokens, self.mask, {"old_log_probs": self.log_probs, **values}, self.experts)


@dataclass
class _Play:
    """An episode under way; equal on all ranks."""

    number: int
    group: int
    seed: int
    tokens: list[int]
    mask: list[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    experts: np.ndarray | None = None

    def write(self, tokens: Iterable[int], learned: int) -> None:
        """Append tokens of the policy (``learned`` 1) or of the environment (0)."""
        tokens = list(tokens)
        self.tokens += tokens
        self.mask += [learned] * len(tokens)

    def add_turn(self, answer: Answer, reward: float) -> None:
        """Append a turn of the policy."""
        self.write(answer.tokens, 1)
        self.log_probs += answer.log_probs
        self.versions += answer.versions
        # The last turn has the experts of the whole text.
        self.experts = answer.experts
        self.rewards.append(reward)

    def ended(self, finished: str) -> Episode:
        """The finished episode."""
        return Episode(
            tuple(self.tokens),
            tuple(self.mask),
            tuple(self.log_probs),
            tuple(self.versions),
            tuple(self.rewards),
            finished,
            self.group,
            self.experts,
        )


class EpisodePlayer:
    """Plays episodes: the ranks of ``sampler`` sample turns, and the environments of the first rank reply to them.

    All ranks call the same methods, and get the same episodes, also if replies are random. Token ids are never
    tokenized again: a text of an environment is tokenized alone and appended.
    """

    def __init__(
        self,
        sampler: RolloutSampler,
        *,
        max_new_tokens: int,
        max_turns: int = 8,
        sampling: Sampling | None = None,
        ends: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        workers: int = 1,
        timeout: float = 600.0,
    ) -> None:
        """``max_new_tokens``, ``sampling`` (by default temperature 1), ``ends`` and ``stop_strings`` are those of each
        turn. ``tokenizer``: by default of the run. ``workers``: environments that reply at the same time, in threads;
        ``timeout``: seconds for each reply."""
        for name, value in (("max_new_tokens", max_new_tokens), ("max_turns", max_turns), ("workers", workers)):
            if value < 1:
                raise ConfigError(f"{name}={value}: give 1 or more")
        self._sampler = sampler
        self._run = sampler.run
        self._tokenizer = tokenizer or sampler.run.tokenizer
        self._max_turns = max_turns
        self._workers = workers
        self._timeout = timeout
        self._request = RolloutRequest(
            prompt=(),
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(temperature=1.0),
            ends=frozenset(ends),
            stop_strings=tuple(stop_strings),
        )
        # On all ranks, before the first rank checks prompts alone: building the engine is a collective call.
        most = sampler.engine.max_length
        longest = sampler.run.config.data.seq_length + 1
        self._longest = longest if most is None else min(longest, most)
        """Largest number of tokens of an episode: the trainer predicts the last one, and does not read it."""
        self._next_number = 0
        self._plays: dict[int, _Play] = {}
        """By the number of the request for the present turn."""
        self._environments: dict[int, Environment] = {}
        """Of the first rank, by episode."""

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the episodes under way."""
        return sorted(play.number for play in self._plays.values())

    def play(
        self, environments: Sequence[Environment], *, groups: Sequence[int] | None = None, seed: int = 0
    ) -> list[Episode]:
        """Play an episode with each environment to its end. See ``start``."""
        numbers = self.start(environments, groups=groups, seed=seed)
        episodes: dict[int, Episode] = {}
        while not episodes.keys() >= set(numbers):
            episodes |= self._advance(set(numbers), None)
        return [episodes[number] for number in numbers]

    def start(
        self, environments: Sequence[Environment], *, groups: Sequence[int] | None = None, seed: int = 0
    ) -> list[int]:
        """Start an episode with each environment; returns their numbers. Only the arguments of the first rank count.

        Episodes of the same group, such as samples of one task, share the cache of their prompt. Sampling depends on
        ``seed``, the environment's number here, and the turn. Errors: ``EnvironmentFailure`` on all ranks.
        """
        first = self._next_number

        def started() -> dict[str, Any]:
            chosen = list(range(len(environments)) if groups is None else groups)
            if len(chosen) != len(environments):
                raise ConfigError(f"{len(chosen)} groups for {len(environments)} environments; give one for each")
            self._environments |= dict(enumerate(environments, first))
            calls = {number: environment.reset for number, environment in enumerate(environments, first)}
            prompts = self._ask("reset", calls, self._checked_prompt)
            return {"prompts": prompts, "groups": list(map(int, chosen)), "seed": int(seed)}

        begun = self._from_first_rank(started)
        for position, (prompt, group) in enumerate(zip(begun["prompts"], begun["groups"], strict=True)):
            mask = [0] * (len(prompt) - 1)
            self._submit(_Play(first + position, group, mix64(begun["seed"], position), prompt, mask))
        self._next_number += len(begun["prompts"])
        return list(range(first, self._next_number))

    def advance(self, max_new_tokens: int | None = None) -> dict[int, Episode]:
        """Continue all episodes by one turn, of which at most ``max_new_tokens`` tokens are sampled now.

        Returns the finished episodes by number. The weights may be updated between two calls; see
        ``RolloutSampler.advance``. Errors: ``EnvironmentFailure`` on all ranks.
        """
        return self._advance(set(self.unfinished), max_new_tokens)

    def _advance(self, numbers: set[int], max_new_tokens: int | None) -> dict[int, Episode]:
        requests = [request for request, play in self._plays.items() if play.number in numbers]
        answers = self._sampler.advance(max_new_tokens, requests)
        plays = [self._plays.pop(request) for request in answers]
        turns = [
            Turn(answer.tokens, self._text(play, answer.tokens), answer.finished)
            for play, answer in zip(plays, answers.values(), strict=True)
        ]

        def replies() -> list[tuple[float, list[int], bool]]:
            calls = {
                play.number: partial(self._environments[play.number].step, turn)
                for play, turn in zip(plays, turns, strict=True)
            }
            return self._ask("step", calls, self._checked_reply)

        finished = {}
        for play, answer, reply in zip(plays, answers.values(), self._from_first_rank(replies), strict=True):
            reward, tokens, done = reply
            play.add_turn(answer, reward)
            ending = self._ending(play, tokens, done)
            if ending:
                finished[play.number] = play.ended(ending)
                self._environments.pop(play.number, None)
            else:
                play.write(tokens, 0)
                self._submit(play)
        return finished

    def _ending(self, play: _Play, tokens: Sequence[int], done: bool) -> str:
        """Why an episode ends after a turn; or ""."""
        if done:
            return "done"
        if len(play.rewards) == self._max_turns:
            return "turns"
        return "length" if len(play.tokens) + len(tokens) >= self._longest else ""

    def _submit(self, play: _Play) -> None:
        """Ask the sampler for the next turn of an episode."""
        seed = mix64(play.seed, len(play.rewards)) % 2**63
        request = replace(
            self._request,
            prompt=tuple(play.tokens),
            max_new_tokens=min(self._request.max_new_tokens, self._longest - len(play.tokens)),
            sampling=replace(self._request.sampling, seed=seed),
            group=play.group,
        )
        (number,) = self._sampler.submit([request])
        self._plays[number] = play

    def _text(self, play: _Play, tokens: Sequence[int]) -> str:
        """The text of a turn as a continuation of the episode."""
        if self._tokenizer is None:
            return ""
        stream = TextStream(self._tokenizer, (), play.tokens)
        for token in tokens:
            stream.add(token)
        stream.finish()
        return stream.text

    # Environments, on the first rank.

    def _from_first_rank(self, produce: Callable[[], Any]) -> Any:
        """The result of ``produce`` as JSON, which only the first rank calls; its exception is raised on all ranks."""
        failure: Exception | None = None
        text = ""
        world = self._run.world
        if world.rank == 0:
            try:
                text = json.dumps({"result": produce()})
            except Exception as error:
                failure = error
                text = json.dumps({"failure": str(error)})
        report = json.loads(broadcast_from_rank(0, text, world.device))
        if failure is not None:
            raise failure
        if "failure" in report:
            raise EnvironmentFailure(report["failure"])
        return report["result"]

    def _ask(self, method: str, calls: Mapping[int, Callable[[], Any]], checked: Callable[[Any], _R]) -> list[_R]:
        """The ``checked`` results of a method of the environments of episodes; ``EnvironmentFailure`` of the first."""
        results = []
        outcomes = outcomes_in_threads(list(calls.values()), self._workers, self._timeout)
        for number, outcome in zip(calls, outcomes, strict=True):
            # Whatever ended the environment's thread is its failure; Ctrl-C in this thread is not.
            error = outcome if isinstance(outcome, BaseException) else None
            if error is None:
                try:
                    results.append(checked(outcome))
                except Exception as problem:
                    error = problem
            if error is not None:
                environment = self._environments[number]
                name = getattr(environment, "name", type(environment).__name__)
                text = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
                raise EnvironmentFailure(
                    f"{method} of the environment {name} failed in episode {number}: {text}; correct the environment, "
                    "or catch the error there and return Reply(done=True)"
                ) from error
        return results

    def _checked_prompt(self, prompt: TextOrTokens) -> list[int]:
        tokens = self._tokens(prompt)
        if not 0 < len(tokens) < self._longest:
            raise DataError(f"a prompt of {len(tokens)} tokens; give at least 1 and less than {self._longest}")
        return tokens

    def _checked_reply(self, reply: Reply) -> tuple[float, list[int], bool]:
        if not isinstance(reply, Reply):
            raise DataError(f"step returned {quoted(reply)}; return a Reply")
        reward = float(reply.reward)
        if not math.isfinite(reward):
            raise DataError(f"the reward is {reward}; give a finite number")
        return reward, self._tokens(reply.text), bool(reply.done)

    def _tokens(self, text: TextOrTokens) -> list[int]:
        """The tokens of a text of an environment, or its token ids."""
        if isinstance(text, str):
            if self._tokenizer is None:
                raise DataError(
                    f"the text {quoted(text)} needs a tokenizer; give --tokenizer-type, or return token ids"
                )
            return list(self._tokenizer.tokenize(text))
        tokens = [int(token) for token in text]
        size = self._run.vocab_size
        if any(not 0 <= token < size for token in tokens):
            raise DataError(f"the tokens {quoted(tokens)} are not all from 0 to {size - 1}, the vocabulary")
        return tokens


def outcomes_in_threads(calls: Sequence[Callable[[], Any]], workers: int, timeout: float) -> list[Any]:
    """The result or the exception of each call; ``TimeoutError`` for those without one in time."""
    # Daemon threads and not an executor, which would wait at exit for a call that never returns.
    jobs = deque(enumerate(calls))
    outcomes: dict[int, Any] = {}
    changed = threading.Condition()

    def work() -> None:
        while True:
            with changed:
                if not jobs:
                    return
                number, call = jobs.popleft()
            try:
                outcome = call()
            except BaseException as error:  # the caller raises it
                outcome = error
            with changed:
                outcomes[number] = outcome
                changed.notify()

    for _ in range(min(workers, len(calls))):
        threading.Thread(target=work, name="environment", daemon=True).start()
    limit = timeout * -(-len(calls) // workers)
    with changed:
        if not changed.wait_for(lambda: len(outcomes) == len(calls), limit):
            jobs.clear()
        late = TimeoutError(f"no reply within timeout={timeout} s")
        return [outcomes.get(number, late) for number in range(len(calls))]
