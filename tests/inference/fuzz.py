"""Random requests to an engine with a small cache: every text must be that of the request alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from megatron_core.inference import Engine, Generator, Progress, Request, Sampling, generate
from megatron_core.inference.scheduler import UNUSED_SHARE
from megatron_core.inference.settings import InferenceConfig
from megatron_core.models.build import build_stages
from tests.runs import tiny_run

MODERN: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 64,
}
VOCABULARY, BOUND = 61, 1e-10


def generator_of(settings: dict[str, Any]) -> Generator:
    """A random model of four layers in float64."""
    run = tiny_run(fp64=True, num_layers=4, init_method_std=0.3, **settings)
    stages = run.stages
    if run.split.cp_size > 1:  # as ``Generator.load``
        stages = build_stages(run.config, run.groups, run.vocab_size, run.world.device, context_parallel=False)[1]
    for stage in stages.values():
        stage.eval()
    return Generator(run.config, run.groups, stages, len(run.layers), run.vocab_size, run.world.device)


@dataclass
class Draw:
    """Requests, their arrivals and cancellations, and an engine."""

    requests: list[Request]
    arrivals: list[int]
    """The step before which each request is submitted."""
    cancelled: dict[int, int]
    """Request -> the step before which it is cancelled."""
    max_batch_size: int
    config: InferenceConfig

    @classmethod
    def of(cls, seed: int, bytes_per_position: int) -> Draw:
        """Prompts continue one of three texts; the cache has room for the longest text and a few blocks more."""
        random = Random(seed)
        stems = [[random.randrange(VOCABULARY) for _ in range(24)] for _ in range(3)]
        requests: list[Request] = []
        for number in range(random.randint(4, 9)):
            stem = random.choice(stems)
            own = [random.randrange(VOCABULARY) for _ in range(random.randint(0, 5))]
            prompt = (*stem[: random.randint(0, len(stem))], *own) or (7,)
            if requests and random.random() < 0.2:
                prompt = requests[-1].prompt
            sampling = Sampling(temperature=0.9, seed=number) if random.random() < 0.3 else Sampling()
            logprobs = random.choice([None, 0, 2])
            scored = logprobs is not None and random.random() < 0.4
            new = random.randint(0 if scored else 1, 14)
            requests.append(Request(prompt=prompt, max_new_tokens=new, sampling=sampling, logprobs=logprobs,
                                    score_prompt=scored))  # fmt: skip
        size = random.choice([1, 2, 3, 4, 8])
        longest = max(len(each.prompt) + max(each.max_new_tokens - 1, 0) for each in requests)
        blocks = -(-longest // size) + random.randint(0, 12)
        config = InferenceConfig(
            inference_dynamic_batching_block_size=size,
            inference_dynamic_batching_buffer_size_gb=(blocks + 0.5) * size * bytes_per_position / 1e9,
            inference_dynamic_batching_max_tokens=random.choice([1, 4, 9, 30, 500]),
            inference_dynamic_batching_prefix_caching=random.random() < 0.85,
            enable_chunked_prefill=random.random() < 0.8,
        )
        arrivals = sorted(random.choice([0, 0, random.randint(1, 12)]) for _ in requests)
        cancelled = {n: at + random.randint(0, 8) for n, at in enumerate(arrivals) if random.random() < 0.2}
        return cls(requests, arrivals, cancelled, random.randint(1, 6), config)

    def with_memory(self, share: float) -> Draw:
        """The same on a rank with this share of the bytes of each position."""
        given = self.config.inference_dynamic_batching_buffer_size_gb
        assert given is not None
        return replace(self, config=replace(self.config, inference_dynamic_batching_buffer_size_gb=given * share))


@dataclass
class Outcome:
    """Results of a draw."""

    progress: list[list[Progress]]
    ended: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def run(draw: Draw, generator: Generator) -> Outcome:
    """Generate, and check after every step that the cache's blocks are those of the texts."""
    engine = Engine(generator, max_batch_size=draw.max_batch_size, config=draw.config)
    found = Outcome([[] for _ in draw.requests])
    step = 0
    while engine.busy or step <= max(draw.arrivals):
        for number, request in enumerate(draw.requests):
            if draw.arrivals[number] == step:
                assert engine.submit(request) == number
            if draw.cancelled.get(number) == step:
                engine.cancel(number)
        for progress in engine.step():
            if draw.cancelled.get(progress.number, step + 1) <= step:
                found.faults.append(f"request {progress.number} has progress after it was cancelled")
            found.progress[progress.number].append(progress)
        found.faults += inconsistencies(engine)
        found.counts["in flight"] += sum(flight is not None for flight in engine._flights)
        step += 1
        if step > 400 or found.faults:
            return Outcome(found.progress, counts=found.counts, faults=found.faults or ["no end after 400 steps"])
    pool = engine.scheduler.pool
    found.counts.update(preempted=engine.scheduler.preempted, reused=engine.scheduler.reused, unused=pool.unused)
    if pool.available != pool.capacity or engine.cache.blocks > max(2 * pool.held, 1):
        found.faults.append(f"{pool.held} blocks are held at the end, with memory for {engine.cache.blocks}")
    return found


