"""Test the GPT of ``pretrain_gpt.py``: trace a few of its own training steps."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.datasets.loader import packing_of
from megatron_core.features.outer_steps.part import OuterSteps
from megatron_core.parallel.texts import gather_strings
from megatron_core.planner.layout import Layout
from megatron_core.reports.hash_records import HashRecord
from megatron_core.reports.state_hashes import HashedSteps, StateHashes
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import StepResult, evaluate, train_step
from megatron_core.verify.comparison import configured, without_switches
from megatron_core.verify.culprit import Comparer, RankFindings, Recorder, Reference
from megatron_core.verify.groups import GroupsInOneProcess
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.together import Scope, replicas, shared_micro_batches
from megatron_core.verify.trace import RankTrace, Trace, assemble


@dataclass(frozen=True)
class GPTExperiment:
    """Trains the GPT of ``config`` for ``steps`` steps under any layout, on synthetic ragged batches."""

    config: RunConfig
    steps: int = 3
    few_micro_batches: bool = False
    """Without a pipeline use two micro-batches (of an odd number of samples, a few more), which suffices for gradient
    accumulation."""
    own_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that a layout's words cannot express, for every layout except one process."""
    thorough: bool = False
    """Also compare the optimizer's state and an evaluation."""
    plain_reference: bool = False
    """Compare with one process without switches (``without_switches``), so that a fault of a switch in every layout is
    found; not for hashes, because another kernel rounds otherwise."""

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        """Train and return this rank's trace; called in every rank of a world of ``layout.world_size``."""
        return train_traced(self.configured(layout, dtype), self.steps, thorough=self.thorough)

    def hashes(self, layout: Layout, dtype: str) -> list[HashRecord]:
        """Train and return the records of the initial state and of each step, equal on all ranks."""
        return train_hashed(self.configured(layout, dtype), self.steps)

    def record(self, step: int) -> Reference:
        """The tensors of ``step`` in one process, in float64."""
        return record_step(self.configured(Layout(), "float64"), step)

    def compare(self, layout: Layout, reference: Reference, step: int) -> RankFindings:
        """This rank's tensors of ``step`` that differ from those of one process, in float64."""
        return compare_step(self.configured(layout, "float64"), reference, step)

    def reference(self, layout: Layout) -> "GPTExperiment":
        """The training that must give in one process what this one gives under ``layout``.

        It has the same global batches, which without ``global_batch_size`` depend on the number of replicas, and, if
        sequences that are computed together affect each other, the same sequences together.
        """
        training = self.configured(layout, "float64").training
        alone = self.config.flat()
        few = self.few_micro_batches
        if self.config.optional("step_batch_size_schedule") is None:
            alone["global_batch_size"] = training.final_batch_size(layout.dp)
        if scopes := set(shared_micro_batches(self.config).values()):
            of_all = replicas(self.config, layout) if Scope.REPLICAS in scopes else 1
            alone["micro_batch_size"] = training.micro_batch_size * of_all
            few = False
        config = RunConfig.from_flat(alone)
        return replace(self, config=without_switches(config) if self.plain_reference else config, few_micro_batches=few)

    def configured(self, layout: Layout, dtype: str) -> RunConfig:
        """The configuration of a layout in a dtype."""
        config = configured(self.config, layout, dtype, self.own_settings if layout.world_size > 1 else {})
        if self.few_micro_batches and layout.pp == 1:
            samples = config.training.final_batch_size(layout.dp) // layout.dp
            size = next((size for size in range(min(samples // 2, 64), 0, -1) if samples % size == 0), 1)
            config = RunConfig.from_flat(config.flat() | {"micro_batch_size": size})
        return config


def prepared(config: RunConfig) -> Run:
    """Set up a run as ``pretrain_gpt.py`` does, in this rank's world, on synthetic ragged batches or its own data."""
    run = set_up(config, this_world())
    if not config.data.mock_data:
        return run
    packing = packing_of(config.data, run.tokenizer)
    data = config.data
    eod = run.tokenizer.eod if run.tokenizer is not None and (packing or data.eod_mask_loss) else None
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, data.seq_length, eod, masks_eod=data.eod_mask_loss))
    return run


def train_traced(config: RunConfig, steps: int, *, untraced: int = 0, thorough: bool = False) -> RankTrace:
    """Train ``steps`` steps as ``pretrain_gpt.py`` does, in this rank's world, after ``untraced`` others.

    ``thorough``: evaluate after them, and trace the optimizer's state, too (not that of outer groups).
    """
    if in_one_process(config):
        return trace_groups(config, steps)
    run = _trained(config, untraced)
    trace = RankTrace(owner=outer_group_of(run))
    hooks = StepHooks(before_update=partial(_add_gradients, trace, run))
    for _ in range(steps):
        result = train_step(run, hooks=hooks)
        result_of_group = (result.loss, result.grad_norm, _reports(result))
        reports = run.groups.outer_reports
        if result.groups or reports.size() == 1:
            _add_step(trace, run.state.iteration - 1, [result_of_group])
        else:  # the groups have not heard from one another
            texts = gather_strings(json.dumps(result_of_group), reports, run.world.device)
            _add_step(trace, run.state.iteration - 1, [json.loads(text) for text in texts])
    trace.add_weights(run.data_parallel, run.stages.values())
    groups = run.part(OuterSteps)
    if outer_group_of(run) and groups is not None:
        pieces = (piece for fragment in groups.outer.fragments for piece in fragment.parts(fragment.weights))
        trace.add_global((piece.name, piece.parameter, piece.start, piece.stop, values) for piece, values in pieces)
    elif thorough:
        trace.add_state(chain(*run.saver.pieces()))
        trace.add_evaluation(evaluation_losses(run))
    return trace


def _add_gradients(trace: RankTrace, run: Run) -> None:
    trace.add_gradients(run.data_parallel, run.state.iteration, run.optimizer.loss_scale.scale)


def evaluation_losses(run: Run) -> dict[str, float]:
    """Losses of the first validation batch, with the weights and with those that features evaluate in their place."""
    dataset = run.splits.valid or run.train_loader.dataset
    contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {"": nullcontext}
    for part in run.parts:
        contexts |= part.evaluated_weights()
    run.optimizer.synchronize()
    losses: dict[str, float] = {}
    for suffix, context in contexts.items():
        with context():
            losses[f"validation{suffix}"] = evaluate(run, dataset, 1)
    return losses


def in_one_process(config: RunConfig) -> bool:
    """Whether this rank is alone and computes all outer groups of ``config``, one after the other."""
    return config.num_groups > 1 and this_world().size == 1


def outer_group_of(run: Run) -> str:
    """The name of this rank's outer group; empty without groups."""
    return f"group {run.groups.outer.rank()}" if run.groups.outer.size() > 1 else ""


def trace_groups(config: RunConfig, steps: int) -> RankTrace:
    """As ``train_traced``, of all groups in one process."""
    groups = GroupsInOneProcess(config, prepared)
    trace = RankTrace()

    def hooks(group: int) -> StepHooks:
        def add() -> None:
            trace.owner = f"group {group}"
            _add_gradients(trace, groups.runs[group])

        return StepHooks(before_update=add)

    for step in range(steps):
        results = groups.step(hooks)
        _add_step(trace, step, [(result.loss, result.grad_norm, _reports(result)) for result in results])
    for number, run in enumerate(groups.runs):
        trace.owner = f"group {number}"
        trace.add_weights(run.data_parallel, run.stages.values())
    trace.add_global(groups.global_weights())
    return trace


def train_hashed(config: RunConfig, steps: int) -> list[HashRecord]:
    """Train ``steps`` steps as ``train_traced`` does; return the record of the initial state and of each step."""
    run = prepared(config)
    state = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
    hashed = HashedSteps(state, by_tensor=True)
    records = [hashed.initial(run.state.iteration)]
    hooks = StepHooks(before_update=lambda: hashed.before_update(run.state.iteration + 1))
    for _ in range(steps):
        result = train_step(run, hooks=hooks)
        records.append(hashed.after_step(result.loss, result.grad_norm))
    return records


def record_step(config: RunConfig, step: int) -> Reference:
    """The tensors of ``step``, from 0, in one process."""
    if in_one_process(config):
        return record_step_of_groups(config, step)
    run = _trained(config, step)
    recorder = Recorder(run)
    train_step(run)
    return recorder.reference


def record_step_of_groups(config: RunConfig, step: int) -> Reference:
    """As ``record_step``, of all groups in one process."""
    groups = GroupsInOneProcess(config, prepared)
    for _ in range(step):
        groups.step(lambda group: StepHooks())
    recorders = [Recorder(run, f"group {group}") for group, run in enumerate(groups.runs)]
    groups.step(lambda group: StepHooks())
    joint = Reference()
    for recorder in recorders:
        joint.weights |= recorder.reference.weights
        joint.values |= recorder.reference.values
    return joint


def compare_step(config: RunConfig, reference: Reference, step: int) -> RankFindings:
    """This rank's tensors of ``step`` that differ from those of one process."""
    run = _trained(config, step)
    comparer = Comparer(run, reference, group=outer_group_of(run))
    train_step(run)
    return comparer.found


def _trained(config: RunConfig, steps: int) -> Run:
    """A run after ``steps`` steps."""
    run = prepared(config)
    for _ in range(steps):
        train_step(run)
    return run


def _add_step(
    trace: RankTrace, step: int, results: Sequence[tuple[float, float, Mapping[str, Sequence[float]]]]
) -> None:
    """Add loss, gradient norm and ``_reports`` of a step, of all groups together or of each of them."""
    losses, norms, reports = zip(*results, strict=True)
    trace.losses.append(sum(losses) / len(results))
    trace.norms.append(sum(norms) / len(results))
    for name in reports[0]:
        total = np.sum([report[name] for report in reports], axis=0)
        trace.add_reports(step, {name: total if name.startswith("load of layer") else total / len(results)})
    if len(results) > 1:
        each_group = [number for pair in zip(losses, norms, strict=True) for number in pair]
        trace.add_reports(step, {"loss and norm of each group": each_group})


def _reports(result: StepResult) -> dict[str, Sequence[float]]:
    """The auxiliary losses of layers, and the load of their experts."""
    added: dict[str, Sequence[float]] = {name: [value] for name, value in result.auxiliary_losses.items()}
    if result.groups:
        added["loss and norm of each group"] = [number for pair in result.groups for number in pair]
    return added | {f"load of layer {layer}": load for layer, load in result.expert_load.items()}


def trace_training(config: RunConfig, world_size: int, steps: int = 3, *, thorough: bool = False) -> Trace:
    """Train ``config`` on ``world_size`` ranks of this machine and assemble their traces."""
    train = partial(train_traced, thorough=thorough)
    return assemble(run_ranks(world_size, train, config, steps, backend=config.parallel.distributed_backend))


class RaggedDataset:
    """Random tokens with loss masks of different lengths; in every seventh sample all tokens are masked.

    Micro-batches and data-parallel ranks have different numbers of unmasked tokens, so that a mean of means, or a
    division in the wrong place, changes the loss and every gradient.
    With ``eod`` on average every sixth token ends a document; ``masks_eod``: these tokens have no loss.
    """

    def __init__(
        self, vocab_size: int, sequence_length: int, eod: int | None = None, *, masks_eod: bool = False
    ) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.eod = eod
        self.masks_eod = masks_eod

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of an infinite sequence."""
        sample = _ragged(self.vocab_size, self.sequence_length, self.eod, index).copy()
        if self.masks_eod:
            sample["loss_mask"] = sample["loss_mask"] * (sample["tokens"] != self.eod)
        return sample


@lru_cache(maxsize=4096)
def _ragged(vocab_size: int, length: int, eod: int | None, index: int) -> Sample:
    """The sample of ``RaggedDataset``, which the ranks of a simulated world share."""
    text = np.array([mix64(7, index, i) % vocab_size for i in range(length + 1)], dtype=np.int64)
    if eod is not None:
        text[[mix64(9, index, i) % 6 == 0 for i in range(length + 1)]] = eod
    counted = 0 if index % 7 == 3 else 1 + mix64(8, index) % length
    mask = (np.arange(length) < counted).astype(np.float32)
    for shared in (text, mask):
        shared.setflags(write=False)
    return Sample(tokens=text[:-1], labels=text[1:], loss_mask=mask)
