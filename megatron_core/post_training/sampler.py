"""Answers of the trained model, sampled on the ranks that train it, in a layout of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_core.checkpoint import TensorBox, parameter_pieces
from megatron_core.config.rules_parallel import parallel_problems
from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook, used_features
from megatron_core.features.equal_bits.kernels import check_same_kernels
from megatron_core.features.equal_bits.rules import invariance_problems
from megatron_core.inference.engine import Engine
from megatron_core.inference.generator import GenerationLayout, Generator
from megatron_core.inference.requests import Request
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.settings import InferenceConfig
from megatron_core.models.build import build_stages
from megatron_core.parallel.configured import grid_of
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training.expert_recorder import ExpertRecorder
from megatron_core.post_training.trainer import Trainer
from megatron_core.post_training.weights import WeightTransfer


@dataclass(frozen=True)
class Answer:
    """A sampled continuation of a prompt."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability of each token at temperature 1, when it was sampled."""
    finished: str
    """``stop``: the last token is one of ``ends``; ``length``: the answer has ``max_new_tokens``."""
    version: int
    """Number of updates of the sampler's weights before it."""
    experts: np.ndarray | None = None
    """``[n, layers, k]``, the experts of all tokens but the last one in each layer with experts, if they are recorded:
    bytes, or 16-bit numbers for more than 256 experts."""


Key = tuple[int, int]
"""Number of a prompt, and of an answer to it."""


@dataclass(frozen=True)
class _Sampled:
    """The answers of one replica."""

    rows: list[Any]
    """For each answer: its key, tokens, log-probabilities, and why it ends; JSON."""
    fault: str
    """Why no token could be chosen; or "". Other replicas must learn of it, because they wait for the answers."""
    numbers: Mapping[Key, int]
    """The numbers of the requests in the engine."""


