"""Post-training that a program drives: log-probabilities, and steps on an objective of them, in any layout."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_core.checkpoint import find_checkpoint
from megatron_core.config import RunConfig
from megatron_core.config.rules_data import given_sources
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.lora.adapters import without_adapters
from megatron_core.features.offload.state import OffloadedState
from megatron_core.features.preferences.frozen import FrozenModel, last_outputs, load_frozen
from megatron_core.features.value_head.settings import has_value_head
from megatron_core.models import GPTModel
from megatron_core.parallel import World, start_world
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.post_training.hugging_face_weights import NamedTensor, hugging_face_weights
from megatron_core.post_training.objectives import Reads, TokenObjective
from megatron_core.post_training.policy_loss import PolicyLoss, Scores, Values
from megatron_core.post_training.step_data import StepData
from megatron_core.post_training.step_settings import StepSettings, used_in_step
from megatron_core.post_training.teacher import Divergences, teacher_of
from megatron_core.post_training.trajectories import PackedRows, RowRoom, Trajectory, value_names
from megatron_core.post_training.weights import LiveWeights
from megatron_core.training.driver import PipelineRank, gather_weights
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run, message_format, set_up
from megatron_core.training.state import open_checkpoint
from megatron_core.training.step import StepInput, StepResult, train_on_batches
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec


@dataclass(frozen=True)
class TokenScores:
    """Scores of the learned tokens of each trajectory, in order: float32 or wider, equal on all ranks."""

    log_probs: list[Tensor]
    entropy: list[Tensor] | None
    """Entropy of each token's distribution in nats, on request."""


