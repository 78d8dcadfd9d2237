"""Optimizers of DeepSpeed's JSON as settings."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

Faults = list[str]
MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
"""Functions of the package ``mup`` for the names that DeepSpeed reads in any case."""
LAMB_FACTORS = {"coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}
LOCAL_STEPS = {"var_update_scaler": 16, "local_step_scaler": 32_678, "local_step_clipper": 16}
"""Parameters of OneBitLamb and ZeroOneAdam with DeepSpeed's defaults; settings have the prefixes ``onebit_lamb_`` and
``zero_one_``."""
MUON_PRECISION = {"gram": "high", "standard": "medium"}
"""Precision by ``ns_method``. DeepSpeed iterates on the Gram matrix in float16, which has the bits of TF32; the engine
computes the same function without it."""
CLASSES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}
"""Classes of torch.optim for the names that DeepSpeed reads in any case; other classes need their exact name."""


def torch_optimizer(name: str) -> Callable[..., Optimizer]:
    """Return a class of torch.optim, or a function of ``mup``, by its exact name."""
    module = importlib.import_module("mup") if name in MUP.values() else torch.optim
    return getattr(module, name)


class Chosen(NamedTuple):
    """The result of ``optimizer_settings``."""

    settings: dict[str, Any]
    torch_class: str | None = None
    """Argument of ``torch_optimizer`` whose result updates the weights instead of an optimizer of this project."""
    torch_params: dict[str, Any] = {}  # noqa: RUF012


def optimizer_settings(name: str, params: Mapping[str, Any], faults: Faults) -> Chosen:
    """Translate the optimizer ``name`` with DeepSpeed's defaults; append problems to ``faults``.

    Any class of torch.optim is known by its exact name, as in DeepSpeed; it is constructed with ``params``.
    """
    left = {key: value for key, value in params.items() if value != "auto"}  # "auto" is a fault already
    translate = TRANSLATED.get(name.lower())
    if translate is None or _needs_torch(name, left):
        return _of_torch(name, left, faults)
    found = translate(_Params(left, faults))
    faults += [
        f"optimizer.params.{key}={value!r} is not a parameter of {name}; remove it" for key, value in left.items()
    ]
    return Chosen(found)


def _needs_torch(name: str, params: Mapping[str, Any]) -> bool:
    """Whether the fused optimizers lack an option: weight decay in the gradient, Nesterov momentum, AMSGrad."""
    if name.lower() == "sgd":
        return bool(params.get("weight_decay") and params.get("momentum")) or any(
            params.get(each) for each in ("dampening", "nesterov", "maximize")
        )
    if name.lower() not in ("adam", "adamw"):
        return False
    added = name.lower() == "adam" and params.get("adam_w_mode") is False and bool(params.get("weight_decay"))
    return added or bool(params.get("torch_adam") and params.get("amsgrad"))


def _of_torch(name: str, params: dict[str, Any], faults: Faults) -> Chosen:
    lower = name.lower()
    if lower in MUP:
        if importlib.util.find_spec("mup") is None:
            faults.append(f"optimizer.type={name!r} needs the package mup: pip install mup")
        return Chosen({}, MUP[lower], params)
    kind = getattr(torch.optim, CLASSES.get(lower, name), None)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind is Optimizer:
        known = ", ".join(
            ("Adam", "AdamW", "Lion", "Lamb", "Muon", "SGD", "Adagrad", "OneBitAdam", "OneBitLamb", "ZeroOneAdam")
        )
        faults.append(
            f"optimizer.type={name!r} is not an optimizer of DeepSpeed: use one of {known}, or a class of torch.optim"
        )
        return Chosen({})
    reader = _Params(params, faults)
    if lower in ("adam", "adamw"):
        reader.ignore("adam_w_mode", "torch_adam", "set_grad_none", "fp32_optimizer_states")
        reader.only("bias_correction", True)
    settings = {} if "lr" not in params else {"lr": _Params(dict(params), faults).number("lr", 1e-3)}
    allowed = set(inspect.signature(kind).parameters) - {"params", "self"}
    faults += [
        f"optimizer.params.{key}={value!r} is not a parameter of torch.optim.{kind.__name__}; remove it"
        for key, value in params.items()
        if key not in allowed
    ]
    return Chosen(settings, kind.__name__, params)


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
        corrects = self.values.pop("bias_correction", True)
        if not isinstance(corrects, bool):
            self.faults.append(f"optimizer.params.bias_correction={corrects!r} must be true or false")
        self.only("max_grad_norm", 0.0, "use gradient_clipping")
        return {
            "optimizer": "adam",
            **self.common(decay),
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": eps,
            **({} if corrects else {"adam_bias_correction": False}),
        }

    def onebit(self) -> dict[str, Any]:
        """Parameters of all 1-bit optimizers, which do not correct the bias."""
        self.ignore("cuda_aware", "comm_backend_name", "eps_inside_sqrt", "bias_correction")
        return self.adam(decay=0.0)


def _adam(params: _Params) -> dict[str, Any]:
    params.ignore("adam_w_mode", "torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")
    return params.adam(decay=0.0)


def _adamw(params: _Params) -> dict[str, Any]:
    uses_torch = params.values.pop("torch_adam", False)
    params.ignore("adam_w_mode", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")
    return params.adam(decay=0.01 if uses_torch else 0.0)  # torch.optim.AdamW, and DeepSpeed's own classes


def _onebit_adam(params: _Params) -> dict[str, Any]:
    warmup = int(params.number("freeze_step", 100_000))
    compressed = {"grad_compression": "onebit-adam", "grad_compression_warmup_iters": warmup}
    return params.onebit() | compressed | {"adam_bias_correction": False}


def _onebit_lamb(params: _Params) -> dict[str, Any]:
    warmup = int(params.number("freeze_step", 100_000))
    limits = {f"onebit_lamb_{name}": params.number(name, default) for name, default in LAMB_FACTORS.items()}
    compressed = {"grad_compression": "onebit-lamb", "grad_compression_warmup_iters": warmup}
    return params.onebit() | _lamb_limits(params) | compressed | limits


def _zero_one_adam(params: _Params) -> dict[str, Any]:
    # DeepSpeed freezes the variance after the first step whose number is above var_freeze_step.
    policy = {"zero_one_var_freeze_step": int(params.number("var_freeze_step", 100_000)) + 1}
    policy |= {f"zero_one_{name}": int(params.number(name, default)) for name, default in LOCAL_STEPS.items()}
    return params.onebit() | {"grad_compression": "zero-one-adam"} | policy


def _lamb(params: _Params) -> dict[str, Any]:
    params.only("eps_inside_sqrt", False)
    found = params.adam(decay=0.0) | _lamb_limits(params)
    return found | {"lamb_bias_correction": "rate" if found.pop("adam_bias_correction", True) else "none"}


def _lamb_limits(params: _Params) -> dict[str, Any]:
    least, most = params.number("min_coeff", 0.01), params.number("max_coeff", 10.0)
    return {"optimizer": "lamb", "lamb_max_coeff": most, "lamb_min_coeff": least}


def _lion(params: _Params) -> dict[str, Any]:
    beta1, beta2 = params.betas(0.9, 0.99)
    params.ignore("set_grad_none", "fp32_optimizer_states")
    return {"optimizer": "lion", **params.common(), "lion_beta1": beta1, "lion_beta2": beta2}


def _muon(params: _Params) -> dict[str, Any]:
    """Jordan et al. 2024, with DeepSpeed's constants; ``muon_rates`` has the rates of the two halves."""
    params.ignore("torch_adam", "fp32_optimizer_states", "muon_lr", "adam_lr")
    params.only("adam_w_mode", True)
    params.only("bias_correction", True)
    params.only("per_head_muon", False)
    method = params.values.pop("ns_method", "gram")
    if method not in MUON_PRECISION:
        params.faults.append(f"optimizer.params.ns_method={method!r} must be one of {', '.join(MUON_PRECISION)}")
    beta1, beta2 = params.betas(0.9, 0.95)
    return {
        "optimizer": "muon",
        "lr": params.number("lr", 0.02),
        "weight_decay": params.number("weight_decay", 0.0),
        "muon_momentum": params.number("momentum", 0.95),
        "muon_nesterov": True,
        "muon_scale_mode": "shape_scaling",
        "muon_coefficient_type": "simple",
        "muon_fp32_matmul_prec": MUON_PRECISION.get(method, "medium"),
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": params.number("eps", 1e-10),
    }


