"""Generation of texts on all ranks of a job."""

import json
from collections.abc import Sequence
from typing import Any

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
