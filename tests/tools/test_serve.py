"""The server from its clients' view: real HTTP requests to a small random model in a separate process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from megatron_core.commands.serve import ServeFlags, serve_requests
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from tests.hub.hf_models import LLAMA, transformers
from tests.programs import ForkedPopen
from tests.vocabularies.corpus import write_tokenizer_json

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = ["the cat", "def f(x):", "a", "the hat and the cat and the hat"]
ENDLESS = PROMPTS[1]
"""Its greedy text does not end."""
JSON = {"Content-Type": "application/json"}


class Client:
    """A server and the model that it should serve."""

    def __init__(self, folder: Path, *flags: str, ranks: int = 1) -> None:
        command = "megatron_core.commands.serve"
        # --nproc-per-node would start another process of Python.
        words = ["megatron_core.commands.start_ranks", str(ranks), command] if ranks > 1 else [command]
        words += ["--load", str(folder), "--port", "0", "--max-length", "8000", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = ForkedPopen([sys.executable, "-m", *words], cwd=ROOT, env=environment, **pipes)
        line = self.process.stdout.readline()
        found = re.search(r"listening at http://127\.0\.0\.1:(\d+), longest text 8000 tokens", line)
        assert found, line + self.process.stderr.read()
        self.port = int(found[1])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, path: str, body: str | bytes | None = None, **headers: str) -> tuple[int, str]:
        connection = self.connection()
        connection.request("GET" if body is None else "POST", path, body, JSON | headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def post(self, path: str, **asked: Any) -> dict[str, Any]:
        status, text = self.send(path, json.dumps(asked))
        assert status == 200, text
        return json.loads(text)

    def complete(self, prompt: object, **asked: Any) -> dict[str, Any]:
        return self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **asked})

    def refused(self, path: str, asked: object) -> tuple[int, str]:
        status, text = self.send(path, asked if isinstance(asked, (str, bytes)) else json.dumps(asked))
        return status, json.loads(text)["error"]["message"]

    def stream(self, path: str, **asked: Any) -> list[Any]:
        status, text = self.send(path, json.dumps(asked | {"stream": True}))
        assert status == 200, text
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "") and all(event.startswith("data: ") for event in events)
        return [json.loads(event[len("data: ") :]) for event in events]

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with readable tokens and a chat template."""
    found = tmp_path_factory.mktemp("model") / "tiny-llama"
    torch.manual_seed(0)
    settings = {"vocab_size": 300, "initializer_range": 0.3, "eos_token_id": 0, "max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**LLAMA | settings)
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    write_tokenizer_json(found, ("<|endoftext|>", "<|user|>", "<|assistant|>"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    small_steps = ["--inference-dynamic-batching-block-size", "4", "--inference-dynamic-batching-max-tokens", "8"]
    limits = ["--max-batch-size", "3", "--max-waiting", "6", "--max-request-bytes", "50000"]
    client = Client(folder, *limits, *small_steps)
    yield client
    client.end()


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def greedy(self, text: str, tokens: int = 8) -> str:
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        new = self.model.generate(ids, **settings)[0, ids.shape[1] :].tolist()
        return self.tokenizer.decode([token for token in new if token != 0])

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_completions_are_those_of_transformers(server: Client, reference: Reference) -> None:
    """One prompt, a list of prompts, token ids; and several clients at once, more than a batch has."""
    expected = [reference.greedy(prompt) for prompt in PROMPTS]
    several = server.complete(PROMPTS)
    assert [choice["text"] for choice in several["choices"]] == expected
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    ids = [reference.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in PROMPTS]
    assert several["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert several["model"] == "tiny-llama" and several["object"] == "text_completion"
    assert server.complete(ids[0])["choices"][0]["text"] == expected[0]
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda prompt: server.complete(prompt)["choices"][0]["text"], PROMPTS))
    assert found == expected


def test_texts_with_a_common_prefix_are_those_of_transformers(server: Client, reference: Reference) -> None:
    """Together, and again when the prefix is in the cache; it is much longer than a step."""
    prompts = [PROMPTS[3] * 8 + " " + prompt for prompt in PROMPTS]
    expected = [reference.greedy(prompt) for prompt in prompts]
    for _ in range(2):
        assert [choice["text"] for choice in server.complete(prompts)["choices"]] == expected


def test_chats_are_those_of_transformers(server: Client, reference: Reference) -> None:
    messages = [
        {"role": "user", "content": " the cat "},
        {"role": "assistant", "content": "the hat"},
        {"role": "user", "content": "and"},
    ]
    prompt = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = server.post("/v1/chat/completions", messages=messages, temperature=0, max_completion_tokens=8)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": reference.greedy(prompt),
        "refusal": None,
    }
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}]
    whole = [{"role": "user", "content": "the cat"}]
    found = [server.post("/v1/chat/completions", messages=m, seed=3, max_tokens=5)["choices"] for m in (parts, whole)]
    assert found[0] == found[1]


