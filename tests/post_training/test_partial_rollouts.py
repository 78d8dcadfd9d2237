"""Answers that are sampled in parts, with other weights in each, and requests with settings of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.settings import InferenceConfig
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training import (
    Answer,
    RolloutRequest,
    RolloutSampler,
    Trainer,
    Trajectory,
    largest_difference,
    objectives,
)
from megatron_core.post_training.answers import answer_of
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from tests.defects.plant import planted
from tests.post_training.test_environments import Letters
from tests.post_training.test_layouts import EXPERTS, SAMPLED, SETTINGS, TRAINED

BLOCK = 8
"""Short blocks, so that prompts of a few tokens fill some."""
PART = 4
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": (2,),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
REQUESTS = [
    RolloutRequest(
        prompt=tuple(range(1, 4 + 7 * (number % 3))),
        max_new_tokens=5 + 2 * number,
        sampling=Sampling(temperature=0.0 if number == 4 else 0.8 + number / 10, seed=7 * number),
        ends=frozenset([3] if number % 2 else [5, 9]),
    )
    for number in range(6)
]


def sampler_of(trainer: Trainer, **layout: Any) -> RolloutSampler:
    settings = InferenceConfig(inference_dynamic_batching_block_size=BLOCK)
    return RolloutSampler(trainer, settings=settings, **layout)


def trajectories_of(answers: dict[int, Answer]) -> list[Trajectory]:
    return [
        Trajectory.of_answer(
            REQUESTS[number].prompt, answer.tokens, advantages=float(number % 3 - 1), old_log_probs=answer.log_probs,
            experts=answer.experts,
        )
        for number, answer in sorted(answers.items())
    ]  # fmt: skip


def in_parts(config: RunConfig, layout: dict[str, Any]) -> list[tuple[Any, ...]]:
    """For each part: the difference between sampler and trainer in the tokens of the present weights; the answers."""
    trainer = Trainer(config, this_world(), pack=layout.pop("pack", True))
    sampler = sampler_of(trainer, **layout)
    sampler.submit(REQUESTS)
    results = []
    while sampler.unfinished:
        numbers = sampler.unfinished
        finished = sampler.advance(PART)
        # The others are looked at as well, without ending them.
        answers = finished | {n: a for n, a in _looked_at(sampler, numbers).items() if a.tokens}
        ordered = [answers[number] for number in sorted(answers)]
        scores = trainer.log_probs(trajectories_of(answers)).log_probs
        present = largest_difference(ordered, scores, version=sampler.version)
        results.append((present, largest_difference(ordered, scores), answers))
        trainer.train_on(trajectories_of(answers), objectives.grpo(), lr=1e-2)
        sampler.update_weights()
    return results


def _looked_at(sampler: RolloutSampler, numbers: list[int]) -> dict[int, Answer]:
    """The unfinished answers as they are, on all ranks."""
    rows = [answer.row(n) for n, answer in sampler._unfinished.items() if answer is not None and n in numbers]
    texts = gather_from_all_ranks(json.dumps(rows), sampler.run.world.device)
    return {row[0]: answer_of(row, None) for text in texts for row in json.loads(text)}


@pytest.fixture(scope="module")
def alone() -> list[tuple[Any, ...]]:
    return run_ranks(1, in_parts, RunConfig.from_flat(SETTINGS), {})[0]


def test_a_continued_answer_has_the_bits_of_the_weights_that_sampled(alone: list[tuple[Any, ...]]) -> None:
    assert [part[0] for part in alone] == [0.0] * len(alone)
    # Tokens of earlier weights keep their log-probabilities: the trainer's present ones are others.
    assert alone[0][1] == 0.0 and all(part[1] > 1e-4 for part in alone[1:])
    assert len(alone) == 4
    last = alone[-1][2]
    (answer,) = [answer for answer in last.values() if len(answer.tokens) > 12]
    assert answer.versions[:13] == (0,) * 4 + (1,) * 4 + (2,) * 4 + (3,)
    for _, _, answers in alone:
        for answer in answers.values():
            assert len(answer.versions) == len(answer.tokens) == len(answer.log_probs)
            assert answer.versions == tuple(position // PART for position in range(len(answer.tokens)))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("trained", [name for name in TRAINED if name not in ("one process", "ep2", "bf16 tp2")])
@pytest.mark.parametrize("sampled", SAMPLED)
def test_layouts_sample_the_same_parts(trained: str, sampled: str, alone: list[tuple[Any, ...]]) -> None:
    config = RunConfig.from_flat(SETTINGS | TRAINED[trained])
    for parts in run_ranks(2, in_parts, config, SAMPLED[sampled] | {"pack": trained != "pp2"}):
        assert parts == alone


def _whole_and_parts(config: RunConfig) -> tuple[list[Answer], list[Answer], list[Answer]]:
    trainer = Trainer(config, this_world())
    whole = sampler_of(trainer).sample_requests(REQUESTS)
    sampler = sampler_of(trainer)
    numbers = sampler.submit(REQUESTS)
    answers: dict[int, Answer] = {}
    while sampler.unfinished:
        answers |= sampler.advance(3)
    again = sampler.sample_requests(REQUESTS)
    return whole, [answers[number] for number in numbers], again


def test_parts_with_the_same_weights_are_the_whole() -> None:
    """The pauses, and a cache that earlier calls have filled, change nothing."""
    ((whole, parts, again),) = run_ranks(1, _whole_and_parts, RunConfig.from_flat(SETTINGS))
    assert whole == parts == again
    assert len({answer.tokens for answer in whole}) == len(REQUESTS)
    assert {answer.finished for answer in whole} == {"stop", "length"}


def test_recurrent_states_are_computed_again() -> None:
    config = RunConfig.from_flat(SETTINGS | DELTA_NET | {"layout_invariant": False})
    ((whole, parts, again),) = run_ranks(1, _whole_and_parts, config)
    for answers in (parts, again):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in whole]
        for answer, expected in zip(answers, whole, strict=True):
            assert answer.log_probs == pytest.approx(expected.log_probs, rel=1e-6)  # float32


def _experts(config: RunConfig) -> tuple[float, list[Any]]:
    trainer = Trainer(config, this_world())
    sampler = sampler_of(trainer, record_experts=True)
    sampler.submit(REQUESTS)
    answers: dict[int, Answer] = {}
    while sampler.unfinished:
        answers |= sampler.advance(3)
    scores = trainer.log_probs(trajectories_of(answers)).log_probs
    ordered = [answers[number] for number in sorted(answers)]
    return largest_difference(ordered, scores), [answer.experts.tolist() for answer in ordered]  # type: ignore[union-attr]


def test_experts_of_parts_follow_their_answers() -> None:
    (alone,) = run_ranks(1, _experts, RunConfig.from_flat(SETTINGS | EXPERTS))
    assert alone[0] == 0.0
    for ranks in run_ranks(2, _experts, RunConfig.from_flat(SETTINGS | EXPERTS)):
        assert ranks == alone


def _aborted(config: RunConfig) -> tuple[dict[int, Answer], dict[int, Answer], dict[int, Answer]]:
    sampler = sampler_of(Trainer(config, this_world()))
    whole = dict(enumerate(sampler.sample_requests(REQUESTS)))
    first = sampler.submit(REQUESTS)[0]
    finished = sampler.advance(2)
    aborted = sampler.abort([number for number in sampler.unfinished if (number - first) % 2])
    with pytest.raises(ConfigError, match="are not unfinished"):
        sampler.abort([first + 1])
    finished |= sampler.advance()
    return whole, _from(first, aborted), _from(first, finished)


def _from(first: int, answers: dict[int, Answer]) -> dict[int, Answer]:
    return {number - first: answer for number, answer in answers.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_aborted_answer_keeps_its_tokens_and_disturbs_no_other(ranks: int) -> None:
    for whole, aborted, finished in run_ranks(ranks, _aborted, RunConfig.from_flat(SETTINGS)):
        assert aborted and set(aborted) | set(finished) == set(whole)
        for number, answer in finished.items():
            assert answer == whole[number]
        for number, answer in aborted.items():
            assert (answer.finished, answer.tokens) == ("aborted", whole[number].tokens[:2])


def _group(config: RunConfig) -> tuple[int, int, int]:
    """Positions that were not computed again: of a group, of the next turn, and of a turn with other weights."""
    sampler = sampler_of(Trainer(config, this_world()))
    scheduler = sampler.engine.scheduler
    prompt = tuple(range(1, 22))
    requests = [
        RolloutRequest(prompt=prompt, max_new_tokens=4, sampling=Sampling(temperature=1.0, seed=seed), group=0)
        for seed in range(4)
    ]
    answers = sampler.sample_requests(requests)
    of_group = scheduler.reused
    following = replace(requests[0], prompt=(*prompt, *answers[0].tokens, 6, 7, 8, 9))
    sampler.sample_requests([following])
    of_turn = scheduler.reused - of_group
    sampler.update_weights()
    assert sampler.engine.cache.bytes == 0
    sampler.sample_requests([following])
    return of_group, of_turn, scheduler.reused - of_group - of_turn


def test_a_prompt_is_computed_once_for_a_group_and_its_next_turn() -> None:
    """Of 21 positions two blocks of 8; in the next turn also the block with the answer's first tokens."""
    assert run_ranks(1, _group, RunConfig.from_flat(SETTINGS)) == [(3 * 16, 24, 0)]
    # Both replicas have requests of other groups; this one is sampled by one of them alone.
    reused = run_ranks(2, _group, RunConfig.from_flat(SETTINGS))
    assert reused[0][0] == 3 * 16 and reused[1] == (0, 0, 0)


