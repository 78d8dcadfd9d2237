"""The client of PyPI against the server: sampling, several trainings, errors, and requests that arrive twice."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.post_training.tinker.processes import NAME, save_model, server_of

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
PROMPT = [40, 41, 42]
LONGEST = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    save_model(folder / "model")
    settings: dict[str, Any] = {"lora_rank": 4, "save": folder / "weights", "most_copies": 3, "seq_length": 24}
    with server_of(folder / "model", **settings) as address:
        yield address


@pytest.fixture
def service(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient(base_url=url, api_key="tml-none")
    yield client
    client.close("success").result(timeout=30)


def datum(tokens: list[int], **inputs: list[float]) -> Any:
    """Tokens whose targets are the next ones."""
    values = {"target_tokens": tokens[1:], **inputs}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=values)


def scores(client: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens after the first, by a training client."""
    output = client.forward([datum(tokens)], "cross_entropy").result(timeout=60)
    return output.loss_fn_outputs[0]["logprobs"].tolist()


def learn(client: Any, tokens: list[int], learning_rate: float = 0.02) -> Any:
    """A step on a text."""
    output = client.forward_backward([datum(tokens)], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=learning_rate, **ADAM)).result(timeout=60)
    return output.result(timeout=60)


def sample(client: Any, count: int = 1, **params: Any) -> Any:
    """Samples of the prompt."""
    request = tinker.SamplingParams(max_tokens=LONGEST, **params)
    return client.sample(tinker.ModelInput.from_ints(PROMPT), count, request).result(timeout=60)


def test_the_server_names_its_model(service: Any, url: str) -> None:
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (NAME, 24, True)
    info = service.create_lora_training_client(NAME, rank=3).result(timeout=60).get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 3, NAME)


def test_supervised_learning_remembers_a_text(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=4, seed=1).result(timeout=60)
    text = [*PROMPT, 50, 60, 70, 80]
    losses = [learn(client, text).metrics["loss:sum"] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result(timeout=60)
    assert sample(sampler, temperature=0.0).sequences[0].tokens[:4] == [50, 60, 70, 80]


def test_reinforcement_learning_raises_the_reward(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=4, seed=2).result(timeout=60)
    rewards = []
    for step in range(12):
        sampler = client.save_weights_and_get_sampling_client().result(timeout=60)
        sequences = sample(sampler, 32, seed=step, stop=[]).sequences
        assert len({tuple(sequence.tokens) for sequence in sequences}) > 1
        gains = np.array([sum(token < 64 for token in sequence.tokens) / LONGEST for sequence in sequences])
        rewards.append(gains.mean())
        data = []
        for sequence, gain in zip(sequences, gains, strict=True):
            # As recipes do: the targets of the prompt are any tokens, because their advantage is 0.
            unused = [0] * (len(PROMPT) - 1)
            inputs = {
                "target_tokens": [*unused, *sequence.tokens],
                "logprobs": [*map(float, unused), *sequence.logprobs],
                "advantages": [*map(float, unused), *[float(gain - gains.mean())] * LONGEST],
            }
            tokens = tinker.ModelInput.from_ints([*PROMPT, *sequence.tokens[:-1]])
            data.append(tinker.Datum(model_input=tokens, loss_fn_inputs=inputs))
        output = client.forward_backward(data, "importance_sampling")
        client.optim_step(tinker.AdamParams(learning_rate=0.05, **ADAM)).result(timeout=60)
        trained = output.result(timeout=60).loss_fn_outputs
        for entry, scored in zip(data, trained, strict=True):
            sampled = entry.loss_fn_inputs["logprobs"].tolist()[len(PROMPT) - 1 :]
            np.testing.assert_allclose(scored["logprobs"].tolist()[len(PROMPT) - 1 :], sampled, atol=1e-5)
    assert rewards[-1] > rewards[0] + 0.2


def test_samples_are_those_of_the_trained_weights(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=2, seed=3).result(timeout=60)
    learn(client, [*PROMPT, 1, 2])
    sampler = client.save_weights_and_get_sampling_client().result(timeout=60)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=5, seed=7, stop=[])
    answer = sampler.sample(
        prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3
    ).result(timeout=60)
    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) == 3
    assert all(sequence.stop_reason == "length" and len(sequence.tokens) == 5 for sequence in answer.sequences)
    for sequence in answer.sequences:
        expected = scores(client, [*PROMPT, *sequence.tokens])
        np.testing.assert_allclose([*answer.prompt_logprobs[1:], *sequence.logprobs], expected, atol=1e-5)
        top = sequence.topk_logprobs_np
        assert top.logprobs.shape == (5, 3) and (np.diff(top.logprobs) <= 0).all()
    assert answer.prompt_logprobs[0] is None
    again = sampler.sample(prompt, 3, params).result(timeout=60)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1).result(timeout=60)
    assert last[:2] == [None, None] and last[2] == pytest.approx(answer.prompt_logprobs[2])
    greedy = sample(sampler, temperature=0.0, stop=[]).sequences[0].tokens
    assert sample(sampler, top_k=1, stop=[]).sequences[0].tokens == greedy
    assert sample(sampler, top_p=1e-9, stop=[]).sequences[0].tokens == greedy


