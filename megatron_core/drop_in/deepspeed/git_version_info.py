"""The version of DeepSpeed whose interface these modules have, and of torch."""

import torch

from deepspeed.ops.op_builder.builder import COMPATIBLE_OPS

major, minor, patch = 0, 19, 8
version = f"{major}.{minor}.{patch}"
git_hash = "megatron-native"
git_branch = "drop-in"
installed_ops = compatible_ops = COMPATIBLE_OPS
"""Operations by DeepSpeed's names: whether their optimizers or features are available here."""


def _short(found: str | None) -> str:
    return "0.0" if not found else ".".join(found.split(".")[:2])


torch_info = {
    "version": _short(torch.__version__),
    "bf16_support": True,
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": "0.0",
    "hip_version": _short(torch.version.hip),
}
"""Versions as ``major.minor``; ``0.0`` without the library."""
if torch.cuda.is_available():
    torch_info["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()[:2]))
