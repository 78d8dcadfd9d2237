"""Check devices, kernels and communication between ranks on this machine, and list packages to install.

megatron-doctor

--verbose prints all versions, the backend of each operation and the optional libraries. The exit status is 1 if the
collectives do not work.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("doctor")

from dataclasses import dataclass

from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Print what is installed and works on this machine."""

    collectives: bool = True
    """Start two processes and test the collectives between them."""
    verbose: bool = False
    """Print all versions, the backend of each operation, optional libraries, and each collective backend."""


def main() -> int:
    """Parse the flags and run; 1 if the collectives do not work."""
    settings = parse_flags(DoctorFlags, description=__doc__)
    from megatron_core.verify.installation import examine  # loads torch, which --help does not need

    return examine(with_collectives=settings.collectives, verbose=settings.verbose)
