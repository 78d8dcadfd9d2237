"""Checkpoints for a fast restart in the memory of each host (``--non-persistent-ckpt-type local``)."""

from megatron_core.feature import Feature
from megatron_core.features.local_copies.settings import LocalCopiesConfig, copies_locally, local_copy_problems

LOCAL_COPIES = Feature(
    name="local_copies",
    settings=LocalCopiesConfig,
    is_used=copies_locally,
    problems=local_copy_problems,
    fast_restarts={"local": "megatron_core.features.local_copies.restarts:LocalRestarts"},
)
