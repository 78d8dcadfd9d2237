"""Global batches that many numbers of ranks can train, as DeepSpeed's section ``elasticity`` chooses them.

Source: ``deepspeed.elasticity`` of DeepSpeed 0.19.6, versions 0.1 and 0.2 (for whole machines) of the rule.
"""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from megatron_core.errors import ConfigError, quoted
from megatron_core.foreign_json import Check, items, numeric, whole
from megatron_core.launcher import read_integer

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""The factors by which a batch is multiplied: integers with more divisors than all smaller ones."""
OLDEST_VERSION = (0, 3, 8)
"""The first version of DeepSpeed with this section."""
DEFAULTS: dict[str, Any] = {"min_gpus": 1, "max_gpus": 10_000, "num_gpus_per_node": 1, "model_parallel_size": 1}
DEFAULTS |= {"min_time": 0, "prefer_larger_batch": True, "version": 0.2}
SCHEDULER_SECTION = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable with the section by which a scheduler of jobs chooses the number of ranks."""
POSITIVE = whole(1), "an integer >= 1"
CHECKS: dict[str, tuple[Check, str]] = {
    "max_train_batch_size": (whole(1, 2**31), "an integer from 1 to 2^31"),
    "micro_batch_sizes": (items(whole(1)), "a list of integers >= 1"),
    **dict.fromkeys(("min_gpus", "max_gpus", "num_gpus_per_node", "model_parallel_size"), POSITIVE),
    "min_time": (numeric(), "a number >= 0"),
    "version": (lambda value: str(value) in ("0.1", "0.2"), "0.1 or 0.2"),
}


class ElasticityError(ConfigError):
    """The section ``elasticity`` cannot be used."""


class ElasticityConfigError(ElasticityError):
    """A key of the section is missing or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch cannot be divided by the number of ranks."""