def _stopped(config: RunConfig) -> tuple[list[Answer], list[Answer], str]:
    """Answers without and with a stop string, which stands in the middle of the first one."""
    trainer = Trainer(config, this_world())
    trainer.run.tokenizer = Letters()
    sampler = sampler_of(trainer)
    whole = sampler.sample_requests(REQUESTS)
    stop = Letters().detokenize(whole[5].tokens[2:4])
    sampler.submit([replace(request, stop_strings=(stop,)) for request in REQUESTS])
    answers: dict[int, Answer] = {}
    while sampler.unfinished:
        answers |= sampler.advance(3)
    return whole, [answers[number] for number in sorted(answers)], stop


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_string_ends_an_answer_between_parts(ranks: int) -> None:
    """The string begins in the last token of the first part."""
    for whole, stopped, stop in run_ranks(ranks, _stopped, RunConfig.from_flat(SETTINGS)):
        for answer, longest in zip(stopped, whole, strict=True):
            text = Letters().detokenize(longest.tokens)
            length = text.find(stop) + len(stop) if stop in text else len(text)
            assert answer.tokens == longest.tokens[:length]
            assert answer.finished == ("stop" if stop in text else longest.finished)
        assert (stopped[5].finished, len(stopped[5].tokens)) == ("stop", 4)


