"""Optimizers of DeepSpeed's JSON as settings."""

from collections.abc import Callable, Mapping
from typing import Any

Faults = list[str]
REFUSED = ("Lamb", "OneBitLamb", "ZeroOneAdam", "Adagrad", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Names that DeepSpeed knows and that have no translation."""


def optimizer_settings(name: str, params: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """Return the settings of the optimizer ``name`` with DeepSpeed's defaults; append problems to ``faults``."""
    translate = TRANSLATED.get(name.lower())
    if translate is None:
        known = ", ".join(("Adam", "AdamW", "Lion", "SGD", "OneBitAdam"))
        why = "is not supported" if name.lower() in map(str.lower, REFUSED) else "is not an optimizer of DeepSpeed"
        faults.append(f"optimizer.type={name!r} {why}: use one of {known}")
        return {}
    left = {key: value for key, value in params.items() if value != "auto"}  # "auto" is a fault already
    found = translate(_Params(left, faults))
    faults += [
        f"optimizer.params.{key}={value!r} is not a parameter of {name}; remove it" for key, value in left.items()
    ]
    return found


class _Params:
    """Parameters that a translation takes away one by one."""

    def __init__(self, values: dict[str, Any], faults: Faults) -> None:
        self.values, self.faults = values, faults

    def number(self, name: str, default: float) -> float:
        value = self.values.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.faults.append(f"optimizer.params.{name}={value!r} must be a number >= 0")
            return default
        return float(value)

    def betas(self, first: float, second: float) -> tuple[float, float]:
        value = self.values.pop("betas", (first, second))
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(isinstance(each, int | float) and 0 <= each < 1 for each in value)
        ):
            self.faults.append(f"optimizer.params.betas={value!r} must be two numbers >= 0 and below 1")
            return first, second
        return float(value[0]), float(value[1])

    def only(self, name: str, value: Any, fix: str = "remove it") -> None:
        """Accept one value of a parameter."""
        given = self.values.pop(name, value)
        if given != value:
            self.faults.append(f"optimizer.params.{name}={given!r} is not supported: {fix}")

    def ignore(self, *names: str) -> None:
        """Take away parameters that choose an implementation."""
        for name in names:
            self.values.pop(name, None)

    def common(self, decay: float = 0.0) -> dict[str, Any]:
        return {"lr": self.number("lr", 1e-3), "weight_decay": self.number("weight_decay", decay)}

    def adam(self, decay: float) -> dict[str, Any]:
        beta1, beta2 = self.betas(0.9, 0.999)
        eps = self.number("eps", 1e-8)
        self.only("amsgrad", False)
        self.only("bias_correction", True)
        self.only("max_grad_norm", 0.0, "use gradient_clipping")
        return {
            "optimizer": "adam",
            **self.common(decay),
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": eps,
        }


def _adam(params: _Params) -> dict[str, Any]:
    decoupled = params.values.pop("adam_w_mode", True)
    params.ignore("torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")
    found = params.adam(decay=0.0)
    if not decoupled and found["weight_decay"]:
        params.faults.append(
            "optimizer.params.adam_w_mode=False adds weight_decay to the gradient, which is not supported: use "
            "adam_w_mode=True or weight_decay=0"
        )
    return found


def _adamw(params: _Params) -> dict[str, Any]:
    uses_torch = params.values.pop("torch_adam", False)
    params.ignore("adam_w_mode", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")
    return params.adam(decay=0.01 if uses_torch else 0.0)  # torch.optim.AdamW, and DeepSpeed's own classes


def _onebit_adam(params: _Params) -> dict[str, Any]:
    warmup = int(params.number("freeze_step", 100_000))
    params.ignore("cuda_aware", "comm_backend_name", "eps_inside_sqrt")
    found = params.adam(decay=0.0)
    return {**found, "grad_compression": "onebit-adam", "grad_compression_warmup_iters": warmup}


def _lion(params: _Params) -> dict[str, Any]:
    beta1, beta2 = params.betas(0.9, 0.99)
    params.ignore("set_grad_none", "fp32_optimizer_states")
    return {"optimizer": "lion", **params.common(), "lion_beta1": beta1, "lion_beta2": beta2}


def _sgd(params: _Params) -> dict[str, Any]:
    params.only("dampening", 0)
    params.only("nesterov", False)
    params.only("maximize", False)
    params.ignore("foreach", "fused")
    found = {"optimizer": "sgd", **params.common(), "sgd_momentum": params.number("momentum", 0.0)}
    if found["weight_decay"] and found["sgd_momentum"]:
        params.faults.append(
            "optimizer.params.weight_decay with momentum is a part of the gradient in SGD, which is not supported: use "
            "weight_decay=0 or momentum=0"
        )
    return found


TRANSLATED: dict[str, Callable[[_Params], dict[str, Any]]] = {
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "onebitadam": _onebit_adam,
}
