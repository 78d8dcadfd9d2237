"""Evaluate a trained model with EleutherAI's lm-eval in the processes of the model, in any layout.

pip install lm_eval; then, with checkpoints of --save or a folder of Hugging Face:

torchrun --nproc-per-node 2 examples/lm_eval_in_process.py --tensor-model-parallel-size 2 --load MODEL --tasks piqa
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from megatron_core.inference import Engine, Progress, Request, TextStream
from megatron_core.inference.generator import GenerationLayout, start_generator
from megatron_core.inference.settings import InferenceConfig
from megatron_core.parallel import World, run_job
from megatron_core.terminal import parse_flags
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.base import end_ids
from megatron_core.training.compatibility import open_model


class MegatronModel(TemplateLM):
    """lm-eval's interface over the engine for generation; every rank answers the same requests together."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.engine, self.tokenizer = engine, tokenizer
        self._rank, self._world_size = 0, 1  # lm-eval must not divide the requests

    @property
    def eot_token_id(self) -> int:
        """The token that precedes a text without context."""
        found = next((i for i in (self.tokenizer.eod, self.tokenizer.bos) if i is not None), None)
        assert found is not None, "the tokenizer has no token that ends or begins a document"
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.tokenize(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would write it."""
        asked, sizes = [], []
        for _, context, continuation in requests:
            ids = [*context, *continuation]
            if self.engine.max_length is not None:
                ids = ids[-self.engine.max_length :]
            sizes.append(min(len(continuation), len(ids) - 1))
            asked.append(Request(prompt=tuple(ids), max_new_tokens=0, logprobs=1, score_prompt=True))
        found = []
        for request, size, own in zip(asked, sizes, self._run(asked), strict=True):
            scores = own[0].prompt_scores[-size:]
            best = [score.alternatives[0][0] for score in scores]
            found.append((sum(score.logprob for score in scores), best == list(request.prompt[-size:])))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each no longer than the model's positions."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [score for score, _ in self._loglikelihood_tokens([("", [self.eot_token_id], ids) for ids in texts])]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first stop text."""
        asked, stops = [], []
        for request in requests:
            context, settings = request.args
            ids, count = self.tok_encode(context), int(settings.get("max_gen_toks", 256))
            if self.engine.max_length is not None:
                ids = ids[-max(self.engine.max_length - count, 1) :]
            stops.append(tuple(settings.get("until", ())))
            asked.append(Request(prompt=tuple(ids), max_new_tokens=count, ends=end_ids(self.tokenizer)))
        found = []
        for own, stop in zip(self._run(asked), stops, strict=True):
            stream = TextStream(self.tokenizer, stop)
            for progress in own:
                if progress.token is not None and progress.finished != "stop" and not stream.stopped:
                    stream.add(progress.token)
            stream.finish()
            found.append(stream.text)
        return found

    def _run(self, requests: Iterable[Request]) -> list[list[Progress]]:
        """The progress of each request."""
        found: dict[int, list[Progress]] = {self.engine.submit(request): [] for request in requests}
        while self.engine.busy:
            for progress in self.engine.step():
                found[progress.number].append(progress)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Settings(InferenceConfig, GenerationLayout):
    """Evaluate a trained model with lm-eval, in any layout."""

    load: str
    """Folder of checkpoints (--save of the training), of a single checkpoint, or of a Hugging Face model."""
    tasks: tuple[str, ...]
    """Names of tasks."""
    include_path: str | None = None
    """Folder with further tasks."""
    limit: int | None = None
    """Number of questions of each task; default: all."""


def evaluate(settings: Settings, world: World) -> dict[str, Any]:
    """The results of lm-eval, equal on all ranks."""
    reader, trained = open_model(settings.load, None)
    generator, tokenizer = start_generator(reader, trained, settings, world)
    found = lm_eval.simple_evaluate(
        MegatronModel(Engine(generator, config=settings), tokenizer),
        tasks=list(settings.tasks),
        task_manager=TaskManager(include_path=settings.include_path),
        limit=settings.limit,
    )
    return dict(found or {})


if __name__ == "__main__":
    own = parse_flags(Settings, args=sys.argv[1:], description=__doc__)

    def job(world: World) -> None:
        """Evaluate, and print the table on one rank."""
        results = evaluate(own, world)
        if world.rank == 0:
            print(make_table(results))

    run_job(job)
