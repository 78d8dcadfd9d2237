"""Rules for keys that only the checkpoint or only the state dict has, and a test for checkpoints."""

from enum import Enum
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint
from megatron_core.drop_in.unsupported import unsupported


class StrictHandling(Enum):
    """Megatron's rules; ``load`` of this package is always strict about keys that the checkpoint lacks."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: "StrictHandling") -> bool:
        """Whether keys are compared before the checkpoint is read."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: "StrictHandling") -> bool:
        """Whether the keys of all ranks are compared."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: "StrictHandling") -> bool:
        """Whether ``load`` returns the keys."""
        return val.value.startswith("return_")


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the rule of a name; ValueError for an unknown name."""
    try:
        return StrictHandling(strict)
    except ValueError:
        legal = ", ".join(each.value for each in StrictHandling)
        raise ValueError(f"Invalid strict flag {strict!r}; legal: {legal}") from None


def verify_checkpoint(checkpoint_dir: str | Path) -> None:
    """Raise CheckpointError unless the folder has a complete checkpoint of this package."""
    if not Path(checkpoint_dir).is_dir():
        raise CheckpointingException(f"Checkpoint directory {checkpoint_dir} does not exist; pass that of save")
    if not check_is_distributed_checkpoint(checkpoint_dir):
        raise CheckpointingException(f"{checkpoint_dir} is not a distributed checkpoint; pass the folder of save")


determine_global_metadata = save_integrity_manifest = verify_integrity_manifest = unsupported(
    "checkpoints of this package are checked by the hashes in their manifest; leave this call out"
)