def test_streams_add_up_to_the_whole(server: Client) -> None:
    asked = {"prompt": PROMPTS[:2], "temperature": 0.9, "seed": 7, "max_tokens": 9, "n": 2}
    whole = server.post("/v1/completions", **asked)
    *events, usage = server.stream("/v1/completions", **asked, stream_options={"include_usage": True})
    texts, reasons = [""] * 4, [None] * 4
    for event in events:
        (choice,) = event["choices"]
        assert reasons[choice["index"]] is None, "nothing comes after the end"
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert (usage["usage"], usage["choices"]) == (whole["usage"], [])
    assert texts[0] != texts[1], "each of n has a seed of its own"
    chat = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "the"}], max_tokens=4, seed=1)
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_stop_strings_end_the_text(server: Client) -> None:
    whole = server.complete("the cat", max_tokens=20)["choices"][0]["text"]
    stop = whole[4:6]
    stopped = server.complete("the cat", max_tokens=20, stop=stop, logprobs=0)["choices"][0]
    assert stopped["text"] == whole[: whole.index(stop)] and stopped["finish_reason"] == "stop"
    events = server.stream("/v1/completions", prompt="the cat", temperature=0, max_tokens=20, stop=[stop, "never"])
    assert "".join(event["choices"][0]["text"] for event in events) == stopped["text"]


def test_probabilities_score_a_prompt(server: Client, reference: Reference) -> None:
    """Requests of the evaluation harness: the prompt's own tokens, and the most likely ones."""
    ids = reference.tokenizer(PROMPTS[3], add_special_tokens=False).input_ids
    for tokens in (0, 2):
        choice = server.complete(ids, echo=True, logprobs=2, max_tokens=tokens)["choices"][0]
        scores = choice["logprobs"]
        assert choice["text"].startswith(PROMPTS[3]) and scores["token_logprobs"][0] is None
        own = reference.logprobs(ids)
        expected = [own[i, token].item() for i, token in enumerate(ids[1:])]
        assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert max(scores["top_logprobs"][1].values()) == pytest.approx(own[0].max().item(), abs=1e-4)
        assert len(scores["tokens"]) == len(ids) + tokens == len(scores["text_offset"])
        assert "".join(scores["tokens"]) == choice["text"]
    ended = server.complete(PROMPTS[0], echo=True, logprobs=1, max_tokens=2000)
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] < 2000
    assert len(ended["choices"][0]["logprobs"]["token_logprobs"]) == ended["usage"]["total_tokens"], "the end's, too"
    chat = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], temperature=0, max_tokens=2, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    for each in chat["choices"][0]["logprobs"]["content"]:
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] and len(each["top_logprobs"]) == 3, "greedy"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOO_LONG = "context_length_exceeded"


def load_of(server: Client) -> dict[str, Any]:
    return json.loads(server.send("/health")[1])


def idle(server: Client) -> bool:
    return load_of(server) == {"status": "ok", "running": 0, "waiting": 0}