class Trainer:
    """A model and its optimizer in any layout of ``RunConfig``, for programs with a loop of their own.

    Every rank calls the same methods with the same trajectories, which are a few numbers for each token; each rank
    computes its part. With ``pack`` several trajectories share a row of ``seq_length`` positions, and do not attend to
    each other.

    Errors: ``ConfigError`` for settings that are not legal, ``DataError`` for trajectories that are not.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        *,
        pack: bool = True,
        layer_specs: LayerSpecs = layer_spec,
    ) -> None:
        """``world``: ranks of a program that has joined torch.distributed itself; None: those of the launcher, which
        join here."""
        joins = world is None
        world = World.from_environment() if world is None else world
        config = _without_data(config)
        check(config, world.size)
        parallel = config.parallel
        if joins:
            timeout = parallel.distributed_timeout_minutes
            start_world(world, backend=parallel.distributed_backend, timeout_minutes=timeout)
        self.run: Run = set_up(config, world, layer_specs=layer_specs, reads_data=False)
        self._room = _row_room(config, pack=pack)
        self._offloaded: OffloadedState | None = None

    @property
    def iteration(self) -> int:
        """Number of optimizer steps so far, including those before a resume."""
        return self.run.state.iteration

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.run.world.rank == 0

    @property
    def reads(self) -> Reads:
        """The numbers of tokens that objectives of this model read: values with ``--value-head``."""
        return "values" if has_value_head(self.run.config) else "log_probs"

    # Scores.

    def log_probs(
        self,
        trajectories: Sequence[Trajectory],
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        adapters: bool = True,
    ) -> TokenScores:
        """Log-probabilities of the learned tokens under the present weights, without dropout and gradients.

        ``temperature``: log softmax(z / temperature), as the tokens were sampled. ``adapters=False``: of the model
        without its low-rank adapters, a reference that takes no memory.
        """
        stages = self.run.stages
        with nullcontext() if adapters else without_adapters(list(stages.values())):
            numbers = self.score(trajectories, stages, "log_probs", temperature=temperature, with_entropy=with_entropy)
        return TokenScores(*numbers)

    def values(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Values of a model with ``--value-head`` at the position before each learned token, as ``log_probs``.

        They are the values of the states in which a policy chose these tokens. ``Trajectory.of_text`` learns the
        position after the last token, whose value is the reward of a reward model.
        """
        return self.score(trajectories, self.run.stages, "values")[0]

    def _scores(self, reads: Reads, temperature: float, *, with_entropy: bool) -> Scores:
        """Check that the model computes these numbers of tokens, and return them for its last stage."""
        if reads != self.reads:
            raise ConfigError(
                f"value_head={self.reads == 'values'}: the model has {self.reads}, not {reads}; use the methods and "
                f"objectives of {self.reads}, or {'remove' if self.reads == 'values' else 'add'} --value-head"
            )
        self._check_temperature(temperature)
        if reads == "log_probs":
            return Scores(self.run, temperature=temperature, with_entropy=with_entropy)
        if temperature != 1.0 or with_entropy:
            raise ConfigError(
                f"temperature={temperature} and an entropy are those of distributions of tokens, and the model has "
                "value_head=True; leave them out"
            )
        return Values(self.run)

    @staticmethod
    def _check_temperature(temperature: float) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"temperature={temperature} must be a finite number > 0")

    def score(
        self,
        trajectories: Sequence[Trajectory],
        stages: Mapping[int, GPTModel],
        reads: Reads,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        pipeline: PipelineRank | None = None,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Log-probabilities or values of the learned tokens by ``stages``, which have the layout of the trainer, and
        entropies on request."""
        if stages is self.run.stages:
            self._check_present()
        scores = self._scores(reads, temperature, with_entropy=with_entropy)
        data = StepData(self.run, self._rows(trajectories), ())
        options = {"logit_losses": scores.logit_losses(len(data.batches)), "router_replays": data.router_replays}
        outputs = last_outputs(self.run, stages, data.batches, lambda _, output: -output, pipeline, **options)
        numbers = data.collect(outputs)
        return numbers, data.collect(scores.entropies) if scores.with_entropy else None

    def frozen_copy(self) -> "FrozenPolicy":
        """A copy of the present weights without gradients, in the layout of the trainer, such as a reference."""
        run = self.run
        present = LiveWeights(run.data_parallel, run.vocab_size, run.world.device)
        return FrozenPolicy(self, load_frozen(run, run.config, run.layer_specs, present))

    def teacher(self) -> "FrozenPolicy":
        """The model of ``--kd-teacher``, for its log-probabilities."""
        teacher = teacher_of(self.run)
        return FrozenPolicy(self, teacher.model, teacher.config)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Yield the present weights as ``transformers`` names them; see ``hugging_face_weights``."""
        return hugging_face_weights(self.run, dtype)

    # Steps.

    def train_on(
        self,
        trajectories: Sequence[Trajectory],
        objective: TokenObjective,
        *,
        temperature: float = 1.0,
        **settings: Unpack[StepSettings],
    ) -> StepResult:
        """Take one optimizer step on ``objective`` of all ``trajectories``; the result is equal on all ranks.

        ``settings``: ``lr``, ``weight_decay``, ``betas``, ``eps`` and ``clip_grad`` of this step, instead of the
        configured ones.
        """
        self._check_present()
        run = self.run
        rows = self._rows(trajectories)
        data = StepData(run, rows, value_names(trajectories))
        if objective.beta is None:
            scores = self._scores(objective.reads, temperature, with_entropy=objective.uses_entropy)
        else:
            self._check_temperature(temperature)
            scores = Divergences(run, data.batches, beta=objective.beta, temperature=temperature)
        size = StepSize(run.state.consumed_samples, len(rows.rows), len(data.batches), rows.length)
        configured = run.objective
        run.objective = PolicyLoss(run, objective, data.tokens, data.weights(objective), scores, data.router_replays)
        try:
            with used_in_step(run, size, settings) as rates:
                return train_on_batches(run, StepInput(size, data.batches, rates))
        finally:
            run.objective = configured

    def train_on_loss(
        self,
        trajectories: Sequence[Trajectory],
        loss: Callable[[list[Tensor]], Tensor],
        *,
        temperature: float = 1.0,
        **settings: Unpack[StepSettings],
    ) -> StepResult:
        """Take one optimizer step on any function of the log-probabilities, or values, of all trajectories.

        ``loss`` receives the numbers of the learned tokens of each trajectory and returns a scalar, the same on all
        ranks; it may relate trajectories to each other, as losses of preferences do. They are computed twice: first
        for ``loss``, then with its gradient as the weight of each token. The first has no dropout.
        """
        numbers, _ = self.score(trajectories, self.run.stages, self.reads, temperature=temperature)
        leaves = [of_trajectory.detach().requires_grad_() for of_trajectory in numbers]
        with torch.enable_grad():
            value = loss(leaves)
        if value.dim() or not value.requires_grad:
            raise DataError(
                f"the loss has the shape {list(value.shape)}; it must be a scalar that depends on the numbers of tokens"
            )
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        weighted = [
            replace(trajectory, values={"slope": torch.zeros_like(leaf) if slope is None else slope})
            for trajectory, leaf, slope in zip(trajectories, leaves, slopes, strict=True)
        ]
        linear = TokenObjective(loss=lambda numbers, batch: batch["slope"] * numbers, mean_over="sum", reads=self.reads)
        result = self.train_on(weighted, linear, temperature=temperature, **settings)
        return replace(result, loss=float(value.detach()))

    def _rows(self, trajectories: Sequence[Trajectory]) -> PackedRows:
        """Pack the trajectories, after checking that they are legal and the same on all ranks."""
        run = self.run
        if not trajectories:
            raise DataError("no trajectories; give at least one")
        at_once = run.config.training.micro_batch_size * run.groups.size("dp")
        rows = PackedRows.of(trajectories, self._room, at_once)
        for number, trajectory in enumerate(trajectories):
            if min(trajectory.tokens) < 0 or max(trajectory.tokens) >= run.vocab_size:
                raise DataError(
                    f"trajectory {number} has token ids outside of the vocabulary, 0 to {run.vocab_size - 1}"
                )
        digest = rows.digest()
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=run.world.device)
        all_reduce_(extremes, run.groups.group(WORLD), maximum=True)
        largest, negative = extremes.tolist()
        if largest != -negative:
            raise DataError(
                "the trajectories differ between ranks: every rank must pass the same trajectories in the same order; "
                "sample with the same seed on all ranks, or send them to all ranks"
            )
        return rows

    # State.

    @property
    def stored(self) -> dict[str, dict[str, Any]]:
        """Values of the program by name, as JSON has them and equal on all ranks: ``save`` writes them, too."""
        return self.run.state.callbacks

    def save(self) -> None:
        """Save model, optimizer and counters in the folder ``--save``."""
        self._check_present()
        if self.run.config.checkpoint.save is None:
            raise ConfigError("save=None: give a folder with --save")
        self.run.saver.save(self.run.state)

    def load(self) -> None:
        """Return to the newest checkpoint in the folder ``--save``: weights, optimizer and counters."""
        self._check_present()
        run = self.run
        run.saver.finish()
        settings = run.config.checkpoint
        if settings.save is None or find_checkpoint(settings.save) is None:
            raise ConfigError(f"save={settings.save!r} holds no checkpoint to return to; call save() before load()")
        config = replace(run.config, checkpoint=settings.for_resume())
        reader, _ = open_checkpoint(config, run.world.device)
        run.data_parallel.finish_param_sync()
        run.state = run.load(config, reader)
        # Units that ZeRO 3 keeps whole have the weights from before.
        gather_weights([run.data_parallel])

    def offload(self, folder: str | Path | None = None) -> int:
        """Move weights and optimizer state to host memory, or to files in ``folder``, and free the gradients.

        Until ``onload`` the model cannot be used, but its copies can: a sampler's and those of ``frozen_copy``. On a
        CPU a folder is needed. Returns the bytes that are freed on this rank's device.
        """
        self._check_present()
        self._offloaded = OffloadedState(
            self.run.data_parallel, self.run.optimizer, None if folder is None else Path(folder)
        )
        return self._offloaded.nbytes

    def onload(self) -> None:
        """Undo ``offload``; every bit of weights and state is as before."""
        if self._offloaded is None:
            raise ConfigError("onload() without offload(): the state is in place; remove the call")
        self._offloaded.restore()
        self._offloaded = None

    def _check_present(self) -> None:
        if self._offloaded is not None:
            raise ConfigError("the model is offloaded; call onload() before this method")

    def close(self) -> None:
        """Complete the checkpoints under way."""
        self.run.saver.close()


