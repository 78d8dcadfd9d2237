"""Diagnosis of a run: one rule for each cause of lost time, applied to the run's records.

The share of a cause is its part of all ranks' time, so that causes can be compared; the gain of a change is the
predicted saving as a part of a step's time. Thresholds and sources are listed in docs/monitoring.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_core.reports.diagnosis import Change, Diagnosis, Finding, flags, predicted_gain
from megatron_core.reports.metrics import STARVED_SHARE
from megatron_core.reports.summary import RunSummary

SLOW = 1.25
"""A rank is slow if its time per unit of work is at least this multiple of the median of the other ranks."""
UNEQUAL = 1.15
"""Stages are unequal if the largest has at least this multiple of the mean work."""
FULL = 0.9
"""Memory is short if the peak is at least this share of the device."""
HIDDEN = {"cuda": 0.7, "cpu": 0.25}
"""Share of gradient reduction that overlap hides behind backward; on a CPU the same cores compute and move data."""


def _setting(summary: RunSummary, name: str, default: Any) -> Any:
    return default if (value := summary.config.get(name)) is None else value


def _zero_stage(summary: RunSummary) -> int:
    return _setting(summary, "zero_stage", int(_setting(summary, "use_distributed_optimizer", False)))


def _batch(summary: RunSummary) -> int:
    """Number of sequences in a step."""
    steps = summary.records.steps()
    return steps[-1]["global_batch_size"] if steps else _setting(summary, "global_batch_size", 1)


def slow_rank(summary: RunSummary) -> Iterator[Finding]:
    """A rank needs more time than others for the same work; the ranks waiting for it lose the difference."""
    if _busiest(summary) > 1:
        return  # ranks with busier experts compute longer
    work = {rank: summary.records.header(rank).get("work") or 1.0 for rank in summary.ranks}
    paces = {rank: times.typical_compute / work[rank] for rank, times in summary.ranks.items()}
    for rank, pace in paces.items():
        other_paces = [value for number, value in paces.items() if number != rank]
        if not other_paces or pace < SLOW * median(other_paces) or not median(other_paces):
            continue
        times = summary.ranks[rank]
        if times.typical_compute < median(t.typical_compute for number, t in summary.ranks.items() if number != rank):
            continue  # it has less work than others and finishes before them: no rank waits for it
        lost = times.compute * (1 - median(other_paces) / pace) / times.seconds
        evidence = (
            f"{summary.name(rank)} computes {pace / median(other_paces):.2f} times as long as others for the same "
            f"work, {times.typical_compute:.3g} s per step"
        )
        yield Finding(
            "slow rank", lost, evidence,
            (Change("test or replace this device, and look for other programs, heat and power limits on it", lost),),
        )  # fmt: skip


def imbalanced_stage(summary: RunSummary) -> Iterator[Finding]:
    """A pipeline stage has more work than the mean; the other stages wait for it in every micro-batch."""
    work: dict[int, float] = {}
    for rank in summary.ranks:
        work[summary.coordinate(rank, "pp")] = summary.records.header(rank).get("work") or 0.0
    average = sum(work.values()) / max(len(work), 1)
    if len(work) < 2 or not average or max(work.values()) < UNEQUAL * average:
        return
    stage = max(work, key=lambda number: work[number])
    times = next(times for rank, times in summary.ranks.items() if summary.coordinate(rank, "pp") == stage)
    lost = times.compute / times.seconds * (1 - average / work[stage])
    names = ("pipeline_model_parallel_layout", *(f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")))
    changed = [name for name in names if summary.config.get(name) is not None]
    removed = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
    change = (
        Change(f"remove {removed}: layers are then split by their FLOPs", lost, dict.fromkeys(changed))
        if changed
        else Change("move layers away from it with --pipeline-model-parallel-layout", lost)
    )
    evidence = f"pipeline rank {stage} has {work[stage] / average:.2f} times the mean work of a stage"
    yield Finding("imbalanced stage", lost, evidence, (change,))


def pipeline_bubble(summary: RunSummary) -> Iterator[Finding]:
    """Ranks wait for other stages because of the schedule: (p - 1) / (v m + p - 1) of the time with 1F1B."""
    p = _setting(summary, "pipeline_model_parallel_size", 1)
    measured = summary.share("pipeline")
    if p == 1 or measured < 0.05:
        return
    m, v = _micro_batches(summary), _chunks(summary)
    planned = (p - 1) / (v * m + p - 1)
    share = min(measured, planned)

    def gain(bubble: float) -> float:
        return max(1 - (1 - share) / (1 - min(bubble, share)), 0.0)

    twice = gain((p - 1) / (2 * v * m + p - 1))
    changes = [flags(f"use {2 * m} micro-batches", twice, global_batch_size=2 * _batch(summary))]
    size = _setting(summary, "micro_batch_size", 1)
    if size > 1:
        changes.append(flags("use smaller micro-batches", twice, micro_batch_size=size // 2))
    if v == 1 and _setting(summary, "num_layers", 1) >= 2 * p:
        less = gain((p - 1) / (2 * m + p - 1))
        changes.append(flags("interleave two chunks per rank", less, num_virtual_stages_per_pipeline_rank=2))
    changes.append(flags("split the backward", gain(planned / 3), pipeline_schedule="zb_h1"))
    evidence = (
        f"ranks wait for other stages for {measured:.1%} of the time; {m} micro-batches over {p} stages"
        f"{f' in {v} chunks' if v > 1 else ''} leave at least {planned:.1%}"
    )
    yield Finding("pipeline bubble", share, evidence, tuple(changes))
    unexplained = measured - planned
    if unexplained > 0.1 and not [*slow_rank(summary), *imbalanced_stage(summary)]:
        text = "check the links between stages (megatron-diagnose --machine), and keep --overlap-p2p-communication on"
        evidence = f"waiting for other stages takes {measured:.1%}, {unexplained:.1%} more than in the schedule"
        yield Finding("slow messages between stages", unexplained, evidence, (Change(text, unexplained),))


def _micro_batches(summary: RunSummary) -> int:
    config = summary.config
    shards = [config.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")]
    ranks = summary.records.header().get("world_size", 1)
    copies = max(ranks // (shards[0] * shards[1] * (config.get("context_parallel_size") or 1)), 1)
    return max(_batch(summary) // (copies * (config.get("micro_batch_size") or 1)), 1)


def _chunks(summary: RunSummary) -> int:
    config = summary.config
    layers = config.get("num_layers_per_virtual_pipeline_stage")
    if layers:
        return max(config["num_layers"] // (config.get("pipeline_model_parallel_size") or 1) // layers, 1)
    return config.get("num_virtual_stages_per_pipeline_rank") or 1


def exposed_communication(summary: RunSummary) -> Iterator[Finding]:
    """Ranks exchange data without computing at the same time."""
    by_axes: dict[str, float] = {}
    kinds: dict[str, list[str]] = {}
    for collective, (sending, _) in summary.communication().items():
        axes = collective.rpartition(" ")[0]
        if _is_of_experts(summary, collective):
            axes = "ep"
            sending = sending / _busiest(summary)
        by_axes[axes] = by_axes.get(axes, 0.0) + sending
        if sending >= 0.01:
            rates = summary.rates(collective)
            rate = f" at {median(rates.values()) / 1e9:.3g} GB/s" if rates else ""
            kinds.setdefault(axes, []).append(f"{collective.rpartition(' ')[2]} {sending:.1%}{rate}")
    for axes, share in by_axes.items():
        if share >= 0.05:
            evidence = f"ranks wait for data of the group {axes}: {', '.join(kinds.get(axes, ['many small ones']))}"
            yield Finding(
                f"exposed communication over {axes}", share, evidence, tuple(_communicate_less(summary, axes, share))
            )


def _communicate_less(summary: RunSummary, axes: str, share: float) -> Iterator[Change]:
    first = axes.split("-")[0].split(" ")[0]
    if first == "tp":
        tp = _setting(summary, "tensor_model_parallel_size", 1)
        if tp == 1:
            return
        less = {"tensor_model_parallel_size": tp // 2} | ({"sequence_parallel": False} if tp == 2 else {})
        yield from _other_layout(summary, "use half of these ranks for data parallelism", "tp", share, less, None)
        if not _setting(summary, "tp_comm_overlap", False):
            yield Change("keep tensor-parallel groups within a host", share / 4)
    elif first in ("dp", "edp", "cp") and "dp" in axes:
        hidden = HIDDEN.get(summary.records.header().get("device", "cpu"), HIDDEN["cpu"])
        if not _setting(summary, "overlap_grad_reduce", False):
            hidden_sums = {"overlap_grad_reduce": True}
            text = "send gradients while backward computes"
            yield from _other_layout(summary, text, "dp", share, hidden_sums, hidden * share)
        if _zero_stage(summary) and not _setting(summary, "overlap_param_gather", False):
            text = "gather weights while forward computes"
            both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
            yield from _other_layout(summary, text, "dp", share, both, hidden / 2 * share)
        twice = {"global_batch_size": 2 * _batch(summary)}
        text = "reduce gradients half as often per token"
        yield from _other_layout(summary, text, "dp", share, twice, share / 2)
        yield flags("send gradients in 16 bits", share / 4, grad_reduce_in_bf16=True)
    elif first == "cp":
        yield Change("compare --cp-comm-type p2p, a2a and all_gather, or halve --context-parallel-size", share / 2)
    elif first in ("ep", "etp"):
        less = {"expert_model_parallel_size": max(_setting(summary, "expert_model_parallel_size", 2) // 2, 1)}
        text = "keep the groups within a host, or halve them"
        yield from _other_layout(summary, text, "ep", share, less, share / 2)
    else:
        yield Change("check the links between these ranks (megatron-diagnose --machine)", share / 2)


def _other_layout(
    summary: RunSummary, text: str, collective: str, share: float, settings: dict[str, Any], estimate: float | None
) -> Iterator[Change]:
    """Yield a change, unless the planner predicts no gain; ``estimate``: the gain if it cannot predict."""
    predicted = predicted_gain(summary, settings, collective, share)
    gain = estimate if predicted is None else predicted
    if gain is not None and gain > 0:
        yield flags(text, gain, **settings)


def slow_link(summary: RunSummary) -> Iterator[Finding]:
    """One group is slower than other groups in the same collectives."""
    for collective in summary.communication():
        rates = summary.rates(collective)
        if len(rates) < 3:
            continue
        group = min(rates, key=lambda ranks: rates[ranks])
        middle = median(rate for ranks, rate in rates.items() if ranks != group)
        if rates[group] < 0.5 * middle:
            shares = [
                summary.ranks[rank].traffic[collective]["exposed"] / summary.ranks[rank].seconds for rank in group
            ]
            lost = max(min(shares) * (1 - rates[group] / middle), 0.0)
            names = ", ".join(summary.name(rank) for rank in group[:4])
            evidence = (
                f"{collective} among {names}: {rates[group] / 1e9:.3g} GB/s, other groups {middle / 1e9:.3g} GB/s"
            )
            yield Finding("slow link", lost, evidence, (Change("test cables, ports and routes of these hosts", lost),))


def waiting_phases(summary: RunSummary) -> Iterator[Finding]:
    """Data loading, checkpoints, evaluations and the optimizer take an unusually large share of the time."""
    changes: tuple[Change, ...]
    share, rank = summary.worst_share("data")
    if share >= 0.05:
        workers = _setting(summary, "num_workers", 0)
        evidence = f"{summary.name(rank)} waits for its next batch for {share:.1%} of the time (num_workers={workers})"
        changes = (Change("put the token files on a faster disk or in memory", share / 2),)
        if workers < _micro_batches(summary):  # one thread reads each micro-batch
            gain = share * (0.5 if workers else 0.9)
            changes = (flags("prefetch with more threads", gain, num_workers=2 * workers or 2), *changes)
        yield Finding("data loading", share, evidence, changes)
    for phase, least, verb, setting, other in (
        ("checkpoint", 0.03, "save", "save_interval", "save to a faster disk"),
        ("evaluation", 0.1, "evaluate", "eval_interval", "evaluate on half the data (--eval-iters)"),
    ):
        share, rank = summary.worst_share(phase)
        if share >= least:
            interval = _setting(summary, setting, None)
            rarer = [flags(f"{verb} half as often", share / 2, **{setting: 2 * interval})] if interval else []
            evidence = f"{summary.name(rank)} {verb}s for {share:.1%} of the time ({setting}={interval})"
            yield Finding(phase, share, evidence, (*rarer, Change(other, share / 2)))
    share, _ = summary.worst_share("optimizer")
    if share >= 0.1:
        copies = len({summary.coordinate(rank, "dp") for rank in summary.ranks})
        changes = (flags("update less often per token", share / 2, global_batch_size=2 * _batch(summary)),)
        if copies > 1 and not _zero_stage(summary):
            text = "shard the update over data-parallel ranks"
            changes = (*changes, flags(text, share * (1 - 1 / copies), use_distributed_optimizer=True))
        yield Finding("optimizer", share, f"updating weights takes {share:.1%} of the time", changes)


def small_micro_batch(summary: RunSummary) -> Iterator[Finding]:
    """Operations are too small for the device: launch costs dominate."""
    utilisation = summary.mean("utilisation")
    size = _setting(summary, "micro_batch_size", 0)
    tokens = size * _setting(summary, "seq_length", 0) // _setting(summary, "context_parallel_size", 1)
    enough = 2048 if summary.records.header().get("device") == "cuda" else 256
    micros = _micro_batches(summary)
    if (
        not tokens
        or tokens >= enough
        or micros == 1
        or utilisation is None
        or utilisation > 0.4
        or summary.compute_share < 0.3
    ):
        return
    lost = summary.compute_share * (1 - tokens / enough) * (1 - utilisation) / 2
    evidence = (
        f"{micros} micro-batches per step of {tokens} tokens use {utilisation:.1%} of the device; below {enough} "
        "tokens the launch of an operation costs as much as the operation"
    )
    change = flags("use fewer and larger micro-batches", lost / 2, micro_batch_size=2 * size)
    yield Finding("small micro-batches", lost, evidence, (change,))


def recomputation(summary: RunSummary) -> Iterator[Finding]:
    """Full recomputation repeats the forward, which adds a third of forward and backward (Korthikanti et al. 2022)."""
    if _setting(summary, "recompute_granularity", None) != "full":
        return
    share = summary.compute_share / 4
    total, peak = _memory(summary)
    room = f"; the peak is {peak / total:.0%} of the device" if total else ""
    text = "recompute only attention, if memory allows: --recompute-granularity selective"
    settings = {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}
    evidence = f"every layer's forward runs twice{room}"
    yield Finding("full recomputation", share, evidence, (Change(text, 0.9 * share, settings),))


def _memory(summary: RunSummary) -> tuple[int, int]:
    """Bytes of a device and its peak; on a CPU all ranks of a host share the memory."""
    header = summary.records.header()
    peaks = [lines[-1].get("memory", {}).get("peak", 0) for lines in summary.records.ranks.values() if lines]
    peak = max(peaks, default=0) if header.get("device") == "cuda" else sum(peaks)
    return header.get("memory_total", 0), peak


def memory_pressure(summary: RunSummary) -> Iterator[Finding]:
    """Memory is nearly full: allocations may have to free cached blocks and wait."""
    total, peak = _memory(summary)
    if not total or peak < FULL * total:
        return
    changes = [flags("recompute attention", 0.0, recompute_granularity="selective")]
    if not _zero_stage(summary):
        changes.append(flags("shard the optimizer", 0.0, use_distributed_optimizer=True))
    evidence = f"the peak is {peak / 2**30:.3g} of {total / 2**30:.3g} GiB"
    yield Finding("memory pressure", 0.01, evidence, tuple(changes))


def _is_of_experts(summary: RunSummary, collective: str) -> bool:
    """Whether collectives of a kind carry tokens to experts; the group may be named after another axis."""
    split = _setting(summary, "expert_model_parallel_size", 1) > 1
    return split and collective.endswith("all_to_all") and not collective.startswith("cp")


def _busiest(summary: RunSummary) -> float:
    """Upper bound on (load of the busiest rank) / (mean load); 1 if experts have equal loads."""
    worst = max((worst for worst, _ in summary.unequal_layers().values()), default=1.0)
    return min(worst, _setting(summary, "expert_model_parallel_size", 1))


def unequal_experts(summary: RunSummary) -> Iterator[Finding]:
    """Some experts get far more tokens than others; ranks with the other experts wait."""
    layers = summary.unequal_layers()
    if not layers:
        return
    layer = max(layers, key=lambda number: layers[number][0])
    worst, starved = layers[layer]
    busiest = _busiest(summary)
    lost = 0.01
    if busiest > 1:  # expert layers, about half of the work, and their messages take as long as on the busiest rank
        sent = sum(
            share for collective, (share, _) in summary.communication().items() if _is_of_experts(summary, collective)
        )
        lost = (summary.compute_share / 2 + sent) * (1 - 1 / busiest)
    names = f"; experts {', '.join(map(str, starved[:8]))} get less than {STARVED_SHARE:.0%} of it" if starved else ""
    evidence = f"layer {layer}: the busiest expert has {worst:.2f} times the mean load{names}"
    coefficient = 10 * _setting(summary, "moe_aux_loss_coeff", 0.0) or 0.01
    changes = (
        flags("balance with an auxiliary loss", lost, moe_aux_loss_coeff=coefficient),
        flags("balance with an expert bias", 0.9 * lost, moe_router_enable_expert_bias=True),
    )
    yield Finding("starving expert" if starved else "unequal experts", lost, evidence, changes)


def lost_time(summary: RunSummary) -> Iterator[Finding]:
    """Restarts, repeated and skipped steps."""
    good = summary.goodput
    lost = {name: good.lost[name] / good.seconds for name in ("restart", "repeated", "skipped") if good.seconds}
    if sum(lost.values()) >= 0.05:
        evidence = ", ".join(f"{name} {share:.1%}" for name, share in lost.items() if share)
        text = "find out why processes end; save more often if many steps are repeated (Young 1974)"
        change = Change(text, sum(lost.values()) / 2)
        yield Finding("restarts and skipped steps", sum(lost.values()), evidence, (change,))


def compute_bound(summary: RunSummary) -> Finding:
    """The remaining time, in forward and backward."""
    utilisation = summary.mean("utilisation")
    rate = "" if utilisation is None else f"; utilisation {utilisation:.1%} of the matrix product rate"
    changes: tuple[Change, ...] = ()
    if not any(_setting(summary, name, False) for name in ("bf16", "fp16")):
        changes = (flags("compute in 16 bits if the device is faster with them", 0.0, bf16=True),)
    return Finding("compute", summary.compute_share, f"forward and backward take the rest{rate}", changes)


RULES: tuple[Callable[[RunSummary], Iterator[Finding]], ...] = (
    slow_rank, imbalanced_stage, pipeline_bubble, exposed_communication, slow_link, waiting_phases, small_micro_batch,
    recomputation, memory_pressure, unequal_experts, lost_time,
)  # fmt: skip
"""Every rule yields the causes that it finds."""


def diagnose(summary: RunSummary) -> Diagnosis:
    """Apply every rule; the remaining time is compute."""
    findings = [
        replace(finding, changes=tuple(sorted(finding.changes, key=lambda change: -change.gain)))
        for rule in RULES
        if summary.ranks
        for finding in rule(summary)
    ]
    findings.sort(key=lambda finding: -finding.share)
    if summary.ranks:
        findings.append(compute_bound(summary))
    notes = list(summary.records.notes)
    if not summary.ranks:
        notes.append("no step has times: the bottleneck is unknown")
    return Diagnosis(tuple(findings), tuple(notes))
