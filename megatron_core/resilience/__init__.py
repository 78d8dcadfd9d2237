"""Runs that survive failures: recovery, elastic restarts, checks of links, repeated steps, and injected faults."""

from megatron_core.feature import Feature
from megatron_core.resilience.rules import checks_links, injects_faults, recovers, repeats_steps, trains_elastic

FEATURES = (
    Feature(
        name="elastic",
        is_used=trains_elastic,
        start="megatron_core.resilience.elastic:start_elastic",
        run_part="megatron_core.resilience.elastic:ElasticNotes",
        callbacks=("megatron_core.resilience.elastic:ElasticEnd",),
    ),
    Feature(name="recovery", is_used=recovers, start="megatron_core.resilience.recovery:start_with_recovery"),
    Feature(name="link_checks", is_used=checks_links, callbacks=("megatron_core.resilience.link_checks:LinkChecks",)),
    Feature(name="reruns", is_used=repeats_steps, callbacks=("megatron_core.resilience.rerun:Reruns",)),
    Feature(name="faults", is_used=injects_faults, callbacks=("megatron_core.resilience.faults:Faults",)),
)
