"""Lists of runs, checkpoints and sessions by the client of PyPI, also after a restart; room for new trainings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.post_training.tinker.processes import NAME, save_model, server_of
from tests.post_training.tinker.test_client import datum, learn, scores

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")

TEXT = [40, 41, 42, 9, 8]
REMARKS = {"renderer_name": "role_colon"}


def paths_of(checkpoints: Any) -> list[str]:
    """The paths of listed checkpoints."""
    return [checkpoint.tinker_path for checkpoint in checkpoints]


def test_runs_and_checkpoints_are_listed_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    save_model(tmp_path / "model")
    flags = {"lora_rank": 4, "save": tmp_path / "weights"}
    with server_of(tmp_path / "model", **flags) as url:
        lists = tinker.RestClient(base_url=url, api_key="tml-none")
        assert lists.list_training_runs().result(timeout=60).training_runs == []
        with tinker.ServiceClient(base_url=url, api_key="tml-none", display_name="mine") as service:
            client = service.create_lora_training_client(NAME, rank=2, seed=1, user_metadata=REMARKS).result(timeout=60)
            (session,) = lists.list_sessions().result(timeout=60).sessions
            described = lists.get_session(session).result(timeout=60)
            assert (described.training_run_ids, described.display_name) == ([client.model_id], "mine")
            run = lists.get_training_run(client.model_id).result(timeout=60)
            assert (run.lora_rank, run.user_metadata, run.last_checkpoint) == (2, REMARKS, None)
            learn(client, TEXT)
            first = client.save_state("first").result(timeout=60).path
            second = client.save_state("second", user_metadata={"step": "2"}).result(timeout=60).path
            to_sample = client.save_weights_for_sampler("second").result(timeout=60).path
            expected = scores(client, TEXT)
            lists.delete_checkpoint_from_tinker_path(first).result(timeout=60)
            with pytest.raises(tinker.RequestFailedError, match="no weights are stored at"):
                service.create_training_client_from_state(first).result(timeout=60)
            with pytest.raises(tinker.NotFoundError, match="no weights are stored at"):
                lists.delete_checkpoint_from_tinker_path(first).result(timeout=60)
            assert client.save_state("first").result(timeout=60).path == first
    with server_of(tmp_path / "model", **flags) as url:
        lists = tinker.RestClient(base_url=url, api_key="tml-none")
        (run,) = lists.list_training_runs().result(timeout=60).training_runs
        assert run.training_run_id == client.model_id
        assert (run.base_model, run.user_metadata, run.last_checkpoint.tinker_path) == (NAME, REMARKS, first)
        assert run.last_sampler_checkpoint.tinker_path == to_sample
        assert lists.get_training_run_by_tinker_path(second).result(timeout=60) == run
        listed = lists.list_checkpoints(client.model_id).result(timeout=60).checkpoints
        assert paths_of(listed) == [first, to_sample, second]
        assert [checkpoint.checkpoint_type for checkpoint in listed] == ["training", "sampler", "training"]
        assert listed[2].user_metadata == {"step": "2"} and listed[0].size_bytes > listed[1].size_bytes > 0
        page = lists.list_user_checkpoints(limit=1, offset=2).result(timeout=60)
        assert (paths_of(page.checkpoints), page.cursor.total_count) == ([second], 3)
        info = lists.get_weights_info_by_tinker_path(second).result(timeout=60)
        assert (info.base_model, info.lora_rank, info.train_mlp) == (NAME, 2, True)
        with pytest.raises(tinker.NotFoundError, match="'ab:train:0' is not open"):
            lists.get_training_run("ab:train:0").result(timeout=60)
        with tinker.ServiceClient(base_url=url, api_key="tml-none") as service:
            continued = service.create_training_client_from_state_with_optimizer(second).result(timeout=60)
            assert scores(continued, TEXT) == pytest.approx(expected, abs=1e-6)
            again = lists.get_training_run(continued.model_id).result(timeout=60)
            assert (again.lora_rank, again.user_metadata) == (2, REMARKS)


def test_several_targets_of_a_token_train_as_several_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft targets, as programs for distillation send them: two for each token, dense and in compressed rows."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    save_model(tmp_path / "model")
    columns = [[41, 42, 9, 8], [7, 6, 5, 0]]
    weights = [[0.75, 0.5, 0.25, 1.0], [0.25, 0.5, 0.75, 0.0]]
    tokens = tinker.ModelInput.from_ints(TEXT[:-1])
    several = {"target_tokens": list(zip(*columns, strict=True)), "weights": list(zip(*weights, strict=True))}
    several = {name: [list(row) for row in rows] for name, rows in several.items()}
    separate = [
        tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": share})
        for targets, share in zip(columns, weights, strict=True)
    ]
    with (
        server_of(tmp_path / "model", lora_rank=4) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-none") as service,
    ):
        results = []
        for data in ([tinker.Datum(model_input=tokens, loss_fn_inputs=several)], separate):
            client = service.create_lora_training_client(NAME, rank=2, seed=1).result(timeout=60)
            output = client.forward_backward(data, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.02)).result(timeout=60)
            results.append((output.result(timeout=60), scores(client, TEXT)))
        (joint, after_joint), (apart, after_apart) = results
        assert joint.metrics == pytest.approx(apart.metrics)
        (rows,) = joint.loss_fn_outputs
        assert rows["logprobs"].shape == [4, 2]
        columns_apart = [entry["logprobs"].tolist() for entry in apart.loss_fn_outputs]
        assert rows["logprobs"].to_numpy().T.tolist() == columns_apart
        assert after_joint == pytest.approx(after_apart, abs=1e-6)
        mixed = [tinker.Datum(model_input=tokens, loss_fn_inputs=several), datum(TEXT)]
        with pytest.raises(tinker.BadRequestError, match="must have the same number of targets"):
            client.forward_backward(mixed, "cross_entropy").result(timeout=60)


class _Service:
    """Executes nothing."""

    def submit(self, operation: dict[str, Any], finish: Any, **place: Any) -> str:
        finish({})
        return "1"

    def known(self, sequence: str, number: int) -> None:
        return None

    def forget(self, name: str) -> None:
        return None


def test_sessions_without_a_sign_of_life_make_room() -> None:
    """Before that the server refuses a new training with the status at which clients try again."""
    from starlette.requests import Request

    from megatron_core.post_training.tinker_server import protocol as protocol_module
    from megatron_core.post_training.tinker_server.web import TinkerServer

    config = SimpleNamespace(checkpoint=SimpleNamespace(save=None), optional=lambda name: 4)
    trainer: Any = SimpleNamespace(run=SimpleNamespace(config=config))
    service: Any = _Service()
    protocol = protocol_module.TinkerProtocol(service, trainer, name=NAME, most_trainings=1)
    sessions = [protocol.create_session(b"{}")["session_id"] for _ in range(2)]

    def create(session: str) -> bytes:
        return (
            f'{{"session_id": "{session}", "model_seq_id": 0, "base_model": "{NAME}", "lora_config": {{"rank": 1}}}}'
        ).encode()

    assert protocol.create_model(create(sessions[0]))["model_id"] == f"{sessions[0]}:train:0"
    server = TinkerServer(service, protocol).application()
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/create_model",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": create(sessions[1]), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    assert Request(scope).method == "POST"
    asyncio.run(server(scope, receive, send))
    assert sent[0]["status"] == 429 and (b"retry-after", b"10") in sent[0]["headers"]
    assert b"1 trainings are open" in sent[1]["body"]
    protocol._sessions[sessions[0]].alive -= protocol_module.SESSION_SECONDS + 1
    assert protocol.create_model(create(sessions[1]))["model_id"] == f"{sessions[1]}:train:0"
    assert list(protocol.catalog.open_runs) == [f"{sessions[1]}:train:0"]