class ElasticityConfig:
    """The section with DeepSpeed's defaults; errors: ``ElasticityConfigError``."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        values = {**DEFAULTS, **param_dict}
        for name, (check, requirement) in CHECKS.items():
            if not check(values.get(name)):
                raise ElasticityConfigError(f"elasticity.{name}={quoted(values.get(name))} must be {requirement}")
        self.max_acceptable_batch_size: int = values["max_train_batch_size"]
        self.micro_batches: list[int] = values["micro_batch_sizes"]
        self.min_gpus: int = values["min_gpus"]
        self.max_gpus: int = values["max_gpus"]
        self.num_gpus_per_node: int = values["num_gpus_per_node"]
        self.model_parallel_size: int = values["model_parallel_size"]
        self.prefer_larger_batch_size = bool(values["prefer_larger_batch"])
        self.version = float(values["version"])
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(f"elasticity.max_gpus={self.max_gpus} must be >= min_gpus={self.min_gpus}")
        if self.version == 0.1 and self.model_parallel_size > 1:
            raise ElasticityConfigError(f"elasticity.model_parallel_size={self.model_parallel_size} needs version 0.2")


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration has the section, with ``"enabled": true``."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and section.get("enabled") is True


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the section with the one in the variable DEEPSPEED_ELASTICITY_CONFIG, which a scheduler of jobs sets.

    Errors: ``ElasticityConfigError`` if the batches that they allow differ.
    """
    text = os.environ.get(SCHEDULER_SECTION)
    if text is None:
        return
    try:
        section = json.loads(text)
    except json.JSONDecodeError as error:
        raise ElasticityConfigError(f"{SCHEDULER_SECTION}={quoted(text)} must be JSON: {error}") from error
    scheduled = ElasticityConfig(section if isinstance(section, Mapping) else {})
    own = ElasticityConfig(runtime_elastic_config_dict)
    compared = {"max_train_batch_size": "max_acceptable_batch_size", "micro_batch_sizes": "micro_batches"}
    for name, attribute in {**compared, "version": "version"}.items():
        value = getattr(own, attribute)
        of_scheduler = getattr(scheduled, attribute)
        if value != of_scheduler:
            raise ElasticityConfigError(
                f"elasticity.{name}={value}, but {SCHEDULER_SECTION} has {of_scheduler}: give both the same section"
            )


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return (global batch, numbers of ranks that can train it), with ``world_size`` also the micro-batch of a rank.

    Version 0.2 without ``world_size`` reads the variable ``WORLD_SIZE``. Errors: ``ElasticityError``.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config={quoted(ds_config)} must be a dict")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('the configuration has no section "elasticity" with "enabled": true; add it')
    section = ElasticityConfig(ds_config["elasticity"])
    if tuple(map(int, re.findall(r"\d+", target_deepspeed_version)[:3])) < OLDEST_VERSION:
        raise ElasticityError(f"target_deepspeed_version={target_deepspeed_version!r} must be 0.3.8 or later")
    ranks = world_size if section.version == 0.1 else world_size or read_integer("WORLD_SIZE", 0)
    if not ranks and (section.version == 0.2 or return_microbatch):
        raise ElasticityConfigError("the micro-batch depends on the number of ranks: give world_size")
    choose = _for_ranks if section.version == 0.1 else _for_machines
    batch, sizes = choose(section, ranks)
    if not batch or not sizes:
        raise ElasticityError(
            f"elasticity.max_train_batch_size={section.max_acceptable_batch_size} is too small for min_gpus="
            f"{section.min_gpus} and micro_batch_sizes={section.micro_batches}; change one of them"
        )
    if world_size and world_size not in sizes:
        raise ElasticityIncompatibleWorldSize(
            f"{world_size} ranks cannot train the batch {batch} of the section elasticity; start one of {sizes}"
        )
    if not world_size and not return_microbatch:
        return batch, sizes
    micro_batches = [size for size in section.micro_batches if batch // ranks % size == 0]
    if world_size and not micro_batches:
        raise ElasticityError(
            f"elasticity.micro_batch_sizes={section.micro_batches}: none divides {batch // ranks}, the samples of a "
            f"rank in the batch {batch}; add one, or change the number of ranks"
        )
    if not world_size and not section.prefer_larger_batch_size:
        micro_batches = micro_batches[:1]
    return batch, sizes, max(micro_batches, default=None)


def _for_ranks(section: ElasticityConfig, ranks: int) -> tuple[int, list[int]]:
    """Version 0.1: any number of ranks."""
    return _best_batch(section, section.max_acceptable_batch_size, section.min_gpus, section.max_gpus)


def _for_machines(section: ElasticityConfig, ranks: int) -> tuple[int, list[int]]:
    """Version 0.2: whole machines; if no such batch is divisible by these ranks, the largest one that is."""
    if section.num_gpus_per_node % section.model_parallel_size:
        raise ElasticityError(
            f"elasticity.num_gpus_per_node={section.num_gpus_per_node} must be a multiple of model_parallel_size="
            f"{section.model_parallel_size}"
        )
    copies = section.num_gpus_per_node // section.model_parallel_size
    limit = section.max_acceptable_batch_size
    gpus = section.num_gpus_per_node
    batch, machines = _best_batch(section, limit // copies, section.min_gpus // gpus, section.max_gpus // gpus)
    sizes = [number * copies for number in machines]
    if ranks // section.model_parallel_size in sizes:
        return batch * copies, sizes
    present = ranks / gpus * copies
    batches = [limit // (size * present) * size * present for size in section.micro_batches]
    return int((max if section.prefer_larger_batch_size else min)(batches)), [int(present)]


def _best_batch(section: ElasticityConfig, limit: int, least: int, most: int) -> tuple[int, list[int]]:
    """Return the batch up to ``limit`` that most numbers of ranks from ``least`` to ``most`` can train, and these.

    Candidates are multiples of each micro-batch, and of their least common multiple, with many divisors.
    """
    smallest = min(section.micro_batches)
    if max(section.micro_batches) > limit:
        raise ElasticityConfigError(f"elasticity.micro_batch_sizes={section.micro_batches} must be at most {limit}")
    bases = {base for base in (*section.micro_batches, math.lcm(*section.micro_batches)) if base <= limit}
    best: tuple[int, list[int]] = smallest, []
    for base in sorted(bases):
        batch = base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, limit // base) - 1]
        quotients = [batch // size for size in section.micro_batches if batch % size == 0]
        divisors = {d for n in quotients for d in _divisors(n) if (least or 1) <= d <= (most or limit // smallest)}
        is_preferred = batch > best[0] if section.prefer_larger_batch_size else batch < best[0]
        if len(divisors) > len(best[1]) or (len(divisors) == len(best[1]) and is_preferred):
            best = batch, sorted(divisors)
    return best


def _divisors(number: int) -> set[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}