def _cache(config: RunConfig) -> tuple[int, int, int]:
    """Blocks in use while two requests run, after one of them has paused, and after both have."""
    sampler = sampler_of(Trainer(config, this_world()))
    engine = sampler.engine
    numbers = [engine.submit(request) for request in (REQUESTS[0], REQUESTS[2])]
    engine.step()
    with pytest.raises(LayoutError, match="2 requests are under way; finish, pause or cancel them"):
        engine.free_cache()
    pool = engine.scheduler.pool
    blocks = []
    for number in numbers:
        blocks.append(pool.capacity - pool.available)
        engine.pause(number)
    blocks.append(pool.capacity - pool.available)
    engine.free_cache()
    for number in numbers:
        engine.resume(number)
    while engine.busy:
        engine.step()
    return blocks[0], blocks[1], blocks[2]


def test_paused_requests_take_no_memory_of_others() -> None:
    """The first has one block and the other one three: 18 positions in blocks of 8."""
    assert run_ranks(1, _cache, RunConfig.from_flat(SETTINGS)) == [(4, 3, 0)]


def _resumed(config: RunConfig, layout: dict[str, Any], stop: str, resumes: bool) -> tuple[dict[int, Answer], int]:
    """Answers in parts with a step between them, after a checkpoint or after its restoration; and unfinished ones."""
    trainer = Trainer(config, this_world())
    trainer.run.tokenizer = Letters()
    sampler = sampler_of(trainer, record_experts=True, **layout)
    requests = [replace(request, stop_strings=(stop,), logprobs=number % 3) for number, request in enumerate(REQUESTS)]
    learned = trajectories_of({0: Answer((7, 8), (-4.0, -4.0), "length", (0, 0))})
    if resumes:
        sampler.restore_unfinished(trainer.stored["answers"])
        with pytest.raises(ConfigError, match="the sampler has had 6 requests; restore answers in a new one"):
            sampler.restore_unfinished(trainer.stored["answers"])
    else:
        sampler.submit(requests)
        sampler.advance(3)
        trainer.train_on(learned, objectives.cross_entropy(), lr=1e-2)
        with pytest.raises(ConfigError, match=r"weights of iteration 0, and the trainer those of 1.*update_weights"):
            sampler.unfinished_state()
        sampler.update_weights()
        trainer.stored["answers"] = sampler.unfinished_state()
        trainer.save()
    unfinished = len(sampler.unfinished)
    answers = sampler.advance(2)
    trainer.train_on(learned, objectives.cross_entropy(), lr=1e-2)
    sampler.update_weights()
    return answers | sampler.advance(), unfinished


