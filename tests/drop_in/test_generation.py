"""Generation with Megatron Core's engines, compared with the model's own logits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import torch
import uvicorn

from megatron.core.inference.apis import MegatronAsyncLLM, MegatronLLM
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext, StaticInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine, StaticInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceRequest,
    Status,
    compute_block_hashes_batched,
    unwrap_serialized_tensors,
)
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.text_generation_server import MegatronServer
from megatron.core.inference.text_generation_server.run_mcore_engine import run_mcore_engine
from megatron.core.inference.text_generation_server.text_generation_server import settings_of
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

VOCABULARY, LENGTH = 64, 32
PROMPTS = ["the quick", "a", "over the lazy dog"]


class Characters:
    """A tokenizer: characters a to z, space, and others as one token; 62 begins and 63 ends a text."""

    bos, eod, vocab_size = 62, 63, VOCABULARY

    def tokenize(self, text: str) -> list[int]:
        return [ord(each) - 96 if each.isalpha() else 0 for each in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(96 + each) if 0 < each < 27 else f"<{each}>" if each else " " for each in tokens)


def gpt(**settings: Any) -> GPTModel:
    model_parallel_cuda_manual_seed(11)
    shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.float64}
    given = {"init_method_std": 0.3, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    config = TransformerConfig(**shape | given | settings)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, first, last, position_embedding_type="rope"
    )
    return model.eval()


def static(model: GPTModel, batch: int = 2, **given: Any) -> StaticInferenceEngine:
    wrapper = GPTInferenceWrapper(model, StaticInferenceContext(batch, LENGTH))
    return StaticInferenceEngine(TextGenerationController(wrapper, Characters()), buffer_size_gb=0.1, **given)


def dynamic(model: GPTModel, **given: Any) -> DynamicInferenceEngine:
    settings: dict[str, Any] = {"block_size_tokens": 4, "buffer_size_gb": 0.1, "max_sequence_length": LENGTH}
    context = DynamicInferenceContext(model.config, InferenceConfig(**settings | given))
    return DynamicInferenceEngine(TextGenerationController(GPTInferenceWrapper(model, context), Characters()), context)


def greedy(model: GPTModel, prompt: str, count: int) -> tuple[list[int], list[float], list[float]]:
    """Most likely tokens by whole forwards, with the log probabilities of the prompt's and of the new tokens."""
    tokens = Characters().tokenize(prompt)
    length = len(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        scores = model(torch.tensor([tokens]))[0].log_softmax(-1)
    own = [float(scores[index, token]) for index, token in enumerate(tokens[1:])]
    return tokens[length:], own[: length - 1], own[length - 1 :]


GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=6, return_log_probs=True, termination_id=-1)


def test_static_and_dynamic_engines_choose_the_most_likely_tokens() -> None:
    model = gpt()
    records = dynamic(model, materialize_only_last_token_logits=False).generate(PROMPTS, GREEDY)
    for prompt, one, record in zip(
        PROMPTS, static(model).generate(PROMPTS, sampling_params=GREEDY), records, strict=True
    ):
        tokens, of_prompt, own = greedy(model, prompt, 6)
        other = record.merge()
        assert one.status == other.status == Status.COMPLETED
        assert one.generated_tokens.tolist() == other.generated_tokens == tokens
        assert one.generated_text == other.generated_text == Characters().detokenize(tokens)
        for found in (one, other):
            assert found.prompt_log_probs == pytest.approx(of_prompt, abs=1e-9)
            assert found.generated_log_probs == pytest.approx(own, abs=1e-9)
        assert other.ttft is not None
        assert len(other.tpot) == 6


def _generated(sizes: dict[str, int]) -> list[list[int]]:
    parallel_state.initialize_model_parallel(**sizes)
    model = gpt(pipeline_dtype=torch.float64, **sizes)
    return [each.generated_tokens.tolist() for each in static(model).generate(PROMPTS, sampling_params=GREEDY)]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks_generate_the_same(axis: str) -> None:
    expected = [greedy(gpt(), prompt, 6)[0] for prompt in PROMPTS]
    assert run_ranks(2, _generated, {f"{axis}_model_parallel_size": 2}) == [expected, expected]


def test_one_forward_step_continues_the_batch() -> None:
    model = gpt()
    wrapper = GPTInferenceWrapper(model, StaticInferenceContext(2, LENGTH))
    wrapper.prep_model_for_inference()
    tokens = (torch.arange(20).view(2, 10) * 7) % VOCABULARY
    inputs = wrapper.prep_inference_input(tokens)
    with torch.no_grad():
        expected = model(tokens)
    for first, end in ((0, 6), (6, 7), (7, 10)):
        found = wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(inputs, first, end))
        assert found is not None
        torch.testing.assert_close(found, expected[:, end - 1 : end], rtol=0, atol=1e-9)