def muon_rates(params: Mapping[str, Any], *, is_matrix: bool) -> dict[str, Any]:
    """Settings in the JSON of the groups of one half: hidden matrices, or the parameters of Adam."""
    rate = params.get("muon_lr" if is_matrix else "adam_lr", params.get("lr", 0.02 if is_matrix else 3e-4))
    return {"lr": float(rate), "weight_decay": float(params.get("weight_decay", 0.0))}


def _sgd(params: _Params) -> dict[str, Any]:
    params.ignore("foreach", "fused", "dampening", "nesterov", "maximize", "differentiable")
    return {"optimizer": "sgd", **params.common(), "sgd_momentum": params.number("momentum", 0.0)}


TRANSLATED: dict[str, Callable[[_Params], dict[str, Any]]] = {
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
    "lamb": _lamb,
    "sgd": _sgd,
    "muon": _muon,
    "onebitadam": _onebit_adam,
    "onebitlamb": _onebit_lamb,
    "zerooneadam": _zero_one_adam,
}
OWN_OPTIMIZERS = {*TRANSLATED, "adagrad"} - {"sgd"}
"""Names of DeepSpeed's own optimizers, in lower case."""


def momenta_of(settings: Mapping[str, Any]) -> Any:
    """Momentum or betas of the optimizer of ``settings``, which its parameter groups do not have."""
    kind = settings.get("optimizer")
    if kind == "sgd":
        return settings.get("sgd_momentum", 0.0)
    prefix = "lion" if kind == "lion" else "adam"
    names = [f"{prefix}_beta1", f"{prefix}_beta2"]
    return tuple(settings[name] for name in names) if names[0] in settings else 0.0