def test_stops_are_tokens_strings_or_the_end_of_the_text(service: Any) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result(timeout=60)
    free = sample(sampler, seed=1, stop=[]).sequences[0]
    place = next(place for place in range(3, LONGEST) if free.tokens[place] not in free.tokens[:place])
    stopped = sample(sampler, seed=1, stop=[free.tokens[place]]).sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: place + 1], "stop")
    # Tokens are bytes here: find a sample with a pair of letters.
    for seed in range(200):
        free = sample(sampler, seed=seed, stop=[]).sequences[0]
        text = "".join(chr(token + 33) if token < 94 else " " for token in free.tokens)
        pairs = [pair for pair in pairwise(text) if " " not in pair]
        if pairs:
            break
    string = "".join(pairs[0])
    cut = sample(sampler, seed=seed, stop=string).sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == free.tokens[: text.index(string) + 2]


def test_trainings_do_not_change_each_other_or_the_base(service: Any) -> None:
    text = [*PROMPT, 9, 8, 7]
    base = service.create_sampling_client(base_model=NAME).result(timeout=60)
    of_base = base.compute_logprobs(tinker.ModelInput.from_ints(text)).result(timeout=60)[1:]
    alone = service.create_lora_training_client(NAME, rank=2, seed=5).result(timeout=60)
    np.testing.assert_allclose(scores(alone, text), of_base, atol=1e-6)
    for _ in range(2):
        learn(alone, text)
    expected = scores(alone, text)
    first = service.create_lora_training_client(NAME, rank=2, seed=5).result(timeout=60)
    other = service.create_lora_training_client(NAME, rank=4, seed=6, train_attn=False).result(timeout=60)
    learn(first, text)
    early = first.save_weights_and_get_sampling_client().result(timeout=60)
    of_early = scores(first, text)
    learn(other, text)
    learn(first, text)
    assert scores(first, text) == expected
    assert scores(other, text) != expected
    # A snapshot keeps the weights of its time, and the base model stays as it was.
    np.testing.assert_allclose(
        early.compute_logprobs(tinker.ModelInput.from_ints(text)).result(timeout=60)[1:], of_early, atol=1e-6
    )
    assert base.compute_logprobs(tinker.ModelInput.from_ints(text)).result(timeout=60)[1:] == of_base


def test_old_snapshots_are_forgotten_with_a_sentence(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=1, seed=1).result(timeout=60)
    samplers = [client.save_weights_and_get_sampling_client().result(timeout=60) for _ in range(4)]
    assert sample(samplers[3]).sequences
    with pytest.raises(tinker.RequestFailedError, match="the server keeps 3 copies"):
        sample(samplers[0])


