"""Generation of texts on all ranks of a job, and the endpoint ``PUT /api`` of Megatron-LM's server."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import broadcast_from_rank


def run_mcore_engine(
    engine: StaticInferenceEngine,
    prompts: Sequence[str] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    logprobs: bool = True,
    tokens_to_generate: int = 0,
    top_n_logprobs: int = 0,
    random_seed: int = -1,
) -> dict[str, Any] | None:
    """Continue the ``prompts`` of rank 0 with its settings; all ranks call it, the others with ``engine`` alone.

    Returns ``text``, ``tokens`` and ``segments`` of prompts with their continuations, and with ``logprobs`` the log
    probabilities of all tokens but the first; None on ranks without ``prompts``. Errors: ``ConfigError``, a
    ``ValueError``, on all ranks for prompts that are too long.
    """
    settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "return_log_probs": logprobs,
        "num_tokens_to_generate": tokens_to_generate,
        "top_n_logprobs": top_n_logprobs,
    }
    text = json.dumps([list(prompts or ()), settings, random_seed])
    texts, given, seed = json.loads(broadcast_from_rank(0, text, engine.inference_wrapped_model.generator.device))
    if seed > 0:
        engine.controller.sampling_rng.manual_seed(seed)
    results = engine.generate(prompts=texts, sampling_params=SamplingParams(**given, return_segments=True))
    if failed := [number for number, each in enumerate(results) if each.status != Status.COMPLETED]:
        longest = engine.dynamic_engine.context.max_sequence_length
        raise ConfigError(
            f"prompts {failed} and their new tokens do not fit the {longest} positions; give shorter ones"
        )
    if prompts is None:
        return None
    answer: dict[str, Any] = {
        "text": [prompt + str(each.generated_text) for prompt, each in zip(prompts, results, strict=True)],
        "tokens": [[*each.prompt_tokens, *each.generated_tokens.tolist()] for each in results],
        "segments": [each.segments for each in results],
    }
    if logprobs:
        answer["logprobs"] = [each.prompt_log_probs + each.generated_log_probs for each in results]
    if top_n_logprobs:
        both = [(each.prompt_top_n_logprobs or [], each.generated_top_n_logprobs or []) for each in results]
        answer["top_n_logprobs"] = [prompt + generated for prompt, generated in both]
    return answer


GENERATE_NUM = 0
"""The number that tells the other ranks to call ``run_mcore_engine``."""
LOCK = threading.Lock()
MOST_PROMPTS, MOST_BYTES = 128, 2**20


def send_do_generate() -> None:
    """Tell the other ranks of the job to call ``run_mcore_engine``."""
    if dist.is_initialized():
        dist.broadcast(torch.tensor([GENERATE_NUM], dtype=torch.long), 0)


@dataclass(frozen=True)
class Field:
    """A setting of a request: its types, default, and legal values in words."""

    kinds: tuple[type, ...]
    default: Any
    words: str
    is_legal: Callable[[Any], bool] = lambda value: True


FIELDS = {
    "tokens_to_generate": Field((int,), 64, "an integer >= 0", lambda value: value >= 0),
    "logprobs": Field((bool,), False, "true or false"),
    "temperature": Field((int, float), 1.0, "a number above 0, at most 100", lambda value: 0.0 < value <= 100.0),
    "top_k": Field((int,), 0, "an integer from 0 to 1000", lambda value: 0 <= value <= 1000),
    "top_p": Field((int, float), 0.0, "a number from 0 to 1", lambda value: 0.0 <= value <= 1.0),
    "random_seed": Field((int,), -1, "an integer >= 0", lambda value: value >= 0),
    "add_BOS": Field((bool,), False, "false; add the token to the prompt", lambda value: not value),
}
REMOVED = {
    "max_len": "max_len is not supported; give tokens_to_generate",
    "sentences": "sentences is not supported; give prompts",
    "beam_width": "beam_width is not supported; remove it",
}


def settings_of(body: Any) -> dict[str, Any]:
    """Return the arguments of ``run_mcore_engine`` of a request. Errors: ``ConfigError``."""
    if not isinstance(body, dict) or "prompts" not in body:
        raise ConfigError("prompts argument required")
    if wrong := next((name for name in REMOVED if name in body), None):
        raise ConfigError(REMOVED[wrong])
    prompts = body["prompts"]
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("prompts is not a list of strings")
    if not 1 <= len(prompts) <= MOST_PROMPTS or "" in prompts:
        raise ConfigError(f"prompts must have 1 to {MOST_PROMPTS} texts, none of them empty")
    settings = {name: body.get(name, field.default) for name, field in FIELDS.items()}
    for name, field in FIELDS.items():
        value = settings[name]
        is_kind = isinstance(value, field.kinds) and (bool in field.kinds or not isinstance(value, bool))
        if name in body and not (is_kind and field.is_legal(value)):
            raise ConfigError(f"{name} must be {field.words}")
    if settings["top_k"] and settings["top_p"]:
        raise ConfigError("top_k and top_p exclude each other; give one of them")
    if not settings["tokens_to_generate"] and not settings["logprobs"]:
        raise ConfigError("tokens_to_generate=0 needs logprobs=true")
    del settings["add_BOS"]
    return {"prompts": prompts, **settings}


class MegatronServer:
    """Serves ``PUT /api`` on rank 0; the other ranks wait for ``send_do_generate`` and call ``run_mcore_engine``.

    ``megatron-serve`` has more: OpenAI's interface, streaming, a page, and requests that join a running batch.
    """

    def __init__(self, model: StaticInferenceEngine, args: Any = None) -> None:
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            needed = "pip install 'megatron-native[server]'"
            raise ConfigError(f"MegatronServer needs starlette and uvicorn: {needed}") from error
        self.engine, self.args = model, args
        self.app = Starlette(routes=[Route("/api", self._answer, methods=["PUT", "POST"])])

    async def _answer(self, request: Any) -> Any:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return JSONResponse(f"the request has more than {MOST_BYTES} bytes", status_code=413)
        try:
            settings = settings_of(json.loads(body))
            return JSONResponse(await run_in_threadpool(self._generate, settings))
        except ValueError as error:  # also a ConfigError
            return JSONResponse(str(error), status_code=400)

    def _generate(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        with LOCK:
            send_do_generate()
            return run_mcore_engine(self.engine, **settings)

    def run(self, url: str, port: int) -> None:
        """Serve on the address ``url``; ``127.0.0.1`` accepts only this machine."""
        import uvicorn

        uvicorn.run(self.app, host=url, port=port, log_level="warning")