REFUSED: dict[str, tuple[str, object, int, str]] = {
    "no JSON": (COMPLETIONS, "{", 400, "the request is not JSON"),
    "deep": (COMPLETIONS, "[" * 9000, 400, "the request is not JSON"),
    "not an object": (COMPLETIONS, [1], 400, "not a JSON object"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt is missing; add it"),
    "bytes": (COMPLETIONS, b"\xff\xfe", 400, "the request is not JSON"),
    "surrogate": (COMPLETIONS, {"prompt": "a\ud800"}, 400, "the request is not JSON: unexpected end of hex escape"),
    "surrogate in a chat": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "unexpected end of hex"),
    "empty": (COMPLETIONS, {"prompt": ""}, 400, "the prompt has no token"),
    "kind of prompt": (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt must be a string"),
    "token": (COMPLETIONS, {"prompt": [5, 300]}, 400, "outside of the vocabulary, 0 to 299"),
    "too long": (COMPLETIONS, {"prompt": [5] * 8000}, 400, "the prompt has 8000 tokens; at most 7999"),
    "too large": (COMPLETIONS, {"prompt": "a" * 50001}, 413, "more than 50000 bytes"),
    "kind": (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens='9': it should be a valid integer"),
    "boolean for a number": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": True},
        400,
        "max_tokens=True: it should be a valid integer",
    ),
    "bounds": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": -1},
        400,
        "max_tokens=-1: it should be greater than or equal to 0",
    ),
    "no number": (
        COMPLETIONS,
        '{"prompt": "a", "temperature": NaN}',
        400,
        "temperature=nan: it should be a finite number",
    ),
    "top_p": (COMPLETIONS, {"prompt": "a", "top_p": -1}, 400, "top_p=-1: it should be greater than or equal to 0"),
    "stop": (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "give a string or a list of strings, none of them empty"),
    "choices": (COMPLETIONS, {"prompt": ["a", "b"], "n": 4}, 400, "2 prompts times n=4 is more than 6"),
    "unknown": (COMPLETIONS, {"prompt": "a", "beams": 2}, 400, "'beams' is not a parameter of this server"),
    "not supported": (
        COMPLETIONS,
        {"prompt": "a", "best_of": 2},
        400,
        "best_of=2 is not supported; remove it, or give 1",
    ),
    "echo": (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "is not streamed"),
    "huge number": (COMPLETIONS, '{"prompt": "a", "n": %s}' % ("9" * 400), 400, "1 prompts times n="),
    "infinite": (COMPLETIONS, '{"prompt": "a", "temperature": 1e999}', 400, "temperature=inf: it should be a finite"),
    "negative n": (COMPLETIONS, {"prompt": "a", "n": -1}, 400, "n=-1: it should be greater than or equal to 1"),
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 10**9}, 400, "logprobs=1000000000: it should be less than"),
    "five stops": (COMPLETIONS, {"prompt": "a", "stop": list("abcde")}, 400, "stop has 5 strings; give at most 4"),
    "long stop": (
        COMPLETIONS,
        {"prompt": "a", "stop": "x" * 40000},
        400,
        "a string of 40000 characters; give at most 1000",
    ),
    "beyond the context": (COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 7991}, 400, "give at most 7990"),
    "chat beyond it": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 8000},
        400,
        "max_completion_tokens=8000 and the prompt's",
    ),
    "model": (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, "model='gpt-9' does not exist; give 'tiny-llama'"),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * 9000}, 400, "9000 prompts times n=1 is more than 6"),
    "stream_options": (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "stream_options needs stream=true"),
    "top_logprobs": (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, 400, "needs logprobs"),
    "refused by the template": (CHAT, {"messages": [{"role": "system", "content": ""}]}, 400, "unknown role system"),
    "messages": (CHAT, {"messages": []}, 400, "messages=[]: List should have at least 1 item"),
    "message": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content is missing; add it"),
    "role": (CHAT, {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role='x': it should be 'developer'"),
    "tool calls": (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        400,
        "'messages[0].tool_calls' is not a",
    ),
    "unused name": (CHAT, {"messages": [{"role": "user", "content": "a", "name": "me"}]}, 400, "does not use names"),
    "picture": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
        400,
        "content must be a string",
    ),
    "path": ("/v1/other", {}, 404, "base_url ends with /v1"),
    "method": ("/health", {}, 405, "does not answer POST; use GET"),
}


