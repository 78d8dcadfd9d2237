"""The command ``deepspeed``: start a program on the GPUs, or CPU processes, of this machine by torchrun."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.run import main as torchrun

from deepspeed.accelerator import get_accelerator
from megatron_core.errors import ConfigError

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""Name of the file with environment variables of other machines, which accelerate writes."""
DLTS_HOSTFILE = "/job/hostfile"


EXPORT_ENVS = ["PYTHON", "MEGATRON"]
"""Beginnings of names of variables for other machines, to which programs add; here all ranks inherit all variables."""


def fetch_hostfile(hostfile_path: str) -> None:
    """Return None, which means this machine alone; ``ConfigError`` if the file exists."""
    if os.path.isfile(hostfile_path):
        raise ConfigError(
            f"deepspeed: hostfile={hostfile_path} needs ssh, which is not supported; start the command on each "
            "machine with --no_ssh --num_nodes N --node_rank R --master_addr ADDRESS"
        )


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str | None, exclusion: str | None
) -> dict[str, list[int]]:
    """Return the numbers of the GPUs of each host; ``ConfigError`` if a part of them is chosen."""
    if inclusion or exclusion:
        raise ConfigError(f"deepspeed: include={inclusion} and exclude={exclusion}: set CUDA_VISIBLE_DEVICES instead")
    return {host: list(range(slots)) for host, slots in resource_pool.items()}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags before the program; other flags of DeepSpeed's launcher are unknown."""
    parser = argparse.ArgumentParser(prog="deepspeed", description=__doc__)
    parser.add_argument(
        "-H", "--hostfile", default=DLTS_HOSTFILE, help="refused if it exists: start each node with --no_ssh"
    )
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks of this machine")
    parser.add_argument("-i", "--include", default="", help="GPUs of this machine, such as localhost:0,2")
    parser.add_argument("--num_nodes", type=int, default=1, help="with --no_ssh: number of machines")
    parser.add_argument("--node_rank", type=int, default=0, help="with --no_ssh: number of this machine")
    parser.add_argument("--no_ssh", action="store_true", help="this command is started on every machine")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of the first machine")
    parser.add_argument("--master_port", type=int, default=29500, help="port of the first machine")
    parser.add_argument("--module", action="store_true", help="the program is the name of a module")
    parser.add_argument("--no_local_rank", action="store_true", help="do not give --local_rank to the program")
    parser.add_argument("user_script", help="the program")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks, and wait for them."""
    flags = parse_args(args)
    if os.path.exists(flags.hostfile) or (flags.num_nodes > 1 and not flags.no_ssh):
        raise ConfigError(
            f"deepspeed: hostfile={flags.hostfile} and num_nodes={flags.num_nodes} need ssh, which is not supported; "
            "start this command on each machine with --no_ssh --num_nodes N --node_rank R --master_addr ADDRESS"
        )
    if flags.include:
        os.environ["CUDA_VISIBLE_DEVICES"] = _included(flags)
        flags.num_gpus = len(_included(flags).split(","))
    ranks = flags.num_gpus if flags.num_gpus > 0 else get_accelerator().device_count()
    place = [f"--nnodes={flags.num_nodes}", f"--node-rank={flags.node_rank}", f"--nproc-per-node={ranks}"]
    place += [f"--master-addr={flags.master_addr}", f"--master-port={flags.master_port}"]
    rank_program = [] if flags.no_local_rank else ["-m", "deepspeed.launcher.launch"]
    program = ["-m", flags.user_script] if flags.module else [flags.user_script]
    torchrun([*place, "-m", "megatron_core.drop_in", *rank_program, *program, *flags.user_args])


def _included(flags: argparse.Namespace) -> str:
    """Return the GPUs of ``--include``, as in CUDA_VISIBLE_DEVICES."""
    host, _, gpus = flags.include.partition(":")
    if host != "localhost" or not all(gpu.isdigit() for gpu in gpus.split(",")) or flags.num_gpus > 0:
        raise ConfigError(f"deepspeed: --include {flags.include} must be localhost:GPU,GPU without --num_gpus")
    return gpus


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