def test_a_custom_loss_trains_by_its_gradients(service: Any) -> None:
    text = [*PROMPT, 9, 8, 7]
    custom, plain = (service.create_lora_training_client(NAME, rank=2, seed=5).result(timeout=60) for _ in range(2))

    def loss(data: list[Any], log_probs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -log_probs[0].sum(), {"mine": 2.0}

    output = custom.forward_backward_custom([datum(text)], loss)
    custom.optim_step(tinker.AdamParams(learning_rate=0.02, **ADAM)).result(timeout=60)
    expected = learn(plain, text).metrics["loss:sum"]
    metrics = output.result(timeout=60).metrics
    assert (metrics["mine"], metrics["loss:sum"]) == (2.0, pytest.approx(expected))
    np.testing.assert_allclose(scores(custom, text), scores(plain, text), atol=1e-6)


def test_illegal_requests_are_refused_and_the_next_ones_work(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=2).result(timeout=60)
    text = [*PROMPT, 9]
    with pytest.raises(tinker.BadRequestError, match="loss_fn='stable_reinforce' is not supported"):
        client.forward_backward([datum(text)], "stable_reinforce").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="lack advantages, logprobs"):
        client.forward_backward([datum(text)], "ppo").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        client.forward_backward([datum([*PROMPT, 9999])], "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="optim_step without gradients"):
        client.optim_step(tinker.AdamParams()).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match=r"learning_rate: .*greater than or equal to 0"):
        client.optim_step(tinker.AdamParams(learning_rate=-1.0)).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="must be a name"):
        client.save_state("../outside").result(timeout=60)
    assert learn(client, text).metrics["loss:sum"] > 0
    with pytest.raises(tinker.RequestFailedError, match="adapters of rank 1 to 4"):
        service.create_lora_training_client(NAME, rank=5).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="base_model='other' is not on this server"):
        service.create_lora_training_client("other").result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="no weights are stored at"):
        service.create_training_client_from_state("tinker://ab:train:0/weights/absent").result(timeout=60)
    sampler = service.create_sampling_client(base_model=NAME).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="the prompt must have at least one token"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints([])).result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="shorter prompt"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints([1] * 500)).result(timeout=60)
    assert sample(sampler).sequences


def post(url: str, path: str, content: bytes | dict[str, Any], kind: str = "application/json") -> tuple[int, Any]:
    """A request without the client."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = content if isinstance(content, bytes) else json.dumps(content)
    connection.request("POST", f"/api/v1/{path}", body, {"Content-Type": kind})
    response = connection.getresponse()
    status, text = response.status, response.read()
    connection.close()
    return status, json.loads(text or b"null")


def test_requests_are_executed_once_and_in_their_order(service: Any, url: str) -> None:
    """A client whose connection was lost sends a request again; parallel requests arrive in any order."""
    client, other = (service.create_lora_training_client(NAME, rank=2, seed=4).result(timeout=60) for _ in range(2))
    text = [*PROMPT, 9, 8]
    params = {"learning_rate": 0.02, **ADAM}
    # The optimizer step arrives before its data, twice.
    step = {"model_id": client.model_id, "adam_params": params, "seq_id": 2, "type": "optim_step"}
    (_, first), (_, second) = post(url, "optim_step", step), post(url, "optim_step", step)
    assert first["request_id"] == second["request_id"]
    assert client.forward_backward([datum(text)], "cross_entropy").result(timeout=60).metrics
    status, result = post(url, "retrieve_future", {"request_id": first["request_id"]})
    assert status == 200 and result["metrics"]["grad_norm"] > 0
    client._get_request_id()
    client._turn_counter += 1
    learn(other, text)
    assert scores(client, text) == scores(other, text)


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "message"),
    [
        ("asample", b"{", "application/json", 400, "Invalid JSON"),
        ("asample", b"{}", "text/plain", 415, "Content-Type"),
        ("optim_step", b'{"model_id": "x", "adam_params": {"lr": 1}}', "application/json", 400, "adam_params.lr"),
        ("get_info", b'{"model_id": "x"}', "application/json", 404, "model_id='x' is not known"),
        ("session_heartbeat", b'{"session_id": "x"}', "application/json", 404, "make a new ServiceClient"),
        ("retrieve_future", b'{"request_id": "x"}', "application/json", 410, "is not known"),
        ("forward_backward", b"\xff", "application/x-protobuf", 400, "not a protobuf message"),
        ("publish", b"{}", "application/json", 404, "'/api/v1/publish' is not supported"),
    ],
)
def test_bad_requests_have_a_status_and_a_sentence(
    url: str, path: str, body: bytes, kind: str, status: int, message: str
) -> None:
    found, answer = post(url, path, body, kind)
    assert found == status and message in answer["detail"]