def inconsistencies(engine: Engine) -> list[str]:
    """Blocks whose number of texts, content or memory is wrong."""
    pool, faults = engine.scheduler.pool, []
    texts = [text for group in engine.scheduler.groups for text in group]
    uses = Counter(block for text in texts for block in text.table)
    if uses != pool._references:
        faults.append(f"references {pool._references}, but texts use {dict(uses)}")
    written = [text.table[text.computed // engine.cache.block_size :] for text in texts]
    if any(uses[block] > 1 for table in written for block in table):
        faults.append("a text writes to a block of another one")
    if pool.unused > pool.capacity // UNUSED_SHARE:
        faults.append(f"{pool.unused} of {pool.capacity} blocks are kept without a text")
    if uses and max(uses) >= engine.cache.blocks:
        faults.append("a text uses a block without memory")
    return faults


def differences(draw: Draw, found: Outcome, whole: Generator) -> list[str]:
    """Differences from the requests alone: ``whole`` is the same model on one rank."""
    faults = list(found.faults)
    for number, (request, progress) in enumerate(zip(draw.requests, found.progress, strict=True)):
        tokens = [each.token for each in progress if each.token is not None]
        if number not in draw.cancelled and (not progress or progress[-1].finished != "length"):
            faults.append(f"request {number} does not end")
        if number not in draw.cancelled and len(tokens) != request.max_new_tokens:
            faults.append(f"request {number} has {len(tokens)} new tokens")
        if not progress:
            continue
        if request.sampling.temperature:
            alone = list(generate(whole, request))[: len(tokens)]
        else:
            with torch.no_grad():
                logits = whole.stages[0](torch.tensor([[*request.prompt, *tokens]]))[0]
            alone = logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
        if alone != tokens:
            faults.append(f"request {number}: {tokens} instead of {alone}")
        elif request.logprobs is not None:
            faults += _wrong_scores(number, request, progress, tokens, whole)
    return faults


def _wrong_scores(
    number: int, request: Request, progress: list[Progress], tokens: list[int], whole: Generator
) -> list[str]:
    text = [*request.prompt, *tokens]
    with torch.no_grad():
        expected = whole.stages[0](torch.tensor([text]))[0].log_softmax(-1)
    first = 1 if request.score_prompt else len(request.prompt)
    scores = [*progress[0].prompt_scores, *(each.score for each in progress if each.score is not None)]
    if len(scores) != len(text) - first:
        return [f"request {number} has {len(scores)} scores for {len(text) - first} tokens"]
    worst = max((abs(score.logprob - expected[at - 1, text[at]].item()) for at, score in enumerate(scores, first)),
                default=0.0)  # fmt: skip
    return [f"request {number}: a log probability differs by {worst:.2e}"] if worst > BOUND else []


def outcomes(seeds: range, settings: dict[str, Any], bytes_per_position: int) -> list[Outcome]:
    """Run draws on this rank of a layout, with a cache as large as that of one rank with ``bytes_per_position``."""
    generator = generator_of(settings)
    share = generator.bytes_per_position / bytes_per_position
    return [run(Draw.of(seed, bytes_per_position).with_memory(share), generator) for seed in seeds]
