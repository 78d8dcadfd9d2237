"""Blocks, prefix sharing, chunks of prompts and preemption change no text; memory is bounded and returned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_core.errors import ConfigError, MegatronError
from megatron_core.inference import Engine, Generator, Progress, Request, generate
from megatron_core.inference.scheduler import BlockPool, block_key
from megatron_core.inference.settings import InferenceConfig
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.inference import fuzz
from tests.inference.fuzz import MODERN, Draw, generator_of
from tests.inference.test_generate import (
    DELTA_NET,
    DSA,
    EXPERTS,
    FALCON_H1,
    KIMI,
    LATENT,
    LFM2,
    LONG_WINDOW,
    MAMBA,
    PP2,
    TP2,
    WINDOW,
)
from tests.sample import WHOLE_MATRIX

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"seq_length": 64},
    "llama": MODERN,
    "llama, reference": MODERN | {"kernel_backend": "reference"},
    "window": WINDOW | {"seq_length": 64},
    "capped": LONG_WINDOW | {"seq_length": 64},
    "experts": EXPERTS | {"seq_length": 64},
    "latent": LATENT | {"seq_length": 64},
    "delta net": DELTA_NET | {"seq_length": 64},
    "kimi linear": KIMI | {"seq_length": 64},
    "mamba": MAMBA | {"seq_length": 64},
    "falcon-h1": FALCON_H1 | {"seq_length": 64},
    "lfm2": LFM2 | {"seq_length": 64},
    "sparse attention": DSA | {"seq_length": 64},
}


def judged(seeds: range, model: dict[str, Any]) -> tuple[list[str], Counter[str]]:
    """Faults of draws on one rank, and what happened in them."""
    generator, faults, counts = generator_of(model), [], Counter[str]()
    for seed in seeds:
        draw = Draw.of(seed, generator.bytes_per_position)
        found = fuzz.run(draw, generator)
        counts += found.counts
        faults += [f"seed {seed}: {each}" for each in fuzz.differences(draw, found, generator)]
    return faults, counts


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_requests_alone(name: str) -> None:
    faults, counts = judged(range(100 if WHOLE_MATRIX else 10), MODELS[name])
    assert faults == []
    recurrent = {"linear_attention_freq", "hybrid_layer_pattern"} & MODELS[name].keys()
    reached = ("preempted",) if recurrent else ("preempted", "reused", "unused")
    assert min(counts[case] for case in reached) > 0, "the draws reach these cases"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("world_size", "name", "layout"),
    [
        (2, "llama", PP2),
        (2, "latent", TP2),
        (2, "delta net", TP2),
        (2, "delta net", PP2),
        (2, "mamba", TP2),
        (2, "falcon-h1", TP2),
        (2, "lfm2", TP2),
        (2, "experts", TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        (2, "window", PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
        (4, "llama", {"pipeline_model_parallel_size": 4}),
        (4, "llama", TP2 | PP2),
        (4, "llama", TP2 | {"context_parallel_size": 2}),
    ],
)
def test_texts_in_a_layout_are_those_of_the_requests_alone(world_size: int, name: str, layout: dict) -> None:
    """Every rank reports the same, also for requests cancelled while a step of theirs is under way."""
    whole, seeds = generator_of(MODELS[name]), range(40 if WHOLE_MATRIX else 8)
    counts = Counter[str]()
    everywhere = run_ranks(world_size, fuzz.outcomes, seeds, MODELS[name] | layout, whole.bytes_per_position)
    for rank, found in enumerate(everywhere):
        for seed, outcome in zip(seeds, found, strict=True):
            draw = Draw.of(seed, whole.bytes_per_position)
            assert fuzz.differences(draw, outcome, whole) == [], f"rank {rank}, seed {seed}"
            counts += outcome.counts
    assert (counts["in flight"] > 0) == ("pipeline_model_parallel_size" in layout), "stages work at the same time"
    assert min(counts["preempted"], counts["reused"] + (name in ("delta net", "mamba", "falcon-h1", "lfm2"))) > 0


DEFECTS: dict[str, tuple[str, str, str]] = {
    "a block is freed while another text uses it": (
        "inference.scheduler:BlockPool.release",
        "if self._references[block]:",
        "if self._references[block] > 1:",
    ),
    "an evicted block is still found": (
        "inference.scheduler:BlockPool._evict",
        "del self._by_key[self._keys.pop(block)]",
        "self._keys.pop(block)",
    ),
    "the hash of a block ignores the blocks before it": (
        "inference.scheduler:TextScheduler._key",
        'text.keys[block - 1] if block else b""',
        'b""',
    ),
    "the hash of a block ignores its last token": (
        "inference.scheduler:TextScheduler._key",
        "(block + 1) * self.block_size]",
        "max((block + 1) * self.block_size - 1, 1)]",
    ),
    "a chunk is written to the shared blocks before it": (
        "inference.kv_cache:KVCache.begin",
        "[positions_of_span // size]",
        "[(positions_of_span - span.first) // size]",
    ),
    "positions after a shared prefix are one too large": (
        "inference.kv_cache:KVCache.begin",
        "return torch.cat(positions)[None]",
        "return (torch.cat(positions) + any(span.first and span.count > 1 for span in spans))[None]",
    ),
    "a block table is not renumbered when memory shrinks": (
        "inference.scheduler:TextScheduler.compact",
        "[numbers[block] for block in text.table]",
        "list(text.table)",
    ),
    "a preempted text counts as computed": (
        "inference.scheduler:TextScheduler._admit",
        "text.computed = len(shared) * self.block_size",
        "text.computed = len(text.tokens) - 1 if text.written else len(shared) * self.block_size",
    ),
    "a text keeps its block when it adopts another one": (
        "inference.scheduler:TextScheduler._adopt",
        "self.pool.release([text.table[index]])",
        "pass",
    ),
    "blocks are registered before they are full": (
        "inference.scheduler:TextScheduler._segment",
        "(text.computed + count) // self.block_size)",
        "-(-len(text.tokens) // self.block_size))",
    ),
    "a scored prompt skips the shared prefix": (
        "inference.scheduler:TextScheduler._shared_blocks",
        "not self._may_share(text)",
        "not self.sharing",
    ),
    "scores of a preempted prompt are reported twice": (
        "inference.scheduler:TextScheduler.add",
        "text.prompt_scores.clear()",
        "pass",
    ),
    "a text's own key is not attended to": (
        "inference.kv_cache:KVCache.begin",
        "lengths=positions[0].to(device) + 1",
        "lengths=positions[0].to(device).clamp(min=1)",
    ),
    "a whole prompt is found in the cache": (
        "inference.scheduler:TextScheduler._shared_blocks",
        "range((len(text.tokens) - 1) // self.block_size)",
        "range(len(text.tokens) // self.block_size)",
    ),
    "memory does not shrink": (
        "inference.engine:Engine._remove",
        "2 * pool.held < self.cache.blocks",
        "False",
    ),
    "unused blocks are kept without a bound": (
        "inference.scheduler:BlockPool.release",
        "len(self._unused) > self.capacity // UNUSED_SHARE",
        "False",
    ),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", DEFECTS)
def test_the_draws_find(name: str, record_property: Callable[[str, object], None]) -> None:
    generator, found = generator_of(MODERN), ""
    record_property("defect", name)
    for seed in range(60):
        draw = Draw.of(seed, generator.bytes_per_position)
        try:
            with planted(*DEFECTS[name]):
                outcome = fuzz.run(draw, generator)
            found = next(iter(fuzz.differences(draw, outcome, generator)), "")
        except (LookupError, RuntimeError, AssertionError, MegatronError) as error:
            found = repr(error)
        if found:
            break
    assert found, "every text is right in spite of it"
    record_property("given away by", f"seed {seed}: {found}")


def tokens_of_steps(generator: Generator) -> list[int]:
    """The numbers of tokens that this rank's stage computes in its next steps."""
    tokens: list[int] = []
    (stage,) = generator.stages.values()
    stage.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].numel()))
    return tokens


