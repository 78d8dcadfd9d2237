"""Settings of a distillation in a YAML file of NVIDIA ModelOpt, which Megatron-LM's ``--export-kd-cfg`` names."""

from typing import Any

from megatron_core.errors import ConfigError, shortened
from megatron_core.text_file import parse_yaml, read_text

DEFAULTS: dict[str, Any] = {
    "intermediate_layer_pairs": [],
    "logit_layers": ["output_layer", "output_layer"],
    "skip_lm_loss": True,
    "kd_loss_scale": 1.0,
    "logit_kl_temperature": 1.0,
    "logit_kl_topk": None,
}
"""The fields of ModelOpt's ``DistillationConfig`` that a file can have, and their defaults."""
LARGEST = 1e6
"""Bound of the numbers."""


def distillation_settings(path: str) -> tuple[dict[str, float], str]:
    """``kd_weight`` and ``kd_temperature`` with the loss of ModelOpt's file ``path``, and a note about its scale.

    ModelOpt's loss without that of the language model is KL(teacher || student) at a temperature T, and the loss of
    ``--kd-weight 1`` is T^2 times it. Raises ConfigError for a file that cannot be read and for another loss.
    """
    settings = DEFAULTS | _fields(path)
    temperature, scale = (_positive(path, name, settings[name]) for name in ("logit_kl_temperature", "kd_loss_scale"))
    where = f"--export-kd-cfg {path}"
    wrong = list[str]()
    if settings["intermediate_layer_pairs"]:
        pairs = shortened(str(settings["intermediate_layer_pairs"]))
        wrong.append(f"intermediate_layer_pairs={pairs}: only logits are compared; use []")
    if settings["logit_layers"] != DEFAULTS["logit_layers"]:
        layers = shortened(str(settings["logit_layers"]))
        wrong.append(f"logit_layers={layers}: only the outputs of output_layer are compared; remove it")
    if settings["logit_kl_topk"] is not None:
        wrong.append(f"logit_kl_topk={shortened(str(settings['logit_kl_topk']))}: all logits are compared; remove it")
    if settings["skip_lm_loss"] is False:
        weight = scale / (1.0 + scale)
        wrong.append(
            "skip_lm_loss=False: it scales the loss by a ratio of losses of each micro-batch, which depends on the "
            f"layout; for constant weights remove the file and use --kd-weight {weight:g} "
            f"--kd-temperature {temperature:g}"
        )
    elif settings["skip_lm_loss"] is not True:
        wrong.append(f"skip_lm_loss={shortened(str(settings['skip_lm_loss']))}: it must be true")
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}")
    factor = temperature * temperature
    note = f"the loss is T^2 = {factor:g} times ModelOpt's" if temperature != 1.0 else ""
    return {"kd_weight": 1.0, "kd_temperature": temperature}, note


def _fields(path: str) -> dict[str, Any]:
    try:
        loaded = parse_yaml(read_text(path))
        str(loaded)  # ValueError for a hexadecimal number of more digits than Python prints
    except (OSError, ValueError) as error:
        raise ConfigError(f"--export-kd-cfg {path} cannot be read: {shortened(str(error))}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--export-kd-cfg {path} holds a {type(loaded).__name__}; write 'name: value' lines")
    if unknown := [str(name) for name in loaded if name not in DEFAULTS]:
        raise ConfigError(
            f"--export-kd-cfg {path}: {shortened(', '.join(unknown))}: ModelOpt has no such field; "
            f"legal: {', '.join(DEFAULTS)}"
        )
    return loaded


def _positive(path: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < LARGEST:
        raise ConfigError(
            f"--export-kd-cfg {path}: {name}={shortened(str(value))} must be a number > 0 and < {LARGEST:g}"
        )
    return float(value)