class FrozenPolicy:
    """A model without gradients in the layout of a trainer, such as the reference of a divergence."""

    def __init__(self, trainer: Trainer, frozen: FrozenModel, config: RunConfig | None = None) -> None:
        """``config``: the settings of the model if they are not the trainer's."""
        self._trainer = trainer
        self._frozen = frozen
        run = trainer.run
        message = run.message if config is None else message_format(config, run.split, run.world.device)
        self._pipeline = PipelineRank(p2p=run.p2p, message=message, overlap_p2p=run.overlap_p2p)

    def log_probs(self, trajectories: Sequence[Trajectory], *, temperature: float = 1.0) -> TokenScores:
        """See ``Trainer.log_probs``."""
        numbers = self._trainer.score(
            trajectories, self._frozen.stages, "log_probs", temperature=temperature, pipeline=self._pipeline
        )
        return TokenScores(*numbers)

    def values(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """See ``Trainer.values``."""
        return self._trainer.score(trajectories, self._frozen.stages, "values", pipeline=self._pipeline)[0]


def _without_data(config: RunConfig) -> RunConfig:
    """The configuration of a run whose caller passes the data of each step."""
    for name in given_sources(config.data):
        value = getattr(config.data, name)
        raise ConfigError(f"{name}={value} is not read by Trainer: pass trajectories to its methods, and remove it")
    if config.num_groups > 1:
        raise ConfigError(f"outer groups ({config.num_groups}) cannot be used with Trainer; use one group")
    return replace(config, data=replace(config.data, dataloader_type="external"))


def _row_room(config: RunConfig, *, pack: bool) -> RowRoom:
    """The rows of a layout."""
    parallel = config.parallel
    longest = config.data.seq_length
    if parallel.layout_invariant:
        # Products have the shapes of generation, which computes whole chunks from the start of each text.
        return RowRoom(longest, align=longest // parallel.layout_invariant_chunks, whole=True, pack=pack)
    tensor_ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    context_chunks = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
    return RowRoom(longest, multiple=tensor_ranks * context_chunks, pack=pack)