def finish(engine: Engine) -> list[Progress]:
    found: list[Progress] = []
    while engine.busy:
        found += engine.step()
    return found


BLOCKS_OF_4 = InferenceConfig(inference_dynamic_batching_block_size=4, inference_dynamic_batching_max_tokens=16)
STEM = list(range(2, 22))


def test_a_common_prefix_is_computed_once() -> None:
    """In the step of the first text for the others that start with it, and again while its blocks are kept."""
    generator = generator_of(MODERN)
    tokens = tokens_of_steps(generator)
    engine = Engine(generator, config=BLOCKS_OF_4)
    for last in range(5):
        engine.submit(Request(prompt=(*STEM, 30 + last), max_new_tokens=1))
    finish(engine)
    assert tokens == [16, 5 + 4] and engine.scheduler.reused == 4 * 20
    engine.submit(Request(prompt=(*STEM, 50, 51), max_new_tokens=2))
    finish(engine)
    assert tokens[2:] == [2, 1]


def test_running_texts_get_a_token_while_a_long_prompt_is_computed() -> None:
    generator = generator_of(MODERN)
    engine = Engine(generator, config=BLOCKS_OF_4)
    engine.submit(Request(prompt=(3, 4), max_new_tokens=30))
    engine.step()
    tokens = tokens_of_steps(generator)
    engine.submit(Request(prompt=tuple(range(1, 56)), max_new_tokens=2))
    found: list[int] = []
    while 1 not in found:
        found = [progress.number for progress in engine.step()]
        assert 0 in found, "in every step"
    assert len(tokens) == 5 and max(tokens) <= 16 and sum(tokens) == 55 + 5