def test_requests_and_answers_have_the_values_of_openai(server: Client) -> None:
    """Bounds, names and null as in its reference: https://platform.openai.com/docs/api-reference."""
    greedy = server.complete("the cat")
    likeliest = server.complete("the cat", temperature=1, top_p=0, seed=-(2**63))
    assert likeliest["choices"] == greedy["choices"] and greedy["id"].startswith("cmpl-")
    chat = server.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1, logprobs=True)
    assert chat["id"].startswith("chatcmpl-") and chat["choices"][0]["message"]["refusal"] is None
    assert chat["choices"][0]["logprobs"]["refusal"] is None
    *events, last = server.stream(COMPLETIONS, prompt="a", max_tokens=2, stream_options={"include_usage": True})
    assert [event["usage"] for event in events] == [None] * len(events) and last["usage"]["completion_tokens"] == 2
    assert all("usage" not in event for event in server.stream(COMPLETIONS, prompt="a", max_tokens=2))


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(COMPLETIONS, {"prompt": [5] * 7997}), (CHAT, {"messages": [{"role": "user", "content": "é" * 3987}]})],
)
def test_the_error_has_the_number_of_tokens_that_fit(server: Client, path: str, prompt: dict[str, Any]) -> None:
    """The chat page asks again with this number."""
    status, text = server.send(path, json.dumps({**prompt, "max_tokens": 256}))
    error = json.loads(text)["error"]
    assert status == 400 and error["code"] == TOO_LONG and 0 < error["room"] < 256
    assert server.post(path, **prompt, max_tokens=error["room"])["usage"]["total_tokens"] <= 8000
    assert server.send(path, json.dumps({**prompt, "max_tokens": error["room"] + 1}))[0] == 400


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_requests_are_one_sentence(server: Client, name: str) -> None:
    path, asked, status, message = REFUSED[name]
    found, said = server.refused(path, asked)
    assert found == status and message in said and "\n" not in said, said
    assert idle(server)


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "b"}, ("invalid_request_error", "model", "model_not_found")),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 8000}, ("invalid_request_error", "max_tokens", TOO_LONG)),
        (COMPLETIONS, {"prompt": [5] * 8000}, ("invalid_request_error", "prompt", TOO_LONG)),
        (CHAT, {"messages": [{"role": "x", "content": "a"}]}, ("invalid_request_error", "messages", None)),
        ("/v1/other", {}, ("invalid_request_error", None, None)),
    ],
)
def test_errors_are_those_of_openai(
    server: Client, path: str, asked: object, expected: tuple[str, str | None, str | None]
) -> None:
    error = json.loads(server.send(path, json.dumps(asked))[1])["error"]
    has_room = expected[1:] == ("max_tokens", TOO_LONG)  # an addition: the largest number that fits
    assert set(error) == {"message", "type", "param", "code", *(["room"] * has_room)}
    assert (error["type"], error["param"], error["code"]) == expected


def test_keys_of_clients_that_ask_for_nothing(server: Client) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "best_of": 1,
        "logit_bias": {},
        "user": "me",
        "stop": None,
    }
    assert server.complete("the", **neutral)["choices"] == server.complete("the")["choices"]


