"""Answers of the trained model, sampled on the ranks that train it, in a layout of their own."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
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
from megatron_core.inference.text import TextStream
from megatron_core.models.build import build_stages
from megatron_core.parallel.configured import grid_of
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.texts import gather_from_all_ranks, listed
from megatron_core.post_training.answers import (
    Answer,
    RolloutRequest,
    UnfinishedAnswer,
    answer_of,
    request_fields,
    request_of,
)
from megatron_core.post_training.expert_recorder import ExpertRecorder
from megatron_core.post_training.shared_weights import SharedWeights
from megatron_core.post_training.trainer import Trainer
from megatron_core.post_training.weights import WeightTransfer


class RolloutSampler:
    """Samples with the weights of a ``Trainer``, of which it has a copy in its own layout.

    ``tensor_parallel`` x ``pipeline_parallel`` ranks sample together; the other ranks are replicas, which share the
    prompts. All ranks call the same methods. With ``layout_invariant`` in the trainer's configuration, the
    log-probabilities of answers have the bits of ``Trainer.log_probs``, whatever the two layouts are.

    ``sample`` and ``sample_requests`` sample to the end. ``submit`` and ``advance`` sample in parts, between which
    ``update_weights`` may be called: the answers continue with the new weights, and ``Answer.versions`` tells which
    weights have sampled each token. The cache of keys and values is kept between calls, so that the next turn of a
    conversation does not compute the earlier ones again; new weights or ``free_cache`` free it.

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
        if config.parallel.layout_invariant and config.optional("multi_latent_attention"):
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
            if config.optional("num_experts") is None:
                raise ConfigError("record_experts=True needs a model with experts (--num-experts)")
            self._recorder = ExpertRecorder(self._generator)
            # Positions that another text has computed would have no record.
            self._settings = replace(self._settings, inference_dynamic_batching_prefix_caching=False)
        self._max_batch_size = max_batch_size
        self.run = run
        self._engine: Engine | None = None
        self._unfinished: dict[int, UnfinishedAnswer | None] = {}
        """By number, equal on all ranks; None: another replica samples it."""
        self._prompt_lengths: dict[int, int] = {}
        self._next_number = 0
        self._calls = hashlib.sha256()
        shared = SharedWeights(self.parameters(), world.device)
        targets: Iterable[TensorBox] = (
            piece for model in stages.values() for piece in parameter_pieces(model.named_global_parameters())
        )
        self._transfer = WeightTransfer(run.data_parallel, targets, world.device, shared)
        self.version = -1
        self.update_weights()

    def update_weights(self) -> int:
        """Copy the trainer's present weights; returns the bytes that this rank has received from others.

        Unfinished answers continue with the new weights, which compute their keys and values again.
        """
        self.free_cache()
        self.version += 1
        self._iteration = self.run.state.iteration
        return self._transfer.run()

    def free_cache(self) -> None:
        """Return the memory of keys and values between two calls; they are computed again when they are needed."""
        if self._engine is not None:
            self._engine.free_cache()

    def parameters(self) -> list[nn.Parameter]:
        """The sampler's weights on this rank."""
        return [parameter for stage in self._generator.stages.values() for parameter in stage.parameters()]

    @property
    def engine(self) -> Engine:
        """The engine of this replica; the first use is a collective call."""
        if self._engine is None:
            observe = None if self._recorder is None else self._recorder.observe
            self._engine = Engine(
                self._generator, max_batch_size=self._max_batch_size, config=self._settings, observe=observe
            )
        return self._engine

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the submitted requests without an answer."""
        return list(self._unfinished)

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
        end_tokens = frozenset(ends)
        requests = [
            RolloutRequest(
                prompt=tuple(prompt),
                max_new_tokens=max_new_tokens,
                sampling=replace(sampling, seed=mix64(seed, number, copy) % 2**63),
                ends=end_tokens,
                group=number,
            )
            for number, prompt in enumerate(prompts)
            for copy in range(answers)
        ]
        sampled = self.sample_requests(requests)
        # A training step usually follows, which needs the memory.
        self.free_cache()
        return [sampled[start : start + answers] for start in range(0, len(sampled), answers)]

    def sample_requests(self, requests: Sequence[Request]) -> list[Answer]:
        """Sample an answer to each request to its end; equal on all ranks. Errors as of ``submit`` and ``advance``."""
        answers = self.sample_each(requests)
        _raise_errors(answers)
        return answers

    def sample_each(self, requests: Sequence[Request]) -> list[Answer]:
        """As ``sample_requests``, but an answer for which no token can be chosen has an ``error``."""
        numbers = self.submit(requests)
        answers = self._advance(numbers, None)
        return [answers[number] for number in numbers]

    def problem(self, request: Request) -> str:
        """Why a request cannot be sampled, with the fix; or "". Equal on all ranks."""
        if isinstance(request, RolloutRequest) and request.stop_strings:
            if "" in request.stop_strings:
                return "stop_strings contain an empty string; remove it"
            if self.run.tokenizer is None:
                return f"stop_strings={request.stop_strings} need a tokenizer; give --tokenizer-type, or use ends"
        try:
            self.engine.checked(request)
        except ConfigError as error:
            return str(error)
        return ""

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Add requests, ``RolloutRequest`` or ``Request``, for ``advance``; returns their numbers.

        An answer depends on its request alone, whatever the layout is and in how many parts it is sampled. Errors:
        ``ConfigError`` for a prompt that is empty or too long, and settings that are not legal; no request is added.
        """
        for position, request in enumerate(requests):
            problem = self.problem(request)
            if problem:
                raise ConfigError(f"request {position}: {problem}")
        numbers = []
        for request in requests:
            number = self._next_number
            self._next_number += 1
            numbers.append(number)
            # Without the order of a set, which may differ between processes.
            self._note((request.prompt, request.max_new_tokens, request.sampling, sorted(request.ends)))
            self._add(number, request)
        return numbers

    def _add(self, number: int, request: Request, tokens: Sequence[int] = ()) -> UnfinishedAnswer | None:
        """Add a request with the ``tokens`` that its answer has; None if another replica samples it."""
        group = request.group if isinstance(request, RolloutRequest) else None
        replica = (number if group is None else group) % self._groups.size("dp")
        self._prompt_lengths[number] = len(request.prompt)
        answer = self._start(request, tokens) if replica == self._groups.index("dp") else None
        self._unfinished[number] = answer
        return answer

    def _start(self, request: Request, tokens: Sequence[int]) -> UnfinishedAnswer:
        """Add a request to the engine of this replica."""
        text = None
        if isinstance(request, RolloutRequest) and request.stop_strings:
            assert self.run.tokenizer is not None, "checked by problem"
            text = TextStream(self.run.tokenizer, request.stop_strings, request.prompt)
        # Only ``advance`` computes, and only the requests of its call.
        scored = replace(request, logprobs=request.logprobs or 0)
        return UnfinishedAnswer(request, text, self.engine.submit(scored, paused=True, written=tokens))

    def advance(self, max_new_tokens: int | None = None, numbers: Sequence[int] | None = None) -> dict[int, Answer]:
        """Continue all unfinished answers, or ``numbers`` of them, by at most ``max_new_tokens`` tokens each; without
        this limit to their ends.

        Returns the answers that have finished, by number; equal on all ranks, and in all layouts: the limit counts the
        tokens of an answer and not steps, whose texts depend on the layout. Errors: ``ConfigError`` if no token can be
        chosen, or if the calls of the ranks differ.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: give 1 or more")
        answers = self._advance(self.unfinished if numbers is None else numbers, max_new_tokens)
        _raise_errors(answers.values())
        return answers

    def abort(self, numbers: Iterable[int]) -> dict[int, Answer]:
        """End unfinished answers with the tokens that they have; the others continue in the next ``advance``."""
        numbers = list(numbers)
        unknown = [number for number in numbers if number not in self._unfinished]
        if unknown:
            raise ConfigError(f"requests {listed(unknown)} are not unfinished; those are {listed(self.unfinished)}")
        self._note(("abort", numbers))
        for number in numbers:
            answer = self._unfinished[number]
            if answer is not None:
                self.engine.cancel(answer.engine_number)
                answer.finished = "aborted"
        return self._collect()

    def unfinished_state(self) -> dict[str, Any]:
        """The unfinished answers as JSON, equal on all ranks, such as for ``Trainer.stored``; a collective call.

        Errors: ``ConfigError`` if the trainer has taken a step since ``update_weights``.
        """
        if self.run.state.iteration != self._iteration:
            raise ConfigError(
                f"the sampler has the weights of iteration {self._iteration}, and the trainer those of "
                f"{self.run.state.iteration}, which a checkpoint would have; call update_weights() before"
            )
        reports = self._groups.index("tp") == 0 and self._groups.index("pp") == 0
        answers = [(number, answer) for number, answer in self._unfinished.items() if answer is not None and reports]
        rows = [[*answer.row(number), request_fields(answer.request)] for number, answer in answers]
        texts = gather_from_all_ranks(json.dumps(rows), self.run.world.device)
        answers_of_all = sorted((row for text in texts for row in json.loads(text)), key=itemgetter(0))
        return {"version": self.version, "next_number": self._next_number, "answers": answers_of_all}

    def restore_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue the answers of ``unfinished_state``, also in another layout; they keep their numbers.

        Call it on a new sampler, after the trainer has loaded the checkpoint.
        """
        if self._next_number:
            raise ConfigError(f"the sampler has had {self._next_number} requests; restore answers in a new one")
        self.version = state["version"]
        self._next_number = state["next_number"]
        self._note(("restore", state))
        for *row, fields in state["answers"]:
            restored = answer_of(row, None)
            answer = self._add(row[0], request_of(fields), restored.tokens)
            if answer is None:
                continue
            answer.tokens += restored.tokens
            answer.log_probs += restored.log_probs
            answer.versions += restored.versions
            answer.alternatives += restored.alternatives or [()] * len(restored.tokens)
            answer.prompt_scores = restored.prompt_scores
            if answer.text is not None:
                for token in restored.tokens:
                    answer.text.add(token)

    def _note(self, call: object) -> None:
        """Note a call, which all ranks must make."""
        self._calls.update(repr(call).encode())

    def _advance(self, numbers: Sequence[int], max_new_tokens: int | None) -> dict[int, Answer]:
        """Continue the answers ``numbers``; those that have finished, also with an error."""
        self._note(("advance", list(numbers), max_new_tokens))
        engine = self.engine
        answers = (self._unfinished[number] for number in numbers)
        by_engine = {answer.engine_number: answer for answer in answers if answer is not None}
        lengths = {number: len(answer.tokens) for number, answer in by_engine.items()}
        for number in by_engine:
            engine.resume(number)
        while engine.busy:
            for progress in engine.step():
                number = progress.number
                answer = by_engine[number]
                if answer.add(progress, self.version):
                    engine.cancel(number)
                elif answer.finished is None and len(answer.tokens) - lengths[number] == max_new_tokens:
                    engine.pause(number)
        return self._collect()

    def _collect(self) -> dict[int, Answer]:
        """The finished answers of all replicas, which are forgotten here; a collective call."""
        numbers = {number: answer for number, answer in self._unfinished.items() if answer is not None}
        # Ranks that sample together have the same answers: one of them reports.
        reports = self._groups.index("tp") == 0 and self._groups.index("pp") == 0
        rows = [answer.row(number) for number, answer in numbers.items() if reports and answer.finished is not None]
        report = {"rows": rows, "calls": self._calls.hexdigest()}
        by_rank = [json.loads(text) for text in gather_from_all_ranks(json.dumps(report), self.run.world.device)]
        if any(other["calls"] != report["calls"] for other in by_rank):
            raise ConfigError("the prompts or the seed differ between ranks; all ranks must pass the same ones")
        rows = sorted(row for other in by_rank for row in other["rows"])
        experts: Sequence[np.ndarray | None] = [None] * len(rows)
        if self._recorder is not None and rows:
            lengths = [self._prompt_lengths[number] + len(tokens) - 1 if tokens else 0 for number, tokens, *_ in rows]
            engine_numbers = {number: answer.engine_number for number, answer in numbers.items()}
            experts = self._recorder.gather(engine_numbers, [number for number, *_ in rows], lengths)
        for number, *_ in rows:
            del self._unfinished[number]
            del self._prompt_lengths[number]
        return {row[0]: answer_of(row, of_answer) for row, of_answer in zip(rows, experts, strict=True)}


def _raise_errors(answers: Iterable[Answer]) -> None:
    """``ConfigError`` if no token could be chosen for one of ``answers``."""
    for answer in answers:
        if answer.error:
            raise ConfigError(answer.error)