@pytest.mark.drawn(1)
@pytest.mark.parametrize("sampled", SAMPLED)
def test_unfinished_answers_of_a_checkpoint_continue_with_the_same_bits(sampled: str, tmp_path: Path) -> None:
    ((whole, _, _),) = run_ranks(1, _stopped, RunConfig.from_flat(SETTINGS))
    stop = Letters().detokenize(whole[5].tokens[2:4])
    saving = SETTINGS | EXPERTS | {"save": str(tmp_path)}
    ((expected, unfinished),) = run_ranks(1, _resumed, RunConfig.from_flat(saving), {}, stop, False)
    assert unfinished >= 4
    assert {1, 2} <= {version for answer in expected.values() for version in answer.versions[3:]}
    resumed = RunConfig.from_flat(saving | {"load": str(tmp_path)})
    for answers, again in run_ranks(2, _resumed, resumed, SAMPLED[sampled], stop, True):
        assert again == unfinished and answers.keys() == expected.keys()
        for number, answer in answers.items():
            of_experts = answer.experts, expected[number].experts
            assert of_experts[0] is not None and of_experts[1] is not None
            assert of_experts[0].tolist() == of_experts[1].tolist()
            assert replace(answer, experts=None) == replace(expected[number], experts=None)


def _refused(config: RunConfig) -> None:
    sampler = sampler_of(Trainer(config, this_world()))
    with pytest.raises(ConfigError, match=r"request 1: stop_strings=\('x',\) need a tokenizer"):
        sampler.submit([REQUESTS[0], replace(REQUESTS[1], stop_strings=("x",))])
    with pytest.raises(ConfigError, match="request 0: the prompt has no token"):
        sampler.submit([replace(REQUESTS[1], prompt=())])
    with pytest.raises(ConfigError, match="max_new_tokens=0: give 1 or more"):
        sampler.advance(0)
    assert sampler.unfinished == []


def test_wrong_requests_are_refused() -> None:
    run_ranks(1, _refused, RunConfig.from_flat(SETTINGS))


def _other_budget(config: RunConfig) -> None:
    world = this_world()
    sampler = sampler_of(Trainer(config, world))
    sampler.submit(REQUESTS)
    sampler.advance(2 + world.rank)


def test_different_calls_of_ranks_are_an_error() -> None:
    with pytest.raises(RankFailure, match="differ between ranks"):
        run_ranks(2, _other_budget, RunConfig.from_flat(SETTINGS))


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("post_training.sampler:RolloutSampler._advance", "answer.add(progress, self.version)",
         "answer.add(progress, self.version - 1)"),
        ("post_training.sampler:RolloutSampler.update_weights", "self.free_cache()", "pass"),
    ],
)  # fmt: skip
def test_planted_defects_are_found(target: str, old: str, new: str, alone: list[tuple[Any, ...]]) -> None:
    """A version stamp that is wrong by one, and a cache that is kept after an update."""
    with planted(target, old, new):
        (parts,) = run_ranks(1, in_parts, RunConfig.from_flat(SETTINGS), {})
    assert parts != alone