def test_a_request_that_never_fits_is_refused() -> None:
    generator = generator_of(MODERN)
    memory = 5 * 4 * generator.bytes_per_position / 1e9
    config = InferenceConfig(
        inference_dynamic_batching_block_size=4, inference_dynamic_batching_buffer_size_gb=memory * 1.01
    )
    engine = Engine(generator, config=config)
    assert engine.cache_positions == 20
    engine.submit(Request(prompt=tuple(STEM[:11]), max_new_tokens=10))
    words = "prompt's 11 tokens and max_new_tokens=11 need 21 positions of the key-value cache, which has 20; give a"
    with pytest.raises(ConfigError, match=words):
        engine.submit(Request(prompt=tuple(STEM[:11]), max_new_tokens=11))
    assert len(finish(engine)) == 10
    with pytest.raises(ConfigError, match="buffer_size_gb=1e-09 does not hold one block of 32 positions"):
        Engine(generator, config=InferenceConfig(inference_dynamic_batching_buffer_size_gb=1e-9))


def test_states_that_leave_no_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = generator_of(MODERN)
    monkeypatch.setattr(type(generator), "bytes_per_text", 10**15)
    with pytest.raises(
        ConfigError, match=r"max_batch_size=7: states of 7 texts need 7e\+06 GB on rank 0.* --max-batch-size"
    ):
        Engine(generator, max_batch_size=7)


def test_memory_is_that_of_the_blocks_and_is_returned() -> None:
    for model in (MODERN, MODELS["latent"]):
        generator = generator_of(model)
        engine = Engine(generator, config=BLOCKS_OF_4)
        for first in range(20):
            engine.submit(Request(prompt=(first, *STEM), max_new_tokens=8))
        engine.step()
        assert engine.cache.bytes == engine.cache.blocks * 4 * generator.bytes_per_position
        engine.step()
        largest = engine.cache.bytes
        finish(engine)
        assert 0 < engine.cache.blocks <= 2 * engine.scheduler.pool.held, "kept for texts with the same beginning"
        sharing = BLOCKS_OF_4
        without = InferenceConfig(
            inference_dynamic_batching_block_size=sharing.inference_dynamic_batching_block_size,
            inference_dynamic_batching_prefix_caching=False,
        )
        engine = Engine(generator, config=without)
        for first in range(20):
            engine.submit(Request(prompt=(first, *STEM), max_new_tokens=8 if first else 30))
        peak = 0
        while engine.busy:
            engine.step()
            peak = max(peak, engine.cache.bytes)
            if engine.running == 1:
                assert engine.cache.bytes <= peak / 3
        assert engine.cache.bytes == 0 and peak >= largest / 2


