"""What holds a run back: rules over its records, each with evidence, a share of time, and what to change.

A share is the part of all ranks' time that the cause takes, so that causes compare; a gain is the part of a step's time
that a change is predicted to save. Rules and sources are listed in docs/monitoring.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megatron_core.monitor.expert_load import STARVED_SHARE
from megatron_core.monitor.summary import Summary

SLOW = 1.25
"""A rank is slow if its work takes so much longer than the same work on others."""
UNEQUAL = 1.15
"""Stages are unequal if the largest has so much more work than the mean."""
FULL = 0.9
"""Memory is short from this share of the device on."""


@dataclass(frozen=True)
class Change:
    """What to change, and the share of a step's time that it is predicted to save."""

    text: str
    gain: float


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    share: float
    evidence: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All causes, the largest first."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """For a terminal."""
        lines = [f"note: {note}" for note in self.notes]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding.cause}: {finding.share:.1%} of the time. {finding.evidence}")
            lines += [f"   - {change.text} (predicted gain {change.gain:.1%})" for change in finding.changes]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def diagnose(summary: Summary) -> Diagnosis:
    """Apply every rule; without any other cause the run is compute-bound."""
    found = [finding for rule in RULES if summary.ranks for finding in rule(summary)]
    found.sort(key=lambda finding: -finding.share)
    findings = [
        Finding(f.cause, f.share, f.evidence, tuple(sorted(f.changes, key=lambda change: -change.gain))) for f in found
    ]
    if summary.ranks:
        bound = _compute_bound(summary)
        findings.insert(0, bound) if not findings else findings.append(bound)
    notes = list(summary.records.notes)
    if not summary.ranks:
        notes.append("no step has times: nothing can be said about the bottleneck")
    return Diagnosis(tuple(findings), tuple(notes))


def _setting(summary: Summary, name: str, default: Any) -> Any:
    value = summary.config.get(name)
    return default if value is None else value


def _zero_stage(summary: Summary) -> int:
    stage = summary.config.get("zero_stage")
    return int(_setting(summary, "use_distributed_optimizer", False)) if stage is None else stage


def _paces(summary: Summary) -> dict[int, float]:
    """Seconds of each rank for one unit of its work."""
    paces = {}
    for rank, times in summary.ranks.items():
        work = summary.records.header(rank).get("work") or 1.0
        paces[rank] = times.compute / times.steps / work
    return paces


def slow_rank(summary: Summary) -> Iterator[Finding]:
    """A rank needs longer than others for the same work: all that wait for it lose the difference."""
    paces = _paces(summary)
    for rank, pace in paces.items():
        others = [other for at, other in paces.items() if at != rank]
        if not others or pace < SLOW * median(others) or not median(others):
            continue
        times = summary.ranks[rank]
        lost = times.compute * (1 - median(others) / pace) / times.seconds
        evidence = (
            f"{summary.name(rank)} computes {pace / median(others):.2f} times as long as others for the same work, "
            f"{times.compute / times.steps:.3g} s a step"
        )
        yield Finding(
            "slow rank", lost, evidence,
            (Change("test or replace that device, and look for other programs, heat and power limits there", lost),),
        )  # fmt: skip


def imbalanced_stage(summary: Summary) -> Iterator[Finding]:
    """A pipeline stage has more work than the mean: the others wait for it at every micro-batch."""
    work: dict[int, float] = {}
    for rank in summary.ranks:
        work[summary.coordinate(rank, "pp")] = summary.records.header(rank).get("work") or 0.0
    mean = sum(work.values()) / max(len(work), 1)
    if len(work) < 2 or not mean or max(work.values()) < UNEQUAL * mean:
        return
    stage = max(work, key=lambda at: work[at])
    rank = next(rank for rank in summary.ranks if summary.coordinate(rank, "pp") == stage)
    times, excess = summary.ranks[rank], 1 - mean / work[stage]
    lost = times.compute / times.seconds * excess
    yield Finding(
        "imbalanced stage",
        lost,
        f"pipeline rank {stage} has {work[stage] / mean:.2f} times the mean work of a stage",
        (
            Change(
                "move layers away from it with --pipeline-model-parallel-layout, --decoder-last-pipeline-num-layers or "
                "--account-for-loss-in-pipeline-split",
                lost,
            ),
        ),
    )


def pipeline_bubble(summary: Summary) -> Iterator[Finding]:
    """Ranks wait for other stages as the schedule says: (p - 1) / (v m + p - 1) of the time with 1F1B."""
    p = _setting(summary, "pipeline_model_parallel_size", 1)
    measured = summary.share("pipeline")
    if p == 1 or measured < 0.05:
        return
    m, v = _micro_batches(summary), _chunks(summary)
    planned = (p - 1) / (v * m + p - 1)
    share = min(measured, planned)

    def gain(bubble: float) -> float:
        return max(1 - (1 - share) / (1 - min(bubble, share)), 0.0)

    changes = [Change(f"take {2 * m} micro-batches: double --global-batch-size", gain((p - 1) / (2 * v * m + p - 1)))]
    size = _setting(summary, "micro_batch_size", 1)
    if size > 1:
        changes.append(Change(f"halve --micro-batch-size to {size // 2}", gain((p - 1) / (2 * v * m + p - 1))))
    if v == 1 and _setting(summary, "num_layers", 1) >= 2 * p:
        text = "interleave two chunks a rank: --num-virtual-stages-per-pipeline-rank 2"
        changes.append(Change(text, gain((p - 1) / (2 * m + p - 1))))
    changes.append(Change("split the backward: --pipeline-schedule zb_h1", gain(planned / 3)))
    evidence = (
        f"ranks wait for other stages for {measured:.1%} of the time; {m} micro-batches over {p} stages"
        f"{f' in {v} chunks' if v > 1 else ''} leave at least {planned:.1%}"
    )
    yield Finding("pipeline bubble", share, evidence, tuple(changes))
    unexplained = measured - planned
    if unexplained > 0.1 and not [*slow_rank(summary), *imbalanced_stage(summary)]:
        text = "look at the links between stages (tools/diagnose.py --machine), and keep --overlap-p2p-communication on"
        evidence = f"waiting for other stages takes {measured:.1%}, {unexplained:.1%} more than the schedule needs"
        yield Finding("slow messages between stages", unexplained, evidence, (Change(text, unexplained),))


def _micro_batches(summary: Summary) -> int:
    config = summary.config
    shards = [config.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")]
    ranks = summary.records.header().get("world_size", 1)
    copies = max(ranks // (shards[0] * shards[1] * (config.get("context_parallel_size") or 1)), 1)
    steps = summary.records.steps()
    batch = steps[-1]["global_batch_size"] if steps else config.get("global_batch_size") or 1
    return max(batch // (copies * (config.get("micro_batch_size") or 1)), 1)


def _chunks(summary: Summary) -> int:
    config = summary.config
    layers = config.get("num_layers_per_virtual_pipeline_stage")
    if layers:
        return max(config["num_layers"] // (config.get("pipeline_model_parallel_size") or 1) // layers, 1)
    return config.get("num_virtual_stages_per_pipeline_rank") or 1


def exposed_communication(summary: Summary) -> Iterator[Finding]:
    """Ranks exchange data and compute nothing meanwhile."""
    by_axes: dict[str, float] = {}
    kinds: dict[str, list[str]] = {}
    for kind, (sending, _) in summary.communication().items():
        axes = kind.rpartition(" ")[0]
        by_axes[axes] = by_axes.get(axes, 0.0) + sending
        if sending >= 0.01:
            rates = summary.rates(kind)
            rate = f" at {median(rates.values()) / 1e9:.3g} GB/s" if rates else ""
            kinds.setdefault(axes, []).append(f"{kind.rpartition(' ')[2]} {sending:.1%}{rate}")
    for axes, share in by_axes.items():
        if share >= 0.05:
            evidence = f"ranks wait for data of the group {axes}: {', '.join(kinds.get(axes, ['many small ones']))}"
            yield Finding(
                f"exposed communication over {axes}", share, evidence, tuple(_communicate_less(summary, axes, share))
            )


def _communicate_less(summary: Summary, axes: str, share: float) -> Iterator[Change]:
    first = axes.split("-")[0].split(" ")[0]
    if first == "tp":
        tp = _setting(summary, "tensor_model_parallel_size", 1)
        # A ring of half as many ranks sends (n/2-1)/(n/2) for (n-1)/n, of activations of as many tokens.
        less = share * (1 - (tp - 2) / (tp - 1)) if tp > 1 else 0.0
        yield Change(
            f"halve --tensor-model-parallel-size to {max(tp // 2, 1)} and use these ranks for data parallelism", less
        )
        if tp > 1 and not _setting(summary, "tp_comm_overlap", False):
            yield Change("keep tensor-parallel groups within a host", share / 4)
    elif first in ("dp", "edp", "cp") and "dp" in axes:
        if not _setting(summary, "overlap_grad_reduce", False):
            yield Change("send gradients while backward computes: --overlap-grad-reduce", 0.7 * share)
        if _zero_stage(summary) and not _setting(summary, "overlap_param_gather", False):
            yield Change("gather weights while forward computes: --overlap-param-gather", 0.4 * share)
        yield Change("double --global-batch-size: half as many sums for a token", share / 2)
        yield Change("send gradients in 16 bits: --grad-reduce-in-bf16", share / 4)
    elif first == "cp":
        yield Change("compare --cp-comm-type p2p, a2a and all_gather, or halve --context-parallel-size", share / 2)
    elif first in ("ep", "etp"):
        yield Change("halve --expert-model-parallel-size, or keep its groups within a host", share / 2)
    else:
        yield Change("look at the links between these ranks (tools/diagnose.py --machine)", share / 2)


def slow_link(summary: Summary) -> Iterator[Finding]:
    """One group is slower than others with the same collectives."""
    for kind in summary.communication():
        rates = summary.rates(kind)
        if len(rates) < 3:
            continue
        group = min(rates, key=lambda ranks: rates[ranks])
        middle = median(rate for ranks, rate in rates.items() if ranks != group)
        if rates[group] < 0.5 * middle:
            own = [summary.ranks[rank].traffic[kind]["exposed"] / summary.ranks[rank].seconds for rank in group]
            lost = max(min(own) * (1 - rates[group] / middle), 0.0)
            names = ", ".join(summary.name(rank) for rank in group[:4])
            evidence = f"{kind} among {names}: {rates[group] / 1e9:.3g} GB/s, others {middle / 1e9:.3g} GB/s"
            yield Finding("slow link", lost, evidence, (Change("test cables, ports and routes of these hosts", lost),))


def waiting_phases(summary: Summary) -> Iterator[Finding]:
    """Data, checkpoints, evaluations and the optimizer take more of the time than they need to."""
    changes: tuple[Change, ...]
    share, rank = summary.worst_share("data")
    if share >= 0.05:
        workers = _setting(summary, "num_workers", 0)
        evidence = f"{summary.name(rank)} waits for its next batch for {share:.1%} of the time (num_workers={workers})"
        wanted = max(2 * workers, 2)
        changes = (
            Change(f"read ahead with more threads: --num-workers {wanted}", share * (0.9 if not workers else 0.5)),
            Change("put the token files on a faster disk or in memory", share / 2),
        )
        yield Finding("data loading", share, evidence, changes)
    share, rank = summary.worst_share("checkpoint")
    if share >= 0.03:
        interval = _setting(summary, "save_interval", None)
        wanted = f"--save-interval {2 * interval}" if interval else "--save-interval N"
        changes = (Change(f"save half as often: {wanted}", share / 2), Change("save to a faster disk", share / 2))
        evidence = f"{summary.name(rank)} writes checkpoints for {share:.1%} of the time (save_interval={interval})"
        yield Finding("checkpoint", share, evidence, changes)
    share, _ = summary.worst_share("evaluation")
    if share >= 0.1:
        evidence = f"evaluations take {share:.1%} of the time"
        changes = (Change("evaluate half as often (--eval-interval), or on half as much (--eval-iters)", share / 2),)
        yield Finding("evaluation", share, evidence, changes)
    share, _ = summary.worst_share("optimizer")
    if share >= 0.1:
        copies = len({summary.coordinate(rank, "dp") for rank in summary.ranks})
        sharded = _zero_stage(summary)
        changes = (Change("take larger batches: fewer updates for as many tokens", share / 2),)
        if copies > 1 and not sharded:
            text = "split the update over data-parallel ranks: --use-distributed-optimizer"
            changes = (*changes, Change(text, share * (1 - 1 / copies)))
        yield Finding("optimizer", share, f"updating weights takes {share:.1%} of the time", changes)


def small_micro_batch(summary: Summary) -> Iterator[Finding]:
    """Operations are too small for the device: the cost of starting them dominates."""
    used, size = summary.mean("utilisation"), _setting(summary, "micro_batch_size", 0)
    tokens = size * _setting(summary, "seq_length", 0) // _setting(summary, "context_parallel_size", 1)
    enough = 2048 if summary.records.header().get("device") == "cuda" else 256
    micros = _micro_batches(summary)
    if not tokens or tokens >= enough or micros == 1 or used is None or used > 0.4 or summary.compute_share < 0.3:
        return
    lost = summary.compute_share * (1 - tokens / enough) * (1 - used) / 2
    evidence = (
        f"{tokens} tokens in a micro-batch, {micros} of them a step, use {used:.1%} of the device; below {enough} "
        "tokens the start of an operation costs as much as the operation"
    )
    yield Finding("small micro-batches", lost, evidence, (Change(f"--micro-batch-size {2 * size}", lost / 2),))


def unfused(summary: Summary) -> Iterator[Finding]:
    """Norms, activations, softmax and loss run as separate operations of PyTorch."""
    backend = _setting(summary, "kernel_backend", "auto")
    if backend != "reference":
        return
    share = 0.2 * summary.compute_share
    text = "use fused operations: --kernel-backend auto"
    evidence = f"kernel_backend={backend}: operations between products read and write memory again and again"
    yield Finding("unfused operations", share, evidence, (Change(text, share),))


def recomputation(summary: Summary) -> Iterator[Finding]:
    """Full recomputation repeats the forward: a third of forward and backward on top (Korthikanti et al. 2022)."""
    if _setting(summary, "recompute_granularity", None) != "full":
        return
    share = summary.compute_share / 4
    total, peak = _memory(summary)
    room = f"; the peak is {peak / total:.0%} of the device" if total else ""
    text = "recompute attention alone: --recompute-granularity selective, if memory allows it"
    evidence = f"every layer's forward runs twice{room}"
    yield Finding("full recomputation", share, evidence, (Change(text, 0.9 * share),))


def _memory(summary: Summary) -> tuple[int, int]:
    """Bytes of a device and the largest peak; on a CPU all ranks of a host share its memory."""
    header = summary.records.header()
    peaks = [lines[-1].get("memory", {}).get("peak", 0) for lines in summary.records.ranks.values() if lines]
    peak = max(peaks, default=0) if header.get("device") == "cuda" else sum(peaks)
    return header.get("memory_total", 0), peak


def memory_pressure(summary: Summary) -> Iterator[Finding]:
    """Memory is nearly full: allocations may have to free and to wait."""
    total, peak = _memory(summary)
    if not total or peak < FULL * total:
        return
    changes = [Change("recompute attention: --recompute-granularity selective", 0.0)]
    if not _zero_stage(summary):
        changes.append(Change("split the optimizer: --use-distributed-optimizer", 0.0))
    evidence = f"the peak is {peak / 2**30:.3g} of {total / 2**30:.3g} GiB"
    yield Finding("memory pressure", 0.01, evidence, tuple(changes))


def unequal_experts(summary: Summary) -> Iterator[Finding]:
    """Some experts get far more tokens than others: ranks that hold the others wait."""
    loads = [step["experts"] for step in summary.records.steps()[-20:] if step.get("experts")]
    if not loads:
        return
    worst = {layer: sum(load[layer]["max_over_mean"] for load in loads) / len(loads) for layer in loads[-1]}
    layer = max(worst, key=lambda at: worst[at])
    tokens = [sum(load[layer]["tokens"][e] for load in loads) for e in range(len(loads[-1][layer]["tokens"]))]
    starved = [str(e) for e, n in enumerate(tokens) if n < STARVED_SHARE * sum(tokens) / len(tokens)]
    if worst[layer] < 1.5 and not starved:
        return
    split = _setting(summary, "expert_model_parallel_size", 1) > 1
    lost = summary.compute_share / 2 * (1 - 1 / worst[layer]) if split else 0.01
    names = f"; experts {', '.join(starved[:8])} get less than {STARVED_SHARE:.0%} of it" if starved else ""
    evidence = f"layer {layer}: the busiest expert has {worst[layer]:.2f} times the mean load{names}"
    text = "raise --moe-aux-loss-coeff, or balance with --moe-router-enable-expert-bias"
    yield Finding("starving expert" if starved else "unequal experts", lost, evidence, (Change(text, lost),))


def lost_time(summary: Summary) -> Iterator[Finding]:
    """Restarts, repeated and skipped steps."""
    good = summary.goodput
    lost = {name: good.lost[name] / good.seconds for name in ("restart", "repeated", "skipped") if good.seconds}
    if sum(lost.values()) >= 0.05:
        evidence = ", ".join(f"{name} {share:.1%}" for name, share in lost.items() if share)
        text = "find out why processes end; save more often if much is repeated (Young 1974)"
        changes = (Change(text, sum(lost.values()) / 2),)
        yield Finding("restarts and skipped steps", sum(lost.values()), evidence, changes)


def _compute_bound(summary: Summary) -> Finding:
    used = summary.mean("utilisation")
    rate = "" if used is None else f"; utilisation {used:.1%} of the rate of products"
    changes: tuple[Change, ...] = ()
    if not any(_setting(summary, name, False) for name in ("bf16", "fp16")):
        changes = (Change("compute in 16 bits on a device that is faster with them: --bf16", 0.0),)
    return Finding("compute", summary.compute_share, f"forward and backward take the rest{rate}", changes)


RULES: tuple[Callable[[Summary], Iterator[Finding]], ...] = (
    slow_rank, imbalanced_stage, pipeline_bubble, exposed_communication, slow_link, waiting_phases, small_micro_batch,
    unfused, recomputation, memory_pressure, unequal_experts, lost_time,
)  # fmt: skip
"""Every rule gives the causes that it finds."""
