"""Checks during training that collectives and messages deliver what was sent (``link_check_interval``).

The recorded checksums of all ranks are compared, and each wrong delivery is described.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.collectives import COLLECTIVES, all_gather_flat_, all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import Group, ParallelGroups, process_group
from megatron_core.parallel.meter import METER
from megatron_core.parallel.texts import gather_strings, listed
from megatron_core.resilience.links.checksums import differs, maximum_differs
from megatron_core.resilience.links.recorder import LINKS, RecordedCall
from megatron_core.resilience.settings import LinkCheckConfig
from megatron_core.resilience.wrong_step import WrongStepError
from megatron_core.training.callbacks import Callback, is_due
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class LinkChecks(Callback):
    """Records the checksums of a step's collectives, and compares them before its update.

    Collectives that end later (of the update, and gathers of weights) are compared before the next update, also if
    every step is checked, or at the end of the run.

    Errors: ``WrongStepError``, the same one on all ranks together, if a rank received wrong data.
    """

    priority = 475

    def __init__(self, run: Run) -> None:
        self.run = run
        self._settings = run.config.section(LinkCheckConfig)
        self._has_records = False
        """Whether calls of this step or the one before are recorded."""
        self._suspect = "the start"
        """The first step whose results have not been checked completely."""

    def before_run(self) -> None:
        """Seal the messages between stages, if all are checked."""
        LINKS.forget()
        LINKS.seals_messages = self._settings.check_pipeline_messages

    def before_step(self) -> None:
        """Record the collectives of a step that is due."""
        step = self.run.state.iteration + 1
        LINKS.iteration = step
        if self.run.world.size > 1 and is_due(step, self._settings.link_check_interval):
            LINKS.begin(step)
            self._has_records = True

    def before_update(self) -> None:
        """Compare the recorded checksums before wrong gradients change the weights."""
        if self._has_records or LINKS.seals_messages:
            self._compare()
            self._has_records = LINKS.checking  # calls of the update follow

    def after_step(self, result: StepResult) -> None:
        """End the records of this step."""
        LINKS.end()

    def after_run(self) -> None:
        """Compare the remaining checksums of the last step and the evaluations."""
        if self._has_records or LINKS.seals_messages:
            self.run.data_parallel.finish_param_sync()
            self._compare()

    def close(self) -> None:
        """Record nothing outside a run."""
        LINKS.forget()
        LINKS.seals_messages = False

    def _compare(self) -> None:
        with METER.phase("other", inclusive=True):
            world = self.run.world
            differences = wrong_deliveries(self.run.groups, world.device, world.launcher_rank)
        if differences:
            steps = [int(text.removeprefix("step ").partition(":")[0]) for text in differences]
            raise WrongStepError(
                f"wrong data arrived in {'; '.join(differences)}. Steps from {self._suspect} on may be wrong, too: "
                "load a checkpoint from before (--load, --ckpt-step), and test the links and the memory of these ranks "
                "if it happens again",
                first=min(steps) if self._settings.link_check_interval == 1 else 0,
            )
        self._suspect = f"step {LINKS.iteration}"  # its update is not compared yet


MOST = 4
"""Wrong deliveries that each rank describes."""


def wrong_deliveries(groups: ParallelGroups, device: torch.device, named: Callable[[int], int] = int) -> list[str]:
    """Compare the complete calls and messages recorded since the last comparison; a collective call of all ranks.

    Returns a description of each wrong delivery, equal on all ranks: receiver, sender, collective and axis. Calls that
    are not complete on all ranks of their group stay recorded. ``named``: the launcher's rank of a rank.
    """
    checking = LINKS.checking
    LINKS.checking = False  # the comparison itself is not recorded
    try:
        differences = list(_wrong_messages(named))
        for group, names in groups.named():
            ranks = dist.get_process_group_ranks(process_group(group))
            differences += _wrong_calls(group, names, [named(rank) for rank in ranks], device)
        number = torch.tensor([len(differences)], dtype=torch.int64, device=device)
        world = groups.group(WORLD)
        for group in (world, groups.outer_reports):
            all_reduce_(number, group)
        if not int(number):
            return []
        text = "\n".join(gather_strings("\n".join(differences[:MOST]), world, device))
        texts = gather_strings(text, groups.outer_reports, device)
        return list(dict.fromkeys(line for text in texts for line in text.splitlines() if line))
    finally:
        LINKS.checking = checking


def _wrong_messages(named: Callable[[int], int]) -> Iterable[str]:
    """Describe the wrong messages between pipeline stages that this rank received."""
    arrived = LINKS.deliveries
    LINKS.deliveries = []
    for message in arrived:
        if not message.right:
            yield (
                f"step {message.iteration}: rank {named(message.receiver)} received a wrong {message} from rank "
                f"{named(message.sender)} over pp (message {message.number} of this link)"
            )


def _wrong_calls(group: Group, names: Sequence[str], ranks: Sequence[int], device: torch.device) -> list[str]:
    """Compare the calls over one group of ``ranks``; describe those that delivered wrong data to this rank."""
    calls = _complete_on_all(group, device)
    where = f"over {' = '.join(names)} (ranks {listed(ranks)})"
    differences: list[tuple[tuple[int, int], str]] = []
    for call, sources in _wrong_moves([call for call in calls if not call.is_sum], group):
        senders = [ranks[source] for source in sources]
        sender = f" from rank{'s' * (len(senders) > 1)} {listed(senders)}"
        differences.append((call.key, _sentence(call, ranks[group.rank()], sender, where)))
    differences += _wrong_sums([call for call in calls if call.is_sum], group, ranks, where)
    return [text for _, text in sorted(differences)]


def _sentence(call: RecordedCall, receiver: int, sender: str, where: str) -> str:
    return f"step {call.iteration}: rank {receiver} received wrong values{sender} in {call}, call {call.number} {where}"


def _complete_on_all(group: Group, device: torch.device) -> list[RecordedCall]:
    """Take the calls that are complete on all ranks of ``group``; the others stay recorded."""
    calls = LINKS.calls.pop(group, [])
    complete = [call.key for call in calls if call.complete]
    digest = hash(tuple(complete)) >> 1  # of integers, and therefore equal in all processes; its negative fits, too
    known = torch.tensor([digest, -digest, len(complete), len(calls) - len(complete)], dtype=torch.int64, device=device)
    all_reduce_(known, group, maximum=True)
    greatest, least_negated, most, some_open = known.tolist()
    if greatest == -least_negated and not some_open:
        return calls
    local = torch.tensor(complete + [(-1, -1)] * (most + 1 - len(complete)), dtype=torch.int64, device=device)
    gathered = local.new_empty(group.size() * local.numel())
    all_gather_flat_(gathered, local.view(-1), group)
    common = set(complete)
    for keys in gathered.view(group.size(), -1, 2).tolist():
        common &= set(map(tuple, keys))
    if left := [call for call in calls if call.key not in common]:
        LINKS.calls[group] = left
    return [call for call in calls if call.key in common]


def _wrong_moves(calls: Sequence[RecordedCall], group: Group) -> Iterable[tuple[RecordedCall, list[int]]]:
    """Yield each call in which a hash of received data is not that of the sent data, with the group ranks of the
    senders."""
    if not calls:
        return
    sent = torch.stack([torch.stack(call.sent) for call in calls], 1)  # [ranks, calls]
    expected = COLLECTIVES["all_to_all"](sent.contiguous(), group)
    received = torch.stack([torch.stack(call.received) for call in calls], 1)
    wrong = (expected != received).cpu()
    for index in wrong.any(0).nonzero().flatten().tolist():
        yield calls[index], wrong[:, index].nonzero().flatten().tolist()


def _wrong_sums(
    calls: Sequence[RecordedCall], group: Group, ranks: Sequence[int], where: str
) -> list[tuple[tuple[int, int], str]]:
    """Describe each reduction whose result differs on this rank from the sum of all inputs.

    All-reduces whose results differ between the ranks by less than rounding are described by the first rank.
    """
    verdicts = dict(zip((call.key for call in calls), _wrong_by_value(calls, group), strict=True))
    differences = [(call.key, _sentence(call, ranks[group.rank()], "", where)) for call in calls if verdicts[call.key]]
    reductions = [call for call in calls if call.what == "all-reduce"]
    if not reductions:
        return differences
    flags = torch.tensor([verdicts[call.key] for call in reductions], dtype=torch.int64).to(reductions[0].received[1])
    local = torch.stack([torch.stack([call.received[1] for call in reductions]), flags])
    gathered = local.new_empty(group.size() * local.numel())
    all_gather_flat_(gathered, local.view(-1), group)
    hashes, wrong = gathered.view(-1, 2, len(reductions)).unbind(1)
    named = wrong.any(0).tolist()
    for call, call_hashes, is_named in zip(reductions, hashes.T.tolist(), named, strict=True):
        odd = "" if is_named or group.rank() else _minority(call_hashes, ranks)
        if odd:
            differences.append((call.key, f"step {call.iteration}: {odd} in {call}, call {call.number} {where}"))
    return differences


def _minority(hashes: Sequence[int], ranks: Sequence[int]) -> str:
    """Describe the ranks whose result is not the most frequent one; "" if all are equal."""
    if len(set(hashes)) == 1:
        return ""
    most = max(hashes, key=hashes.count)
    if 2 * hashes.count(most) <= len(hashes):
        return f"ranks {listed(ranks)} have different results"
    odd = [rank for rank, value in zip(ranks, hashes, strict=True) if value != most]
    return f"rank{'s' * (len(odd) > 1)} {listed(odd)} received wrong values"


def _wrong_by_value(calls: Sequence[RecordedCall], group: Group) -> list[bool]:
    """Whether the block sums of each call's result on this rank differ from the sums of the inputs' block sums."""
    wrong = [False] * len(calls)
    kinds: dict[tuple[bool, torch.dtype], list[int]] = {}
    for index, call in enumerate(calls):
        kinds.setdefault((call.is_maximum, call.sent[0].dtype), []).append(index)
    # All ranks have the same calls, and therefore the same kinds in the same order.
    for (maximum, _), members in kinds.items():
        expected = torch.cat([calls[index].sent[0].reshape(-1) for index in members])
        all_reduce_(expected, group, maximum=maximum)
        sums_of_calls = expected.split([calls[index].sent[0].numel() for index in members])
        for index, sums in zip(members, sums_of_calls, strict=True):
            wrong[index] = _is_wrong(calls[index], sums.view(calls[index].sent[0].shape), group)
    return wrong


def _is_wrong(call: RecordedCall, expected: Tensor, group: Group) -> bool:
    expected_local = expected[group.rank() if expected.shape[0] > 1 else 0]
    result = call.received[0][0]
    if call.is_maximum and result.dim() == 1:
        return maximum_differs(result, expected_local)
    return bool(differs(result, expected_local, call.dtype, group.size()).any())
