"""Activation functions of MLPs and experts."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, section, setting


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class ActivationConfig:
    """The function between the matrices of MLPs and experts; default: GELU."""

    swiglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with SiLU: silu(gate) * up (Shazeer 2020)."""
    geglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with GELU: gelu(gate) * up (Shazeer 2020)."""
    quick_geglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with an approximation of GELU: gate * sigmoid(1.702 gate) * up (gpt-oss)."""
    glu_linear_offset: float = setting(0.0, r.NON_NEGATIVE, needs=c.GATED)
    """Offset o of a gated MLP: f(gate) * (up + o); 1 in gpt-oss."""
    activation_func_clamp_value: float | None = setting(None, r.POSITIVE, needs=c.GATED)
    """Bound v of a gated MLP: min(gate, v), and up between -v and v (gpt-oss); default: none."""
    mlp_multipliers: tuple[float, float] = setting((1.0, 1.0), needs=c.GATED, when=c.DENSE_LAYER)
    """Factors on the gates, before the activation function, and on the output of a gated MLP (Falcon-H1)."""
    squared_relu: bool = setting(False, when=ALWAYS)
    """MLP with relu(x)^2 (So et al. 2021)."""
    relu: bool = setting(False, when=ALWAYS)
    """MLP with relu(x) (OPT)."""
    xielu: bool = setting(False, needs=c.NO_EXPERTS, resume=Resume.TENSORS)
    """MLP with xIELU, which has two learned numbers in each layer (Huang and Schlag 2024; Apertus)."""
    openai_gelu: bool = setting(False, when=c.GELU)
    """Approximate GELU by tanh, as in GPT-2, also with --geglu; default: the exact GELU. Megatron-LM approximates by
    default in layers with biases."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP's first projection computes a gate and a value."""
        return self.swiglu or self.geglu or self.quick_geglu