def test_a_request_joins_the_running_batch_and_stop_words_end_it() -> None:
    model, engine = gpt(), dynamic(gpt())
    tokens = greedy(model, PROMPTS[0], 6)[0]
    word = Characters().detokenize(tokens[2:4])
    settings = SamplingParams(top_k=1, num_tokens_to_generate=6, termination_id=-1)
    first = engine.add_request(7, PROMPTS[0], settings)
    assert engine.step_modern()["active_request_ids"] == [7]
    assert engine.get_request(7).generated_tokens == tokens[:1]
    is_text = all(0 < token < 27 for token in tokens[2:4])
    stops = [word] if is_text else None
    second = engine.add_request(8, Characters().tokenize(PROMPTS[0]), settings.replaced(stop_words=stops))
    engine.get_request(8).stop_word_ids = [tokens[2:4]]
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert first.result().merge().generated_tokens == tokens
    at = next(at for at in range(2, 7) if tokens[at - 2 : at] == tokens[2:4])
    assert second.result().merge().generated_tokens == tokens[: at - 2]


def test_a_request_that_does_not_fit_fails_alone() -> None:
    records = dynamic(gpt()).generate(["a" * LENGTH + "b", "a"], SamplingParams(top_k=1, num_tokens_to_generate=2))
    assert [record.merge().status for record in records] == [Status.FAILED, Status.COMPLETED]
    kinds = [event.type for event in records[0].merge().events]
    assert DynamicInferenceEventType.ERROR_NONTRANSIENT in kinds


def test_sampling_repeats_with_its_seed() -> None:
    model, settings = gpt(), SamplingParams(temperature=1.5, num_tokens_to_generate=12)
    texts = [static(model, random_seed=seed).generate(PROMPTS, sampling_params=settings) for seed in (3, 3, 4)]
    found = [[each.generated_tokens.tolist() for each in text] for text in texts]
    assert found[0] == found[1] != found[2]


def test_streams_have_every_token() -> None:
    async def stream() -> tuple[list[int], Any]:
        engine = static(gpt())
        number = engine.add_request("ab", sampling_params=GREEDY, streaming=True)
        states = engine.get_stream_generator(number)
        assert states is not None
        run = asyncio.create_task(engine.run_engine_async())
        lengths = [state.generated_length async for state in states]
        await run
        return lengths, engine.scheduler.completed_request_pool[number]

    lengths, completed = asyncio.run(stream())
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert completed.generated_tokens.tolist() == greedy(gpt(), "ab", 6)[0]


def test_one_object_generates_for_text_and_tokens() -> None:
    model, settings = gpt(), InferenceConfig(block_size_tokens=4, buffer_size_gb=0.1, max_sequence_length=LENGTH)
    with MegatronLLM(model=model, tokenizer=Characters(), inference_config=settings) as generator:
        texts = generator.generate(PROMPTS, GREEDY.replaced(skip_prompt_log_probs=True))
        tokens = generator.generate(Characters().tokenize(PROMPTS[0]), GREEDY.replaced(skip_prompt_log_probs=True))
    assert [each.generated_tokens for each in texts] == [greedy(model, prompt, 6)[0] for prompt in PROMPTS]
    assert tokens[0].generated_tokens == texts[0].generated_tokens

    async def one() -> Any:
        async with MegatronAsyncLLM(model=model, tokenizer=Characters(), inference_config=settings) as generator:
            return await generator.generate("a", SamplingParams(top_k=1, num_tokens_to_generate=3, termination_id=-1))

    assert asyncio.run(one()).generated_tokens == greedy(model, "a", 3)[0]


def test_the_server_answers_with_prompts_and_log_probabilities() -> None:
    model = gpt()
    settings = settings_of({"prompts": PROMPTS[:2], "tokens_to_generate": 3, "logprobs": True, "top_k": 1})
    answer = run_mcore_engine(static(model), **settings)
    assert answer is not None
    for prompt, tokens, scores in zip(PROMPTS, answer["tokens"], answer["logprobs"], strict=False):
        new, of_prompt, own = greedy(model, prompt, 3)
        assert tokens == Characters().tokenize(prompt) + new
        assert scores == pytest.approx(of_prompt + own, abs=1e-9)


