"""The operations of Tinker's API on all ranks; rank 0 keeps their results."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from megatron_core.checkpoint.folder import complete_iterations, iteration_folder
from megatron_core.checkpoint.removal import remove
from megatron_core.errors import DataError
from megatron_core.post_training.tinker_server.catalog import folder_of
from megatron_core.post_training.tinker_server.losses import LossCall, joint_objective
from megatron_core.post_training.tinker_server.sampling import Json, RequestSampler
from megatron_core.post_training.tinker_server.trainings import Adaptation, Trainings
from megatron_core.post_training.trainer import Trainer

BASE = "base"
"""The name of the base model among the weights to sample with."""


class Operations:
    """Executes operations, which are JSON objects with the name of a method in ``kind``; all ranks call ``run``.

    ``forward`` with ``keeps`` computes losses and keeps the data; ``optim_step`` computes the gradients of all kept
    data in one step of the engine. The weights do not change in between, so that this equals a sum of gradients, in
    every layout; it costs one more forward. ``most_copies``: copies of weights in memory to sample with.
    """

    def __init__(self, trainer: Trainer, *, most_copies: int, **sampling: Any) -> None:
        self.trainer = trainer
        self.trainings = Trainings(trainer)
        self.sampler = RequestSampler(trainer, self.trainings, **sampling)
        self._most_copies = most_copies
        self._copies: list[str] = []
        self._kept: dict[str, list[LossCall]] = {}
        parameters = [p for bucket in trainer.run.data_parallel.buckets for p in bucket.parameters]
        # One group, because torch.optim.AdamW decays all parameters, and Tinker's optimizer equals it. Each step sets
        # its rates.
        trainer.run.optimizer.use_groups([{"params": parameters}])
        kinds = ("create", "forward", "optim_step", "save", "load", "copy", "remove", "delete", "cancel")
        self._methods: dict[str, Callable[[Json], Json]] = {name: getattr(self, f"_{name}") for name in kinds}

    def run(self, operation: Json) -> Json:
        """Execute an operation other than ``sample``; a collective call."""
        return self._methods[operation["kind"]](operation)

    def _create(self, operation: Json) -> Json:
        self.trainings.create(operation["model_id"], Adaptation(**operation["adaptation"]))
        self._kept[operation["model_id"]] = []
        return {}

    def _remove(self, operation: Json) -> Json:
        for name in operation["names"]:
            self._kept.pop(name, None)
            self._forget(name)
        return {}

    def _cancel(self, operation: Json) -> Json:
        self.sampler.drop(operation["number"])
        return {}

    def _forget(self, name: str) -> None:
        """Forget a training or a copy of weights, also in the sampler."""
        self.trainings.remove(name)
        self.sampler.forget(name)
        if name in self._copies:
            self._copies.remove(name)

    def _forward(self, operation: Json) -> Json:
        trainer = self.trainer
        name = operation["model_id"]
        self.trainings.activate(name)
        longest = trainer.run.config.data.seq_length
        call = LossCall.of(operation, vocab_size=trainer.run.vocab_size, longest=longest)
        log_probs, losses = call.losses(trainer.log_probs(call.trajectories(0)).log_probs)
        if operation["keeps"]:
            self._kept[name].append(call)
        return {
            "logprobs": [scores.tolist() for scores in log_probs],
            "elementwise_loss": [loss.tolist() for loss in losses],
            "loss": sum(float(loss.double().sum()) for loss in losses),
        }

    def _optim_step(self, operation: Json) -> Json:
        name = operation["model_id"]
        self.trainings.activate(name)
        calls = self._kept[name]
        if not calls:
            raise DataError("optim_step without gradients; call forward_backward before it")
        params = operation["params"]
        self._kept[name] = []
        trajectories = [entry for number, call in enumerate(calls) for entry in call.trained(number)]
        result = self.trainer.train_on(
            trajectories,
            joint_objective(calls),
            lr=params["learning_rate"],
            weight_decay=params["weight_decay"],
            betas=(params["beta1"], params["beta2"]),
            eps=params["eps"],
            clip_grad=params["grad_clip_norm"],
        )
        if result.skipped:
            raise DataError(f"the gradient norm is {result.grad_norm}: the weights were not changed")
        return {"grad_norm": result.grad_norm}

    def _save(self, operation: Json) -> Json:
        folder = folder_of(self.trainer.run.config.checkpoint.save, operation["path"])
        self.trainings.save(
            operation["model_id"],
            folder,
            optimizer=operation["optimizer"],
            replaces=operation["overwrite"],
            note=operation["note"],
        )
        self._forget(operation["path"])
        return {}

    def _delete(self, operation: Json) -> Json:
        folder = folder_of(self.trainer.run.config.checkpoint.save, operation["path"])
        if self.trainer.is_first_rank:
            for iteration in complete_iterations(folder):
                remove(iteration_folder(folder, iteration))
        self._forget(operation["path"])
        return {}

    def _load(self, operation: Json) -> Json:
        folder = folder_of(self.trainer.run.config.checkpoint.save, operation["path"])
        name = operation["model_id"]
        self.trainings.load(name, folder, optimizer=operation["optimizer"], user_metadata=operation["user_metadata"])
        # Gradients of the weights that were replaced are of no use.
        self._kept[name] = []
        return asdict(self.trainings.adaptation(name))

    def _copy(self, operation: Json) -> Json:
        self.trainings.copy_weights(operation["model_id"], operation["copy"])
        self._add_copy(operation["copy"])
        return {}

    def _add_copy(self, name: str) -> None:
        """Note a copy of weights, and forget the oldest one if there are too many."""
        self._copies.append(name)
        while len(self._copies) > self._most_copies:
            self._forget(self._copies[0])

    def start_samples(self, weights: str, requests: Mapping[str, Json]) -> None:
        """Add requests by number that sample with ``BASE``, a copy, or the path of stored weights; a collective call.

        The sampler must be idle, or have these weights.
        """
        if weights not in self.trainings:
            if weights == BASE:
                self.trainings.add_base(BASE)
            elif weights.startswith("tinker://"):
                folder = folder_of(self.trainer.run.config.checkpoint.save, weights)
                self.trainings.load("loading", folder, optimizer=False)
                self.trainings.copy_weights("loading", weights)
                self.trainings.remove("loading")
                self._add_copy(weights)
            else:
                raise DataError(
                    f"the weights of this sampler are no longer kept: the server keeps {self._most_copies} copies "
                    "(--most-copies); make a new sampling client, or save the weights with a name"
                )
        if not self.sampler.has_weights(weights):
            self.sampler.use_weights(weights)
        for number, request in requests.items():
            self.sampler.add(number, request)
