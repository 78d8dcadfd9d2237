r"""Compare the hashes that two runs recorded, and name the first step, module and tensor that differ.

megatron-compare-hashes run_on_one_machine run_on_another/metrics.hashes.jsonl

Train both with --record-hashes, and with --record-hashes-by-tensor to name the tensor.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("compare_hashes")

from dataclasses import dataclass
from typing import Annotated

import tyro

from megatron_core.errors import DataError
from megatron_core.reports.hash_records import (
    ORDER,
    HashRecord,
    compared_iterations,
    first_hash_difference,
    read_hashes,
)
from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Compare the hashes that two runs recorded. Exit status: 0 if all are equal, 1 if one differs or two copies within
    a run do."""

    one: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, its metrics file or its metrics.hashes.jsonl."""
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The other run."""


def compare_runs(settings: CompareFlags) -> bool:
    """Print the result; return whether all hashes are equal. Errors: ``DataError``, also without common iterations."""
    one = read_hashes(settings.one)
    other = read_hashes(settings.other)
    common = compared_iterations(one, other)
    if not common:
        raise DataError(
            f"{settings.one} and {settings.other} have no common iteration ({span(one)}; {span(other)}); record both "
            "at the same --record-hashes-interval"
        )
    sound = [copies_are_equal(name, records) for name, records in ((settings.one, one), (settings.other, other))]
    difference = first_hash_difference(one, other)
    if difference is None:
        final = next(record for record in reversed(one) if record.iteration == common[-1])
        quantities = ", ".join(name for name in ORDER if getattr(final, name) is not None)
        print(f"equal: all hashes of {len(common)} iterations, {common[0]} to {common[-1]} ({quantities})")
        return all(sound)
    equal = [iteration for iteration in common if iteration < difference.iteration]
    print(difference)
    if difference.tensor is None and difference.quantity not in ("loss", "grad_norm"):
        print("  train both runs with --record-hashes-by-tensor to name the tensor")
    print(f"  equal before: {f'iterations {equal[0]} to {equal[-1]}' if equal else 'no recorded iteration'}")
    return False


def copies_are_equal(name: str, records: list[HashRecord]) -> bool:
    """Whether all copies within a run are equal; print the first iteration at which they differ."""
    for record in records:
        if record.differing_copies:
            names = ", ".join(record.differing_copies[:4])
            print(f"{name}, iteration {record.iteration}: copies on several ranks differ: {names}")
            return False
    return True


def span(records: list[HashRecord]) -> str:
    """The first and last iteration of a run."""
    return f"iterations {records[0].iteration} to {records[-1].iteration}"


def main() -> int:
    """Parse the flags and run; 1 if hashes differ."""
    settings = parse_flags(CompareFlags, description=__doc__)
    return 0 if compare_runs(settings) else 1
