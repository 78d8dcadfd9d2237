"""Fields of a run's records; readers check them, so that programs can rely on types and ranges."""

from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.rules_single import illegal_values
from megatron_core.config.run import field_types
from megatron_core.config.values import convert
from megatron_core.errors import ConfigError
from megatron_core.schema import any_real, flag, items, mapping, maybe, real, table, text, whole, wrong

SECONDS = real(0.0, 1e12)
TRAFFIC = table({"calls": real(), "bytes": real(), "exposed": SECONDS, "in_flight": SECONDS})
LOAD = table({"tokens": items(whole()), "dropped": whole(), "max_over_mean": real(), "entropy": real(0.0, 1.001)})

STEP = {
    "iteration": whole(), "total_iterations": whole(), "consumed_samples": whole(), "consumed_tokens": whole(),
    "loss": any_real, "learning_rate": real(), "global_batch_size": whole(1), "elapsed_ms": real(),
    "tokens_per_second": real(), "model_flops_per_second": real(),
}  # fmt: skip
STEP_OPTIONAL = {
    "loss_scale": real(), "grad_norm": maybe(any_real), "params_norm": maybe(any_real),
    "num_zeros_in_grad": maybe(real()), "memory_bytes": whole(), "skipped": flag, "phases": mapping(SECONDS),
    "memory": mapping(whole()), "goodput": maybe(real(0.0, 1.0)), "product_rate": maybe(real()),
    "utilisation": maybe(real()), "layout": maybe(text),
}  # fmt: skip
VALIDATION = {"iteration": whole(), "loss": any_real, "split": text}
VALIDATION_OPTIONAL = {
    "consumed_samples": whole(),
    "consumed_tokens": whole(),
    "perplexity": any_real,
    "accuracy": maybe(real(0.0, 1.0)),
    "accuracy_norm": maybe(real(0.0, 1.0)),
}
START = {"rank": whole(0, 2**20), "world_size": whole(1, 2**20)}
TIMES = {
    "first": whole(), "last": whole(), "at": SECONDS, "seconds": SECONDS, "phases": mapping(SECONDS),
    "traffic": mapping(TRAFFIC),
}  # fmt: skip
TIMES_OPTIONAL = {"memory": mapping(whole()), "gpu": mapping(real()), "skipped": whole(), "complete": flag}


def wrong_metrics(record: dict[str, Any]) -> list[str]:
    """Names of missing fields of a step or an evaluation, and of fields with a wrong type or range."""
    if record["kind"] == "validation":
        return wrong(record, VALIDATION, VALIDATION_OPTIONAL)
    added = set(record) - set(STEP) - set(STEP_OPTIONAL) - {"kind", "experts"}  # auxiliary losses, parts of metrics
    optional = {**STEP_OPTIONAL, **dict.fromkeys(sorted(added), maybe(any_real)), "experts": _is_load}
    return wrong(record, STEP, optional)


def checked_line(record: dict[str, Any]) -> dict[str, Any] | None:
    """Known fields of a line of a rank's file; None for another kind of line or a damaged one."""
    line_type = record.get("kind")
    if line_type not in ("start", "times"):
        return None
    fields, optional = (START, START_OPTIONAL) if line_type == "start" else (TIMES, TIMES_OPTIONAL)
    if wrong(record, fields, optional) or (line_type == "times" and not _is_stretch(record)):
        return None
    checked = {"kind": line_type} | {name: record[name] for name in (*fields, *optional) if name in record}
    return checked | {"config": _settings(checked["config"])} if "config" in checked else checked


def _is_stretch(record: dict[str, Any]) -> bool:
    """Whether the numbers of steps and skipped steps and the time of a record are consistent; it may have no steps."""
    steps = record["last"] - record["first"] + 1
    return steps == 0 or (steps > 0 and record["seconds"] > 0 and record.get("skipped", 0) <= steps)


def _is_load(value: Any) -> bool:
    """Whether ``value`` is the load by layer, with equal numbers of experts in all layers."""
    return (
        mapping(LOAD)(value)
        and all(layer.isascii() and layer.isdigit() and len(layer) < 8 for layer in value)
        and len({len(load["tokens"]) for load in value.values()}) <= 1
    )


def _is_config(value: Any) -> bool:
    """Whether the settings known to this version have legal values."""
    try:
        return not any(illegal_values(RunConfig.from_flat(RunConfig().flat() | _settings(value)).flat()))
    except (AttributeError, TypeError, ValueError, OverflowError, ConfigError):
        return False


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings known to this version, converted to their types."""
    kinds = field_types()
    return {name: convert(value, kinds[name]) for name, value in config.items() if name in kinds}


START_OPTIONAL = {
    "version": whole(), "coordinates": mapping(whole(0, 2**20)), "host": text, "device": text, "began": SECONDS,
    "iteration": whole(), "layout": maybe(text), "work": maybe(real()), "memory_total": whole(),
    "product_rate": maybe(real()), "rate_of": mapping(lambda value: True), "config": _is_config,
    "environment": mapping(lambda value: True),
}  # fmt: skip
