"""Names that accelerate imports from DeepSpeed's launcher; torchrun starts the ranks."""

import os
from typing import Any, NoReturn

from megatron_core.errors import ConfigError

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""Name of the file with environment variables of other machines, which accelerate writes."""


def main(args: Any = None) -> NoReturn:
    """Name the replacement."""
    raise ConfigError(
        "deepspeed.launcher is not available in megatron_core.drop_in: start the ranks with torchrun "
        "--nproc-per-node N -m megatron_core.drop_in PROGRAM"
    )


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
