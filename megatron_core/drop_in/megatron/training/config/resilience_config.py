"""Sections of checked results, slow ranks and injected faults."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.fault_injector import FaultInjectorConfig
from megatron.core.mirror import mirror


@dataclass(kw_only=True)
class RerunStateMachineConfig(mirror("RerunStateMachineConfig", kw_only=True)):  # type: ignore[misc]
    """Checks of results. Steps are never run again; --inject-fault injects faults."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"


class StragglerDetectionConfig(mirror("StragglerDetectionConfig", kw_only=True)):  # type: ignore[misc]
    """Detection of slow ranks."""