def test_numbers_that_are_not_finite_end_one_request() -> None:
    """A damaged row of the embedding: the other texts, and later ones in the same blocks, are right."""
    for backend in ("auto", "reference"):
        generator = generator_of(MODERN | {"untie_embeddings_and_output_weights": True, "kernel_backend": backend})
        starts = [(3, 4, 5), (30, 4), (3, 4, 5, 6, 10)]
        alone = [list(generate(generator, Request(prompt=start, max_new_tokens=6))) for start in starts]
        damaged = next(token for token in range(61) if token not in sum(alone, [*sum(starts, ())]))
        with torch.no_grad():
            generator.stages[0].embedding.word_embeddings.weight[damaged] = float("nan")
        engine = Engine(generator, max_batch_size=4, config=BLOCKS_OF_4)
        for _ in range(2):
            wrong = engine.submit(Request(prompt=(3, 4, 5, 6, damaged, 8, 7), max_new_tokens=6))
            numbers = [engine.submit(Request(prompt=start, max_new_tokens=6)) for start in starts]
            found = finish(engine)
            assert [[each.token for each in found if each.number == number] for number in numbers] == alone
            (ended,) = (each for each in found if each.number == wrong)
            assert (ended.token, ended.finished) == (None, "error")
            assert "largest logit of the next token is nan" in str(ended.error)


def _refusals(settings: dict[str, Any]) -> list[str]:
    engine, found = Engine(generator_of(settings)), []
    for token in (61, 63, -1):
        try:
            engine.submit(Request(prompt=(5, token), max_new_tokens=1))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_token_beyond_the_vocabulary_is_an_error_on_every_rank() -> None:
    """Also one of the rows that pad the vocabulary of two tensor-parallel ranks."""
    wanted = ["the prompt has tokens outside of the vocabulary, 0 to 60"] * 3
    assert run_ranks(2, _refusals, MODERN | TP2) == [wanted] * 2 == [_refusals(MODERN)] * 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("block_size", 0, "an integer from 1 to 65,536"), ("max_tokens", 0, "an integer from 1"),
     ("buffer_size_gb", -1.0, "a number > 0")],
)  # fmt: skip
def test_wrong_settings_name_the_range(name: str, value: float, words: str) -> None:
    full = f"inference_dynamic_batching_{name}"
    with pytest.raises(ConfigError, match=f"{full}={value} is out of range: it must be {words}"):
        InferenceConfig(**{full: value})


def test_keys_of_blocks_depend_on_all_tokens_before() -> None:
    assert block_key(b"", [1, 2]) != block_key(block_key(b"", [1]), [2]) != block_key(b"", [2])


def test_the_least_recently_used_block_is_evicted() -> None:
    pool = BlockPool(8)
    first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    for block in (*first, *second):
        pool.register(block, bytes([block]))
    pool.release(first[:1])
    pool.release(second[:1])
    pool.share(first[0])
    pool.release(first[:1])
    pool.release(first[1:])
    assert pool.unused == 2 and pool.find(bytes([second[0]])) is None
    assert [pool.find(bytes([block])) for block in first] == first


SECONDS = 0.03
"""Time of a stage for each token; that of the tiny model is small in comparison."""


def _seconds_of_slow_stages(settings: dict[str, Any]) -> tuple[float, int]:
    """Seconds to generate, and the number of tokens that each stage computed."""
    generator = generator_of(settings)
    (stage,) = generator.stages.values()
    tokens = tokens_of_steps(generator)
    stage.register_forward_pre_hook(lambda _, inputs: time.sleep(SECONDS * inputs[0].numel()))
    engine = Engine(generator)
    for first in range(8):
        engine.submit(Request(prompt=(first, 5), max_new_tokens=6))
    start = time.perf_counter()
    finish(engine)
    return time.perf_counter() - start, sum(tokens)


def test_stages_work_at_the_same_time() -> None:
    """Two stages that take the same time for a token need little more than the time of one of them."""
    for seconds, tokens in run_ranks(2, _seconds_of_slow_stages, MODERN | PP2):
        assert tokens == 8 * 7
        assert seconds < 1.7 * SECONDS * tokens, "one after the other they need more than twice its time"