class RolloutSampler:
    """Samples with the weights of a ``Trainer``, of which it has a copy in its own layout.

    ``tensor_parallel`` x ``pipeline_parallel`` ranks sample together; the other ranks are replicas, which share the
    prompts. All ranks call the same methods. With ``layout_invariant`` in the trainer's configuration, the
    log-probabilities of answers have the bits of ``Trainer.log_probs``, whatever the two layouts are.

    Errors: ``ConfigError`` for a layout that is not legal.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        max_batch_size: int = 32,
        settings: InferenceConfig | None = None,
        record_experts: bool = False,
    ) -> None:
        """``record_experts``: answers have the experts of their tokens, which ``Trajectory`` replays in training."""
        run = trainer.run
        world = run.world
        layout = GenerationLayout(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            layout_invariant=run.config.parallel.layout_invariant,
        )
        config = layout.applied(run.config)
        faults = [*parallel_problems(config, world.size), *invariance_problems(config, world.size)]
        if config.parallel.layout_invariant and config.model.multi_latent_attention:
            faults.append("layout_invariant=True cannot be used to sample with multi_latent_attention=True: cached "
                          "latents are attended to in another order than in training")  # fmt: skip
        if config.optional("fp8_format") is not None:
            faults.append("fp8_format cannot be used to sample: scales would depend on the positions of a forward")
        if faults:
            raise ConfigError("\n".join(faults))
        if config.parallel.layout_invariant:
            check_same_kernels(config, world.device)
        # Groups of their own: the current groups stay those of the trainer.
        self._groups = ParallelGroups(grid_of(config.parallel, world.size, world.rank), world.rank, ends=(0, -1))
        layers, stages = build_stages(
            config, self._groups, run.vocab_size, world.device, initialise=False, context_parallel=False
        )
        for hook in (feature.convert_layers for feature in used_features(config) if feature.convert_layers is not None):
            for model in stages.values():
                load_hook(hook)(config, model.decoder, world.device)
        for model in stages.values():
            model.requires_grad_(False).eval()
        self._generator = Generator(config, self._groups, stages, len(layers), run.vocab_size, world.device)
        self._recorder = None
        self._settings = settings or InferenceConfig()
        if record_experts:
            if config.model.num_experts is None:
                raise ConfigError("record_experts=True needs a model with experts (--num-experts)")
            self._recorder = ExpertRecorder(self._generator)
            # Positions that another text has computed would have no record.
            self._settings = replace(self._settings, inference_dynamic_batching_prefix_caching=False)
        self._max_batch_size = max_batch_size
        self._device = world.device
        targets: Iterable[TensorBox] = (
            piece for model in stages.values() for piece in parameter_pieces(model.named_global_parameters())
        )
        self._transfer = WeightTransfer(run.data_parallel, targets, world.device)
        self.version = -1
        self.update_weights()

    def update_weights(self) -> int:
        """Copy the trainer's present weights; returns the bytes that this rank has received from others."""
        self.version += 1
        return self._transfer.run()

    def parameters(self) -> list[nn.Parameter]:
        """The sampler's weights on this rank."""
        return [parameter for stage in self._generator.stages.values() for parameter in stage.parameters()]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        answers: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ends: Iterable[int] = (),
        seed: int = 0,
    ) -> list[list[Answer]]:
        """Sample ``answers`` answers to each prompt; equal on all ranks, by prompt.

        An answer depends on ``seed``, the number of its prompt and its own number. ``ends``: tokens that end an answer.
        Errors: ``ConfigError`` for prompts that are empty or too long, and if no token can be chosen.
        """
        if max_new_tokens < 1 or answers < 1 or not prompts:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens}, answers={answers} and {len(prompts)} prompts: give at least one each"
            )
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        keys = [(prompt, answer) for prompt in range(len(prompts)) for answer in range(answers)]
        requests = {
            key: Request(
                prompt=tuple(prompts[key[0]]),
                max_new_tokens=max_new_tokens,
                sampling=replace(sampling, seed=mix64(seed, *key) % 2**63),
                ends=frozenset(ends),
                logprobs=0,
            )
            for key in keys
        }
        sampled = self._sample_own(requests)
        # Ranks that sample together have the same answers: one of them reports.
        reports = self._groups.index("tp") == 0 and self._groups.index("pp") == 0
        mine = sampled.rows if reports else []
        asked = json.dumps([*map(list, prompts), seed])
        report = {
            "rows": mine,
            "fault": sampled.fault,
            "asked": hashlib.sha256(asked.encode()).hexdigest(),
        }
        by_rank = [json.loads(text) for text in gather_from_all_ranks(json.dumps(report), self._device)]
        for text in by_rank:
            if text["fault"]:
                raise ConfigError(text["fault"])
            if text["asked"] != report["asked"]:
                raise ConfigError("the prompts or the seed differ between ranks; all ranks must pass the same ones")
        rows = sorted(row for text in by_rank for row in text["rows"])
        experts = None
        if self._recorder is not None:
            lengths = [len(prompts[prompt]) + len(tokens) - 1 for prompt, _, tokens, *_ in rows]
            experts = self._recorder.gather(sampled.numbers, keys, lengths)
        by_prompt: list[list[Answer]] = [[] for _ in prompts]
        for row, (prompt, _, tokens, log_probs, reason) in enumerate(rows):
            of_answer = None if experts is None else experts[row]
            by_prompt[prompt].append(Answer(tuple(tokens), tuple(log_probs), reason, self.version, of_answer))
        return by_prompt

    def _sample_own(self, requests: Mapping[Key, Request]) -> _Sampled:
        """Sample the answers of this replica, which has every R-th prompt of R replicas."""
        observe = None if self._recorder is None else self._recorder.observe
        # A new engine for each call: the cache of an earlier one has keys and values of earlier weights.
        engine = Engine(self._generator, max_batch_size=self._max_batch_size, config=self._settings, observe=observe)
        # On all ranks, so that they refuse a wrong prompt together.
        checked = {key: engine.checked(request) for key, request in requests.items()}
        replicas = self._groups.size("dp")
        mine = [key for key in checked if key[0] % replicas == self._groups.index("dp")]
        numbers = {key: engine.submit(checked[key]) for key in mine}
        keys = {number: key for key, number in numbers.items()}
        tokens: dict[Key, list[int]] = {key: [] for key in mine}
        log_probs: dict[Key, list[float]] = {key: [] for key in mine}
        finished: dict[Key, str] = {}
        fault = ""
        while engine.busy and not fault:
            for progress in engine.step():
                key = keys[progress.number]
                fault = fault or progress.error or ""
                if progress.token is not None and progress.score is not None:
                    tokens[key].append(progress.token)
                    log_probs[key].append(progress.score.logprob)
                if progress.finished is not None:
                    finished[key] = progress.finished
        rows = [] if fault else [[*key, tokens[key], log_probs[key], finished[key]] for key in mine]
        return _Sampled(rows, fault, numbers)


def largest_difference(answers: Sequence[Answer], log_probs: Sequence[torch.Tensor]) -> float:
    """The largest difference between log-probabilities of the sampler and of the trainer, over the tokens of all
    answers; 0.0 if they have the same bits."""
    differences = [
        (torch.tensor(answer.log_probs, dtype=torch.float64) - trained.double().cpu()).abs().max()
        for answer, trained in zip(answers, log_probs, strict=True)
    ]
    return float(torch.stack(differences).max())