def test_other_sites_cannot_use_it(server: Client) -> None:
    """A page of another site cannot send JSON without a preflight request, and other host names are refused."""
    status, text = server.send(COMPLETIONS, '{"prompt": "a"}', **{"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in text
    assert server.send("/health", Host="elsewhere.example")[0] == 400


def waits_until(condition: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("stream", [True, False])
def test_abandoned_requests_make_room(server: Client, stream: bool) -> None:
    """A client that fills batch and queue and disconnects must not block: all of its texts would take half a minute."""
    asked = {"prompt": [ENDLESS] * 6, "max_tokens": 7900, "stream": stream, "temperature": 0}
    connection = server.connection()
    connection.request("POST", COMPLETIONS, json.dumps(asked), JSON)
    assert waits_until(lambda: load_of(server)["running"] == 3 and load_of(server)["waiting"] == 3)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert waits_until(lambda: idle(server), 8.0)


def test_a_full_queue_says_so(server: Client) -> None:
    """Batches of 3 and 6 more that wait: of many requests for 6 each some are refused, and the others complete."""
    body = json.dumps({"prompt": ["the cat"] * 6, "max_tokens": 60, "temperature": 1.2})
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda _: server.send(COMPLETIONS, body), range(8)))
    assert {status for status, _ in found} == {200, 429}
    assert all("at most 6 can wait; try again later" in text for status, text in found if status == 429)


def test_half_a_request(server: Client) -> None:
    """Invalid bytes, and a client that disconnects in the middle of a request."""
    for data in (b"\x16\x03\x01 nonsense\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + b"Content-Length: 99\r\n\r\n{")
    assert server.complete("the", max_tokens=1)["usage"]["completion_tokens"] == 1


class Page(HTMLParser):
    """The ids of elements, and all resources that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found["id"]} if found.get("id") else set()
        self.loads += [found[name] for name in ("src", "href") if found.get(name)]


def test_the_page_is_complete(server: Client) -> None:
    """It loads only files of the server, its script uses existing elements and paths, and text is never markup.
    ``make browser`` uses it in a browser."""
    status, text = server.send("/")
    page = Page()
    page.feed(text)
    files = [name for name in page.loads if name != "data:,"]
    sent = {name: server.send(f"/{name}") for name in (*files, "page/markdown.js")}
    assert status == 200 and all(name.startswith("page/") and sent[name][0] == 200 for name in files), sent
    script = sent["page/chat.js"][1] + sent["page/markdown.js"][1]
    used = set(re.findall(r'\bat\("(\w+)"\)', script))
    assert used and used <= page.ids and set(re.findall(r'from "\./([\w.]+)"', script)) == {"markdown.js"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|DOMParser", script)
    for path in set(re.findall(r'"(/v1/[\w/]*completions)"', script)):
        assert server.refused(path, {})[0] == 400
    assert server.send("/page/../web.py")[0] == server.send("/page/%2e%2e/web.py")[0] == 404


def test_a_model_has_its_name(server: Client) -> None:
    (listed,) = json.loads(server.send("/v1/models")[1])["data"]
    assert json.loads(server.send("/v1/models/tiny-llama")[1]) == listed
    status, message = server.send("/v1/models/a/b")
    assert status == 404 and json.loads(message)["error"]["code"] == "model_not_found"


def test_models_say_whether_they_chat(server: Client) -> None:
    (model,) = json.loads(server.send("/v1/models")[1])["data"]
    assert (model["id"], model["max_model_len"], model["has_chat_template"]) == ("tiny-llama", 8000, True)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_ends_while_it_generates(folder: Path, reference: Reference, ranks: int) -> None:
    """On one rank, and on two pipeline ranks that follow the listening one."""
    client = Client(folder, "--pipeline-model-parallel-size", str(ranks), ranks=ranks)
    assert client.complete(PROMPTS[0])["choices"][0]["text"] == reference.greedy(PROMPTS[0])
    body = json.dumps({"prompt": [ENDLESS] * 8, "max_tokens": 7900, "stream": True, "temperature": 0})

    def read() -> None:
        with contextlib.suppress(http.client.IncompleteRead):
            client.send(COMPLETIONS, body)

    thread = threading.Thread(target=read)
    thread.start()
    assert waits_until(lambda: load_of(client)["running"] == 8)
    client.process.terminate()
    _, errors = client.process.communicate(timeout=60)
    thread.join(timeout=30)
    assert "serve.py" not in errors and "error:" not in errors and not thread.is_alive(), errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "192.0.2.1"], "host='192.0.2.1' port=0 cannot be used"),
        (["--chat-template", "nowhere"], "chat_template='nowhere' cannot be read: .* No such file"),
        (["--max-waiting", "0"], "max_waiting=0: give 1 or more"),
        (["--max-length", "-5"], "max_length=-5: give 2 or more"),
        (["--max-length", "1000000000"], "max_length=1000000000 exceeds the model's positions; give at most 8192"),
    ],
)
def test_wrong_settings_are_one_sentence(folder: Path, flags: list[str], message: str) -> None:
    settings = tyro.cli(ServeFlags, args=["--load", str(folder), "--port", "0", *flags])
    with pytest.raises(ConfigError, match=message):
        serve_requests(settings, World(0, 1, 0, torch.device("cpu")))