@pytest.fixture
def port() -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(MegatronServer(static(gpt())).app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(timeout=20)


def put(port: int, body: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("PUT", "/api", body, {"Content-Type": "application/json"})
    found = connection.getresponse()
    status, text = found.status, found.read()
    connection.close()
    return status, json.loads(text)


def test_the_server_answers_after_requests_that_it_refuses(port: int) -> None:
    good = json.dumps({"prompts": PROMPTS, "tokens_to_generate": 3, "top_k": 1})
    too_long = json.dumps({"prompts": ["a", "b" * LENGTH + "c"], "tokens_to_generate": 3})
    expected = [prompt + Characters().detokenize(greedy(gpt(), prompt, 3)[0]) for prompt in PROMPTS]
    status, found = put(port, good)
    assert (status, found["text"]) == (200, expected)
    for body, words in (
        (too_long, "prompts [1] and their new tokens do not fit the 32"),
        ("{", "Expecting"),
        ("{}", "prompts"),
    ):
        status, found = put(port, body)
        assert status == 400
        assert words in found
    status, found = put(port, good)
    assert (status, found["text"]) == (200, expected)


def test_static_engine_reports_a_request_that_does_not_fit() -> None:
    engine = static(gpt())
    with pytest.warns(UserWarning, match="failed: request 0: A prompt with"):
        long, short = engine.generate(["a" * LENGTH + "b", "ab"], sampling_params=GREEDY)
    assert (long.status, long.generated_length) == (Status.FAILED, 0)
    assert short.generated_tokens.tolist() == greedy(gpt(), "ab", 6)[0]
    assert not engine.scheduler.have_requests_pending()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompts argument required"),
        ({"prompts": "text"}, "list of strings"),
        ({"prompts": []}, "1 to 128 texts"),
        ({"prompts": ["a"], "beam_width": 2}, "beam_width"),
        ({"prompts": ["a"], "top_k": 3, "top_p": 0.5}, "exclude each other"),
        ({"prompts": ["a"], "temperature": True}, "temperature must be a number"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "logprobs=true"),
    ],
)
def test_wrong_requests_are_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(body)


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="TransformerBlock cannot generate"):
        _ = GPTInferenceWrapper(gpt().decoder, StaticInferenceContext(1, 8)).gpt
    with pytest.raises(ConfigError, match="num_speculative_tokens=2 is not supported"):
        dynamic(gpt(), num_speculative_tokens=2)


def test_requests_survive_serialization() -> None:
    request = DynamicInferenceRequest(
        request_id=3, prompt_tokens=torch.arange(5), sampling_params=SamplingParams(return_prompt_tokens=True)
    )
    request.status = Status.COMPLETED
    request.add_event_generated_token(4, blocks_total=2)
    request.add_event_error_transient(ValueError("wrong"))
    plain = request.serialize()
    assert unwrap_serialized_tensors(plain)["prompt_tokens"] == [0, 1, 2, 3, 4]
    plain["prompt_tokens"] = list(plain["prompt_tokens"])  # as from JSON
    again = DynamicInferenceRequest.deserialize(plain)
    assert again.prompt_tokens is not None
    assert torch.equal(again.prompt_tokens, torch.arange(5))
    assert (again.status, again.sampling_params) == (request.status, request.sampling_params)
    assert [event.type for event in again.events] == [event.type for event in request.events]
    assert "ValueError: wrong" in str(again.events[1].payload)
    with pytest.raises(AssertionError, match="has no payload"):
        DynamicInferenceEvent(type=DynamicInferenceEventType.PAUSE, payload=1)


def test_a_record_merges_the_parts_of_an_interrupted_request() -> None:
    first = DynamicInferenceRequest(
        request_id=1, prompt_tokens=torch.tensor([5, 6]), sampling_params=SamplingParams(num_tokens_to_generate=5)
    )
    record = DynamicInferenceRequestRecord.from_request(first)
    first.generated_tokens, first.generated_text = [7, 8], "gh"
    record.checkpoint()
    rest = record[-1]
    assert rest.prompt_tokens is not None
    assert rest.sampling_params is not None
    assert rest.prompt_tokens.tolist() == [5, 6, 7, 8]
    assert rest.sampling_params.num_tokens_to_generate == 3
    rest.generated_tokens, rest.generated_text, rest.status = [9], "i", Status.COMPLETED
    merged = record.merge()
    assert (merged.generated_tokens, merged.generated_text, merged.generated_length) == ([7, 8, 9], "ghi", 3)
    assert merged.succeeded()


def test_hashes_of_blocks_depend_on_all_earlier_tokens() -> None:
    tokens = torch.arange(10)
    hashes = compute_block_hashes_batched(tokens, 4)
    assert len(hashes) == 2
    changed = tokens.clone()
    changed[0] = 9
    assert set(hashes).isdisjoint(compute_block_hashes_batched(changed, 4))
    assert compute_block_hashes_batched(tokens[:7], 4) == hashes[:1]
    assert all(0 < each < 2**63 for each in hashes)


def test_old_requests_are_read() -> None:
    with pytest.warns(UserWarning, match="give sampling_params"):
        request = InferenceRequest(request_id=1, prompt="a", inference_parameters=SamplingParams(top_k=1))
    assert request.sampling_params == SamplingParams(top_k=1)
