"""DeepSpeed's conversion to its universal format; checkpoints of the engine load in every layout and are copied."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.utils import LATEST_UNIVERSAL
from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed import is_deepspeed_folder


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags of DeepSpeed's script; those about its work on shards have no effect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", required=True, help="folder of a checkpoint, with its tag")
    parser.add_argument("--output_folder", required=True, help="folder of the copy, which must not exist")
    for name in ("num_extract_workers", "num_merge_workers"):
        parser.add_argument(f"--{name}", type=int, default=1, help="no effect: nothing is extracted or merged")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="no effect: nothing is extracted or merged")
    return parser.parse_args(arguments)


def main(args: Any) -> None:
    """Copy ``args.input_folder`` to ``args.output_folder``, and write ``latest_universal`` next to the copy.

    A checkpoint of the engine loads with any number of ranks and any ZeRO stage. Errors: ``CheckpointError``, also for
    files of DeepSpeed, which the engine loads in any layout without a conversion.
    """
    source = Path(args.input_folder)
    target = Path(args.output_folder)
    if is_deepspeed_folder(source):
        raise CheckpointError(
            f"input_folder={source}: DeepSpeed wrote this checkpoint; engine.load_checkpoint reads it with any number "
            "of ranks and any ZeRO stage, and DeepSpeed's own ds_to_universal.py converts it for DeepSpeed"
        )
    if find_checkpoint(str(source)) is None:
        raise CheckpointError(f"input_folder={source}: no such checkpoint; give the folder of a tag, such as step10")
    try:
        shutil.copytree(source, target)
        (target.parent / LATEST_UNIVERSAL).write_text(target.name, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"output_folder={target} cannot be written: {error}; give a new folder") from error
    print(f"{target}: copied, because checkpoints of this engine load in every layout; DeepSpeed cannot read them")


if __name__ == "__main__":
    main(parse_arguments())
