"""The requests of Tinker's API: sessions, trainings and samplers, and the operations that requests become."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import orjson

from megatron_core.errors import DataError
from megatron_core.post_training.tinker_server import bodies
from megatron_core.post_training.tinker_server.catalog import Catalog, NotFoundError, entries_of_page, present_time
from megatron_core.post_training.tinker_server.losses import LossCall
from megatron_core.post_training.tinker_server.messages import forward_output, forward_request, sample_output
from megatron_core.post_training.tinker_server.operations import BASE
from megatron_core.post_training.tinker_server.sampling import Json, sample_operation
from megatron_core.post_training.tinker_server.service import Answer, BusyError, OperationService
from megatron_core.post_training.trainer import Trainer

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
SESSION_SECONDS = 60.0
"""A session without a sign of life for this time makes room for new trainings; clients send one every 10 seconds.
Programs that end without closing their session, as many do, would else fill the server."""

Handler = Callable[["TinkerProtocol", bytes], Json]


@dataclass
class _Session:
    """A session of a client, with the names of its trainings, and of the weights of its samplers."""

    alive: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: dict[str, str] = field(default_factory=dict)
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None


def _in_order(handler: Handler) -> Handler:
    """Let the requests after a refused one of the same training be executed: its client sends them."""

    @wraps(handler)
    def answer(protocol: TinkerProtocol, body: bytes) -> Json:
        try:
            return handler(protocol, body)
        except DataError:
            model, seq_id = bodies.model_and_number(body)
            protocol.skip(model, seq_id)
            raise

    return answer


class TinkerProtocol:
    """Answers to the bodies of requests; ``name`` is that of the base model, ``tokenizer`` its folder for clients.

    Errors: ``DataError`` for illegal requests, ``NotFoundError`` for names that are not known, ``BusyError``.
    """

    def __init__(
        self,
        service: OperationService,
        trainer: Trainer,
        *,
        name: str,
        tokenizer: str | None = None,
        most_trainings: int = 8,
    ) -> None:
        self._service = service
        self._run = trainer.run
        self._name = name
        self._tokenizer = tokenizer
        self._most_trainings = most_trainings
        self._largest_rank = trainer.run.config.optional("lora_rank") or 0
        self._sessions: dict[str, _Session] = {}
        self.catalog = Catalog(trainer.run.config.checkpoint.save, name)

    def capabilities(self, query: Mapping[str, str]) -> Json:
        """The base model."""
        length = self._run.config.data.seq_length
        model = {"model_name": self._name, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    def client_config(self, body: bytes) -> Json:
        """Settings of the client: its API key is not exchanged, and it uses its plain transport."""
        return {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "proto_compress_fwdbwd": False}

    def cancel(self, body: bytes) -> Json:
        """Drop a sample that still waits."""
        self._service.cancel(bodies.read_body(bodies.Retrieve, body).request_id)
        return {}

    # Sessions.

    def create_session(self, body: bytes) -> Json:
        """A new session; its warning tells what differs from Tinker."""
        request = bodies.read_body(bodies.CreateSession, body)
        name = uuid.uuid4().hex
        self._sessions[name] = _Session(user_metadata=request.user_metadata, display_name=request.display_name)
        answer: Json = {"type": "create_session", "session_id": name}
        if self._largest_rank:
            answer["warning_message"] = (
                "train_unembed has no effect on this server: adapters are those of attention and MLP layers"
            )
        return answer

    def heartbeat(self, body: bytes) -> Json:
        """Note that a client is alive."""
        self._session(bodies.read_body(bodies.SessionHeartbeat, body).session_id)
        return {"type": "session_heartbeat"}

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise NotFoundError(
                f"session {name!r} is not known; after a restart of the server make a new ServiceClient, and continue "
                "with create_training_client_from_state_with_optimizer"
            )
        session.alive = time.monotonic()
        return session

    def sessions(self, query: Mapping[str, str]) -> Json:
        """The names of the open sessions, newest first."""
        listed = entries_of_page("sessions", list(reversed(self._sessions)), query)
        return {"sessions": listed["sessions"]}

    def session(self, query: Mapping[str, str]) -> Json:
        """An open session with its trainings and samplers."""
        session = self._sessions.get(query["session"])
        if session is None:
            raise NotFoundError(f"session {query['session']!r} is not open")
        return {
            "training_run_ids": session.models,
            "sampler_ids": list(session.samplers),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def end(self, name: str) -> None:
        """End a session, and forget its trainings and samplers."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._forget([*session.models, *session.samplers])

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.catalog.open_runs.pop(name, None)
            self._service.forget(name)
        self._service.submit({"kind": "remove", "names": list(names)}, _json_answer)

    # Trainings.

    def _new_model(self, session: str, number: int, base_model: str | None) -> str:
        """The name of a new training, for which there must be room."""
        owner = self._session(session)
        if base_model not in (None, self._name):
            raise DataError(f"base_model={base_model!r} is not on this server, which has {self._name!r}")
        count = sum(len(other.models) for other in self._sessions.values())
        if count >= self._most_trainings:
            now = time.monotonic()
            for name in [name for name, other in self._sessions.items() if now - other.alive > SESSION_SECONDS]:
                count -= len(self._sessions[name].models)
                self.end(name)
        model = f"{session}:train:{number}"
        if count >= self._most_trainings and model not in owner.models:
            # The client tries again, until a session has ended or shows no sign of life.
            raise BusyError(f"{count} trainings are open; end one, or start the server with a larger --most-trainings")
        return model

    def _own(self, session: str, model: str, adaptation: Json) -> None:
        """Note a new training."""
        if session in self._sessions and model not in self._sessions[session].models:
            self._sessions[session].models.append(model)
        self.catalog.open_runs[model] = {**adaptation, "time": present_time()}

    def create_model(self, body: bytes) -> Json:
        """A new training."""
        request = bodies.read_body(bodies.CreateModel, body)
        model = self._new_model(request.session_id, request.model_seq_id, request.base_model)
        if (sent := self._service.known(f"create {model}", 1)) is not None:
            return {"request_id": sent, "model_id": model}
        lora = request.lora_config
        adaptation: Json = {"rank": 0, "user_metadata": request.user_metadata or {}}
        if lora is not None:
            adaptation |= {
                "rank": lora.rank,
                "seed": secrets.randbits(31) if lora.seed is None else lora.seed,
                "train_mlp": lora.train_mlp,
                "train_attn": lora.train_attn,
            }

        def created(result: Json) -> Answer:
            self._own(request.session_id, model, adaptation)
            return _json_answer({"model_id": model, "type": "create_model"})

        operation = {"kind": "create", "model_id": model, "adaptation": adaptation}
        number = self._service.submit(operation, created, sequence=f"create {model}", number=1)
        return {"request_id": number, "model_id": model}

    def _model(self, name: str) -> str:
        if name not in self.catalog.open_runs:
            raise NotFoundError(f"model_id={name!r} is not known to this server, or its session has ended")
        self._session(name.split(":")[0])
        self.catalog.open_runs[name]["time"] = present_time()
        return name

    def info(self, body: bytes) -> Json:
        """The description of a training."""
        model = self._model(bodies.read_body(bodies.OfModel, body).model_id)
        rank = self.catalog.open_runs[model]["rank"]
        data = {"arch": "megatron_core", "model_name": self._name, "tokenizer_id": self._tokenizer}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model,
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "model_name": self._name,
        }

    def unload_model(self, body: bytes) -> Json:
        """End a training."""
        model = self._model(bodies.read_body(bodies.OfModel, body).model_id)
        for session in self._sessions.values():
            session.models = [name for name in session.models if name != model]
        self._forget([model])
        return {"request_id": self._service.submit({"kind": "remove", "names": []}, _json_answer), "model_id": model}

    def skip(self, model: str, seq_id: int) -> None:
        """Go on after a refused request of a training."""
        if model in self.catalog.open_runs:
            self._service.skip(model, seq_id)

    def _submit(self, model: str, seq_id: int | None, operation: Json, finish: Callable[[Json], Answer]) -> Json:
        """Queue a request of a training."""
        operation = {**operation, "model_id": model}
        number = self._service.submit(operation, finish, sequence=model, number=seq_id)
        return {"request_id": number, "model_id": model}

    @_in_order
    def forward_backward(self, body: bytes) -> Json:
        """Losses and log-probabilities of data, whose gradients are kept for the next step unless ``forward_only``."""
        request = forward_request(body)
        model = self._model(request.pop("model_id"))
        seq_id = request.pop("seq_id")
        LossCall.of(request, vocab_size=self._run.vocab_size, longest=self._run.config.data.seq_length)
        keeps = not request.pop("forward_only")

        def computed(result: Json) -> Answer:
            outputs = {name: result[name] for name in ("logprobs", "elementwise_loss")}
            return PROTOBUF, forward_output(outputs, {"loss:sum": result["loss"]})

        return self._submit(model, seq_id, {"kind": "forward", "keeps": keeps, **request}, computed)

    @_in_order
    def optim_step(self, body: bytes) -> Json:
        """A step of the optimizer on the gradients that were kept."""
        request = bodies.read_body(bodies.OptimStep, body)
        params = request.adam_params.model_dump(exclude={"type"})
        operation = {"kind": "optim_step", "params": params}
        return self._submit(
            self._model(request.model_id), request.seq_id, operation, lambda result: _json_answer({"metrics": result})
        )

    # Weights.

    @_in_order
    def save_weights(self, body: bytes) -> Json:
        """A checkpoint with the state of the optimizer."""
        request = bodies.read_body(bodies.SaveWeights, body)
        model = self._model(request.model_id)
        path = f"tinker://{model}/weights/{bodies.checked_name(request.path)}"
        operation = {
            "kind": "save",
            "path": path,
            "optimizer": True,
            "overwrite": request.overwrite,
            "note": _note(request),
        }
        answer = _json_answer({"path": path, "type": "save_weights"})
        return self._submit(model, request.seq_id, operation, lambda result: answer)

    @_in_order
    def save_for_sampler(self, body: bytes) -> Json:
        """Weights to sample with: stored with a name, else copied in memory for a new sampler."""
        request = bodies.read_body(bodies.SaveForSampler, body)
        model = self._model(request.model_id)
        answer: Json = {"type": "save_weights_for_sampler"}
        if request.path is not None:
            path = f"tinker://{model}/sampler_weights/{bodies.checked_name(request.path)}"
            answer["path"] = path
            operation = {"kind": "save", "path": path, "optimizer": False, "overwrite": True, "note": _note(request)}
        else:
            session = model.split(":")[0]
            sampler = f"{session}:sample:{request.sampling_session_seq_id or uuid.uuid4().int}"
            answer["sampling_session_id"] = sampler
            self._session(session).samplers[sampler] = sampler
            operation = {"kind": "copy", "copy": sampler}
        return self._submit(model, request.seq_id, operation, lambda result: _json_answer(answer))

    @_in_order
    def load_weights(self, body: bytes) -> Json:
        """Stored weights into a training, or into a new one."""
        request = bodies.read_body(bodies.LoadWeights, body)
        path = bodies.checked_path(request.path)
        if request.session_id is not None and request.model_seq_id is not None and request.model_id is None:
            session = request.session_id
            model = self._new_model(session, request.model_seq_id, request.base_model)
            sequence = f"create {model}"
            seq_id = 1
        elif request.model_id is not None and request.session_id is None:
            model = sequence = self._model(request.model_id)
            session = model.split(":")[0]
            seq_id = request.seq_id or 0
        else:
            raise DataError("load_weights: give model_id, or session_id with model_seq_id")

        def loaded(result: Json) -> Answer:
            self._own(session, model, result)
            return _json_answer({"path": path, "model_id": model, "type": "load_weights"})

        operation = {"kind": "load", "model_id": model, "path": path, "optimizer": request.optimizer}
        operation["user_metadata"] = request.user_metadata
        sent = self._service.submit(operation, loaded, sequence=sequence, number=seq_id)
        return {"request_id": sent, "model_id": model}

    def delete(self, query: Mapping[str, str]) -> None:
        """Delete stored weights."""
        path = self.catalog.find(bodies.checked_path(f"tinker://{query['run']}/{query['kind']}/{query['name']}")).path
        number = self._service.submit({"kind": "delete", "path": path}, _json_answer)
        self._service.future(number).result()

    # Samplers.

    def create_sampler(self, body: bytes) -> Json:
        """A session that samples with stored weights or the base model."""
        request = bodies.read_body(bodies.CreateSampler, body)
        weights = self._weights(request.base_model, request.model_path)
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._session(request.session_id).samplers[sampler] = weights
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _weights(self, base_model: str | None, path: str | None) -> str:
        """The name of weights to sample with."""
        if base_model not in (None, self._name):
            raise DataError(f"base_model={base_model!r} is not on this server, which has {self._name!r}")
        if path is None and base_model is None:
            raise DataError("give base_model, model_path or sampling_session_id")
        return BASE if path is None else bodies.checked_path(path)

    def _sampler(self, name: str) -> str:
        """The weights of a sampler."""
        weights = self._session(name.split(":")[0]).samplers.get(name)
        if weights is None:
            raise NotFoundError(f"sampling_session_id={name!r} is not known to this server")
        return weights

    def sampler(self, query: Mapping[str, str]) -> Json:
        """The description of a sampler."""
        name = query["sampler"]
        weights = self._sampler(name)
        path = weights if weights.startswith("tinker://") else None
        return {"sampler_id": name, "base_model": self._name, "model_path": path}

    def sample(self, body: bytes) -> Json:
        """Samples of a prompt."""
        request = bodies.read_body(bodies.SampleBody, body)
        sampler = request.sampling_session_id
        weights = self._weights(request.base_model, request.model_path) if sampler is None else self._sampler(sampler)
        operation = sample_operation(request, weights, self._run)
        # Samplers of several processes number their requests on their own, and do not depend on the order.
        number = self._service.submit_once(
            f"{sampler}/{request.seq_id}" if sampler is not None and request.seq_id is not None else "",
            operation,
            lambda result: (PROTOBUF, sample_output(result)),
        )
        return {
            "request_id": number,
            "sample_sequence_ids": [f"{number}:{copy}" for copy in range(request.num_samples)],
        }


def _note(request: bodies.SaveWeights | bodies.SaveForSampler) -> Json:
    return {"time": present_time(), "user_metadata": request.user_metadata}


def _json_answer(content: Json) -> Answer:
    return JSON, orjson.dumps(content)
