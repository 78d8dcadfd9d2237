"""Episodes with environments: the same on all ranks and in all layouts, and exactly what the trainer learns."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, DataError
from megatron_core.inference.sampling import Sampling
from megatron_core.post_training import (
    Episode,
    EpisodePlayer,
    FunctionEnvironment,
    HttpEnvironment,
    Reply,
    RolloutSampler,
    Trainer,
    Trajectory,
    Turn,
    objectives,
)
from megatron_core.post_training.rewards import format_reward, last_number, number_reward
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from tests.defects.plant import planted
from tests.post_training.test_layouts import EXPERTS, SAMPLED, SETTINGS, TRAINED

CONFIG = RunConfig.from_flat(SETTINGS)
ENDS = (3, 9, 17, 28, 40)


class Echo:
    """Writes the turn's first token back, with a mark, for two turns, and keeps a log of the episode's tokens."""

    def __init__(self, number: int) -> None:
        self.prompt = list(range(number + 1, 2 * number + 4))
        self.log = list(self.prompt)
        self.rewards: list[float] = []

    def reset(self) -> list[int]:
        return self.prompt

    def step(self, turn: Turn) -> Reply:
        self.log += turn.tokens
        self.rewards.append(sum(turn.tokens) / 100)
        if len(self.rewards) == 3:
            return Reply(self.rewards[-1], done=True)
        text = [60, turn.tokens[0]]
        self.log += text
        return Reply(self.rewards[-1], text)


def player_of(trainer: Trainer, **settings: Any) -> EpisodePlayer:
    layout = {name: settings.pop(name) for name in ("tensor_parallel", "pipeline_parallel", "record_experts")
              if name in settings}  # fmt: skip
    return EpisodePlayer(RolloutSampler(trainer, **layout), **{"max_new_tokens": 4, "ends": ENDS} | settings)


def _played(config: RunConfig, layout: dict[str, Any], pack: bool = True) -> tuple[Any, ...]:
    """The episodes of four environments, their logs, and differences to the trainer's log-probabilities."""
    trainer = Trainer(config, this_world(), pack=pack)
    environments = [Echo(number // 2) for number in range(4)]
    episodes = player_of(trainer, **layout).play(environments, groups=[0, 0, 1, 1], seed=5)
    scores = trainer.log_probs([episode.trajectory() for episode in episodes]).log_probs
    same = [tuple(row.tolist()) == episode.log_probs for row, episode in zip(scores, episodes, strict=True)]
    trajectories = [episode.trajectory(advantages=episode.reward) for episode in episodes]
    norm = trainer.train_on(trajectories, objectives.grpo()).grad_norm
    return episodes, [(environment.log, environment.rewards) for environment in environments], same, norm


@pytest.fixture(scope="module")
def alone() -> tuple[Any, ...]:
    return run_ranks(1, _played, CONFIG, {})[0]


def check(played: tuple[Any, ...]) -> None:
    """Tokens, masks, rewards and scores are those of the environments and of the trainer."""
    episodes, logs, same, norm = played
    assert same == [True] * 4 and norm > 0
    for episode, (log, rewards) in zip(episodes, logs, strict=True):
        assert list(episode.tokens) == log
        assert list(episode.rewards) == rewards and episode.finished == "done"
        # The mark of the environment, and the token after it, are not learned.
        marks = [position for position, token in enumerate(log[:-1]) if token == 60 and not episode.mask[position - 1]]
        assert len(marks) == 2 and all(episode.mask[mark] == 0 for mark in marks)
        prompt = 2 + episode.group + 1
        assert episode.mask.count(0) == prompt - 1 + 4
        assert len(episode.log_probs) == len(episode.versions) == sum(episode.mask)


def test_a_trajectory_is_what_was_sampled_and_written(alone: tuple[Any, ...]) -> None:
    check(alone)
    assert len({episode.tokens for episode in alone[0]}) == 4


@pytest.mark.drawn(3)
@pytest.mark.parametrize("trained", [name for name in TRAINED if name not in ("one process", "ep2", "bf16 tp2")])
@pytest.mark.parametrize("sampled", SAMPLED)
def test_layouts_play_the_same_episodes(trained: str, sampled: str, alone: tuple[Any, ...]) -> None:
    config = RunConfig.from_flat(SETTINGS | TRAINED[trained])
    ranks = run_ranks(2, _played, config, SAMPLED[sampled], trained != "pp2")
    for episodes, _, same, norm in ranks:
        assert (episodes, same, norm) == (alone[0], alone[2], alone[3])
    # Only the first rank has asked its environments.
    assert ranks[0][1] == alone[1] and not any(rewards for _, rewards in ranks[1][1])


DEFECTS = {
    "tokens of the environment are learned": ("_advance", "play.write(tokens, 0)", "play.write(tokens, 1)"),
    "the reply of another episode": ("_ask", "return results", "return results[1:] + results[:1]"),
    "the reward of another episode": ("_advance", "play.add_turn(answer, reward)",
                                      "play.add_turn(answer, reward), plays[0].rewards.__setitem__(-1, reward)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_are_found(name: str) -> None:
    method, old, new = DEFECTS[name]
    # A learned token without a log-probability is already an error of the trajectory.
    with planted(f"post_training.episodes:EpisodePlayer.{method}", old, new), pytest.raises(Exception) as failure:
        check(run_ranks(1, _played, CONFIG, {})[0])
    assert failure.type in (AssertionError, RankFailure)


def _at_random(config: RunConfig) -> list[Episode]:
    class Dice(Echo):
        def step(self, turn: Turn) -> Reply:
            return Reply(random.SystemRandom().random(), [random.SystemRandom().randrange(61)], done=False)

    trainer = Trainer(config, this_world())
    return player_of(trainer, max_turns=2, workers=3).play([Dice(number) for number in range(5)])


def test_random_replies_are_the_same_on_all_ranks() -> None:
    ranks = run_ranks(2, _at_random, CONFIG)
    assert ranks[0] == ranks[1]
    assert len({episode.rewards for episode in ranks[0]}) == 5
    assert {episode.finished for episode in ranks[0]} == {"turns"}


def _in_parts(config: RunConfig) -> dict[int, Episode]:
    trainer = Trainer(config, this_world())
    sampler = RolloutSampler(trainer)
    player = EpisodePlayer(sampler, max_new_tokens=4, sampling=Sampling(temperature=1.5))
    player.start([Echo(number) for number in range(3)], seed=1)
    episodes: dict[int, Episode] = {}
    while player.unfinished:
        episodes |= player.advance(3)
        trainer.train_on([Trajectory.of_answer([5, 6], [7, 8])], objectives.cross_entropy(), lr=1e-2)
        sampler.update_weights()
    return episodes


def test_episodes_continue_with_new_weights() -> None:
    """Each turn of 4 tokens takes two calls, of 3 tokens and of 1."""
    (alone,) = run_ranks(1, _in_parts, CONFIG)
    for episodes in run_ranks(2, _in_parts, RunConfig.from_flat(SETTINGS | TRAINED["tp2 sp"])):
        assert episodes == alone
    for episode in alone.values():
        assert episode.versions == (0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5)


class Raising(Echo):
    def step(self, turn: Turn) -> Reply:
        if self.prompt[0] == 3:
            raise ZeroDivisionError("an error of the tool")
        return Reply(1.0, done=True)


class Stuck(Echo):
    def step(self, turn: Turn) -> Reply:
        time.sleep(60)
        raise AssertionError


class Wrong(Echo):
    def step(self, turn: Turn) -> Reply:
        return 1.0  # type: ignore[return-value]


class NoNumber(Echo):
    def step(self, turn: Turn) -> Reply:
        return Reply(float("nan"))


class OtherTokens(Echo):
    def reset(self) -> list[int]:
        return [1, 61]


class Text(Echo):
    def step(self, turn: Turn) -> Reply:
        return Reply(text="a result")


class TooLong(Echo):
    def reset(self) -> list[int]:
        return [1] * 33


def _failing(config: RunConfig, kind: type[Echo]) -> str:
    trainer = Trainer(config, this_world())
    start = time.monotonic()
    try:
        player_of(trainer, timeout=0.2).play([kind(number) for number in range(4)])
    except Exception as error:
        assert time.monotonic() - start < 20
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Raising, "step of the environment Raising failed in episode 2: ZeroDivisionError: an error of the tool"),
        (Stuck, "step of the environment Stuck failed in episode 0: TimeoutError: no reply within timeout=0.2 s"),
        (Wrong, "step of the environment Wrong failed in episode 0: step returned 1.0; return a Reply"),
        (NoNumber, "the reward is nan; give a finite number"),
        (OtherTokens, "reset of the environment OtherTokens failed in episode 0: the tokens [1, 61] are not all"),
        (Text, "the text 'a result' needs a tokenizer; give --tokenizer-type, or return token ids"),
        (TooLong, "a prompt of 33 tokens; give at least 1 and less than 33"),
    ],
)  # fmt: skip
def test_a_failure_is_an_error_on_all_ranks(kind: type[Echo], message: str) -> None:
    for text in run_ranks(2, _failing, CONFIG, kind):
        assert text.startswith("EnvironmentFailure: ")
        assert message in text


def _limits(config: RunConfig) -> list[Episode]:
    class Endless(Echo):
        def step(self, turn: Turn) -> Reply:
            return Reply(0.5, [60, 60, 60])

    trainer = Trainer(config, this_world())
    episodes = player_of(trainer, max_turns=99).play([Endless(0), Endless(9)])
    trainer.log_probs([episode.trajectory() for episode in episodes])
    with pytest.raises(ConfigError, match="2 groups for 1 environments"):
        player_of(trainer).start([Endless(0)], groups=[0, 1])
    with pytest.raises(ConfigError, match="max_turns=0"):
        player_of(trainer, max_turns=0)
    return episodes


def test_an_episode_ends_where_the_trainer_does() -> None:
    (episodes,) = run_ranks(1, _limits, CONFIG)
    for episode in episodes:
        assert episode.finished == "length" and len(episode.tokens) <= 33 and episode.mask[-1] == 1
        assert 33 - len(episode.tokens) < 4
        assert episode.reward == 0.5 * len(episode.rewards)


def _with_experts(config: RunConfig) -> list[bool]:
    trainer = Trainer(config, this_world())
    episodes = player_of(trainer, record_experts=True).play([Echo(number) for number in range(3)])
    scores = trainer.log_probs([episode.trajectory() for episode in episodes]).log_probs
    return [tuple(row.tolist()) == episode.log_probs for row, episode in zip(scores, episodes, strict=True)]


def test_experts_of_all_turns_are_replayed() -> None:
    for same in run_ranks(
        2, _with_experts, RunConfig.from_flat(SETTINGS | EXPERTS | {"expert_model_parallel_size": 2})
    ):
        assert same == [True] * 3


class Letters:
    """A token for each of 26 letters, digits and marks."""

    SYMBOLS = "abcdefghijklmnopqrstuvwxyz0123456789+=?! <>/\n"

    def tokenize(self, text: str) -> list[int]:
        return [self.SYMBOLS.index(symbol) for symbol in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(self.SYMBOLS[token] if token < len(self.SYMBOLS) else "~" for token in ids)


def ask_again(messages: list[dict[str, str]]) -> float | str:
    """A second turn after a hint; the reward is the number of letters of both."""
    written = [message["content"] for message in messages if message["role"] == "assistant"]
    if len(written) == 2:
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        return float(sum(map(len, written)))
    return f"<{len(written[0])}>"


def _functions(config: RunConfig, url: str) -> list[Episode]:
    trainer = Trainer(config, this_world())
    player = player_of(trainer, tokenizer=Letters(), workers=2)
    prompts = ["add 1+1=", "hello"]
    if not url:
        return player.play([FunctionEnvironment(prompt, ask_again) for prompt in prompts], seed=2)
    return player.play([HttpEnvironment(url, prompt, timeout=20) for prompt in prompts], seed=2)


class Handler(BaseHTTPRequestHandler):
    """``FunctionEnvironment`` over HTTP."""

    environments: ClassVar[list[FunctionEnvironment]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            self.environments.append(FunctionEnvironment(body["task"], ask_again))
            answer = {"episode": len(self.environments) - 1, "prompt": self.environments[-1].reset()}
        else:
            turn = Turn(tuple(body["tokens"]), body["text"], body["finished"])
            reply = self.environments[body["episode"]].step(turn)
            answer = {"reward": reply.reward, "text": reply.text, "done": reply.done}
        self.reply(200, json.dumps(answer).encode())

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Handler]], str]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[HTTPServer] = []

    def start(handler: type[Handler]) -> str:
        server = HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_functions_and_programs_are_environments(serve: Callable[[type[Handler]], str]) -> None:
    (alone,) = run_ranks(1, _functions, CONFIG, "")
    letters = Letters()
    for episode, prompt in zip(alone, ["add 1+1=", "hello"], strict=True):
        assert letters.detokenize(episode.tokens).startswith(prompt)
        assert len(episode.rewards) == 2 and episode.reward == sum(episode.mask)
        assert episode.mask.count(0) == len(prompt) - 1 + 3
    url = serve(Handler)
    for episodes in run_ranks(2, _functions, CONFIG, url):
        assert episodes == alone


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (500, b"no such task", r"/reset answered 500: 'no such task'; see the log"),
        (200, b"hello", "did not answer JSON: 'hello'"),
        (200, b'{"episode": 1}', r"answered {'episode': 1}; the fields are episode, prompt"),
        (200, b"[]", r"the fields are episode, prompt"),
        (0, b"", r"gave no answer .*timeout=0.3 s"),
    ],
)
def test_programs_that_do_not_answer(
    status: int, content: bytes, message: str, serve: Callable[[type[Handler]], str]
) -> None:
    class Other(Handler):
        def do_POST(self) -> None:
            if not status:
                time.sleep(1)
            self.reply(status or 200, content)

    with pytest.raises(DataError, match=message):
        HttpEnvironment(serve(Other), timeout=0.3).reset()


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"url='file:///etc/passwd' of an environment must start with http"):
        HttpEnvironment("file:///etc/passwd")
    with pytest.raises(DataError, match="is it running"):
        HttpEnvironment("http://127.0.0.1:9", timeout=1).reset()
    with pytest.raises(ConfigError, match="timeout=0"):
        HttpEnvironment("http://127.0.0.1:9", timeout=0)


def test_rewards_of_numbers_and_formats() -> None:
    assert number_reward("12 + 30 is 42.", 42) == number_reward("so 42.0", "42") == 1.0
    assert number_reward("42 or 43", 42) == number_reward("forty", 42) == 0.0
    assert number_reward("it costs 1,234.50", "1234.5") == 1.0
    assert number_reward("x = -3", -3) == number_reward("7-3", 3) == number_reward("1/2", "0.5") == 1.0
    assert last_number("1/0") is None and last_number("9" * 5000) is None and last_number("") is None
    assert last_number("3 then 1/0") == 3
    assert format_reward("<think>a\nb</think>7", r"<think>.*</think>\d+") == 1.0
    assert format_reward("<think>a</think>7 ", r"<think>.*</think>\d+") == 0.0
