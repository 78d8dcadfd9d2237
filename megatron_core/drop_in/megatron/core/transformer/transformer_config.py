"""The configuration of a transformer."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor, nn

from megatron.core.enums import AttnBackend
from megatron.core.mirror import mirror, refused_changes
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.config_changes import ChangingConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron_core.config import ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_core.config.rules_sharding import RECOMPUTABLE
from megatron_core.errors import ConfigError
from megatron_core.feature import extended, setting_names
from megatron_core.features.experts.settings import LoadBalancing
from megatron_core.features.fp8 import FP8
from megatron_core.features.fp8.arithmetic import fp8_arithmetic
from megatron_core.features.fp8.rules import fp8_problems
from megatron_core.features.fp8.settings import FP8Config, Recipe
from megatron_core.features.layer_sizes.settings import LAYERS_JSON
from megatron_core.parallel.current import current
from megatron_core.parallel.initialization import Normal
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic
from megatron_core.tensor_parallel.layers import ModelParallelConfig as ParallelOptions

_DISPATCHERS = ("allgather", "alltoall", "flex", "alltoall_seq")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return nn.functional.relu(x).square()


@dataclass
class TransformerConfig(ChangingConfig, mirror("TransformerConfig"), ModelParallelConfig):  # type: ignore[misc]
    """Megatron Core's fields and defaults; ``model_config`` converts them to the engine's configuration.

    Unsupported fields keep their values for modules of the caller and are an error in ``model_config``.
    ``bias_activation_fusion`` with biases selects GELU in the tanh approximation, as Megatron Core's fused kernel does.
    ``mup_width_mult`` is always hidden_size / mup_base_hidden_size.
    """

    attention_backend: AttnBackend = AttnBackend.auto
    activation_func: Callable[[Tensor], Tensor] = nn.functional.gelu
    init_method: Callable[[Tensor], object] | None = None
    output_layer_init_method: Callable[[Tensor], object] | None = None
    embedding_init_method: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        """Set derived fields as Megatron Core does and check the settings."""
        super().__post_init__()
        own: Any = self  # a type checker takes an assignment to ``self`` for the declaration of a field
        # Sizes that follow from others.
        own.ffn_hidden_size = own.ffn_hidden_size or 4 * own.hidden_size
        if own.kv_channels is None and own.num_attention_heads:
            own.kv_channels = own.hidden_size // own.num_attention_heads
        own.num_query_groups = own.num_query_groups or own.num_attention_heads
        own.recompute_modules = ["core_attn"] if own.recompute_modules is None else list(own.recompute_modules)
        if own.moe_layer_recompute:
            own.recompute_granularity = "selective"
            own.recompute_modules = list(dict.fromkeys([*own.recompute_modules, "moe"]))
        if own.num_moe_experts is not None:
            own.moe_ffn_hidden_size = own.moe_ffn_hidden_size or own.ffn_hidden_size
        own.moe_use_grouped_tensor |= own.use_transformer_engine_op_fuser and own.moe_grouped_gemm
        if own.params_dtype == torch.float32 and (own.fp16 or own.bf16):
            own.params_dtype = torch.float16 if own.fp16 else torch.bfloat16
        # The number of chunks follows from an explicit layout.
        if (layout := own.pipeline_model_parallel_layout) is not None:
            if not isinstance(layout, PipelineParallelLayerLayout):
                layout = PipelineParallelLayerLayout(layout, own.pipeline_model_parallel_size)
            layout.validate_layer_layout(own.num_layers, own.mtp_num_layers)
            chunks = layout.virtual_pipeline_model_parallel_size
            if own.virtual_pipeline_model_parallel_size not in (None, chunks):
                raise ConfigError(
                    f"virtual_pipeline_model_parallel_size={own.virtual_pipeline_model_parallel_size}, but "
                    f"pipeline_model_parallel_layout={layout} has {chunks} chunks per rank; leave the size out"
                )
            own.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
            own.pipeline_model_parallel_layout = layout
        for wrong in self._problems():
            raise ConfigError(wrong)
        if own.use_mup:
            self._set_mup()
        # Modules of the caller read the initialization functions under these names.
        std = own.init_method_std / own.mup_width_mult**0.5
        own.init_method = own.init_method or Normal(std)
        own.output_layer_init_method = own.output_layer_init_method or Normal(
            std / (2.0 * max(own.num_layers, 1)) ** 0.5
        )
        own.embedding_init_method_std = own.embedding_init_method_std or own.init_method_std
        own.embedding_init_method = own.embedding_init_method or Normal(own.embedding_init_method_std)

    def _set_mup(self) -> None:
        """Derive the scales of the maximal update parametrization from the width (``config.MuPConfig``)."""
        own: Any = self
        own.mup_base_hidden_size = own.hidden_size if own.mup_base_hidden_size is None else own.mup_base_hidden_size
        if own.mup_base_hidden_size <= 0:
            raise ConfigError(f"mup_base_hidden_size={own.mup_base_hidden_size} must be positive")
        own.mup_width_mult = own.hidden_size / own.mup_base_hidden_size
        if own.softmax_scale is None:
            base = (own.mup_base_head_dim or 1.0) ** 0.5
            own.softmax_scale = base / (own.kv_channels or 1) ** own.mup_attn_scale_power
        if own.mup_output_mult == 1.0:
            own.mup_output_mult = 1.0 / own.mup_width_mult
        given = [name for name in ("init_method", "output_layer_init_method") if getattr(self, name) is not None]
        if given:
            warnings.warn(f"use_mup is enabled, but {', '.join(given)} does not scale with the width", stacklevel=3)

    def _problems(self) -> list[str]:
        heads, groups, tp = self.num_attention_heads, self.num_query_groups or 0, self.tensor_model_parallel_size
        rules = {
            "fp16 and bf16 exclude each other": self.fp16 and self.bf16,
            f"num_attention_heads={heads} must be a multiple of tensor_model_parallel_size={tp}": heads % tp,
            f"num_query_groups={groups} must be a multiple or a divisor of tensor_model_parallel_size={tp}": groups
            and groups % tp
            and tp % groups,
            f"num_moe_experts={self.num_moe_experts} must be > 0": (self.num_moe_experts or 1) < 1,
            f"expert_model_parallel_size={self.expert_model_parallel_size} needs num_moe_experts": (
                self.expert_model_parallel_size > 1 and self.num_moe_experts is None
            ),
            f"recompute_granularity={self.recompute_granularity!r} is none of full, selective": (
                self.recompute_granularity not in (None, "full", "selective")
            ),
            f"recompute_modules={self.recompute_modules} has modules that are none of {', '.join(RECOMPUTABLE)}": (
                set(self.recompute_modules or ()) - set(RECOMPUTABLE)
            ),
            f"moe_token_dispatcher_type={self.moe_token_dispatcher_type!r} is none of {', '.join(_DISPATCHERS)}": (
                self.moe_token_dispatcher_type not in _DISPATCHERS
            ),
            f"recompute_method={self.recompute_method!r} is none of uniform, block": (
                self.recompute_method not in (None, "uniform", "block")
            ),
            "apply_query_key_layer_scaling needs attention_softmax_in_fp32": (
                self.apply_query_key_layer_scaling and not self.attention_softmax_in_fp32
            ),
        }
        return [text for text, broken in (rules | self._rules_of_megatron()).items() if broken]

    def _rules_of_megatron(self) -> dict[str, bool]:
        """Return Megatron Core's rules of fields without effect here, which say that a program contradicts itself."""
        grouped = (self.moe_single_grouped_weight, self.moe_single_grouped_bias)
        wire = "moe_dispatch_fwd_dtype and moe_combine_bwd_dtype"
        formats = (self.moe_dispatch_fwd_dtype, self.moe_combine_bwd_dtype)
        narrow = formats != ("bf16", "bf16")
        dispatcher = (self.moe_token_dispatcher_type, self.moe_flex_dispatcher_backend)
        clamp, is_swiglu = self.activation_func_clamp_value, self.activation_func is nn.functional.silu
        clamps = clamp is not None and is_swiglu and self.gated_linear_unit
        backends = ("te_native", "deepgemm", "triton")
        return {
            f"gdp_num_householder must be positive, not {self.gdp_num_householder}": self.gdp_num_householder < 1,
            f"mtp_hsm=True requires mtp_num_layers >= 2, not {self.mtp_num_layers}": (
                self.mtp_hsm and (self.mtp_num_layers or 0) < 2
            ),
            f"Unknown batch_invariant_backend {self.batch_invariant_backend!r}; legal: {', '.join(backends)}": (
                self.batch_invariant_mode and self.batch_invariant_backend not in backends
            ),
            "moe_use_grouped_tensor=True requires moe_grouped_gemm=True": (
                self.moe_use_grouped_tensor and not self.moe_grouped_gemm
            ),
            "moe_single_grouped_weight and moe_single_grouped_bias require moe_grouped_gemm=True": (
                any(grouped) and not self.moe_grouped_gemm
            ),
            "moe_single_grouped_weight and moe_single_grouped_bias require moe_use_grouped_tensor=True": (
                any(grouped) and not self.moe_use_grouped_tensor
            ),
            "moe_single_grouped_bias requires add_bias_linear=True": grouped[1] and not self.add_bias_linear,
            f"{wire} must be bf16 or mxfp8, not {formats}": bool(set(formats) - {"bf16", "mxfp8"}),
            f"{wire} require the 'ncclep' flex dispatcher backend": narrow and dispatcher != ("flex", "ncclep"),
            f"{wire} require BOTH use_transformer_engine_op_fuser and moe_grouped_gemm": (
                narrow and not (self.use_transformer_engine_op_fuser and self.moe_grouped_gemm)
            ),
            f"activation_func_clamp_value for SwiGLU must be finite and greater than zero, not {clamp}": (
                clamps and not 0.0 < clamp < float("inf")
            ),
            "activation_func_clamp_value for SwiGLU is only supported with MoE": (
                clamps and self.num_moe_experts is None
            ),
            "glu_linear_offset must be zero when activation_func_clamp_value is set for SwiGLU": (
                clamps and self.glu_linear_offset != 0.0
            ),
            "use_te_activation_func must be False when activation_func_clamp_value is set for SwiGLU": (
                clamps and self.use_te_activation_func
            ),
        }

    def model_config(self, *, without_pattern: bool = False, **given: Any) -> ModelConfig:
        """Return the engine's configuration of the model; ``given`` has fields of it that Megatron keeps elsewhere.

        Unless ``without_pattern``, those of a hybrid model include its pattern. Raises ConfigError that lists all
        unsupported fields that differ from their defaults.
        """
        known = {f.name for f in fields(extended(ModelConfig))}
        known |= {"is_hybrid_model"} if without_pattern or given.get("hybrid_layer_pattern") else set()
        known |= {"heterogeneous_block_specs"} if given.get(LAYERS_JSON) else set()
        if wrong := [name for name in refused_changes(self) if name not in known]:
            listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise ConfigError(f"TransformerConfig: the models of this package do not support {listed}; remove them")
        settings = {each.name: each.metadata.get("setting") for each in fields(self) if each.name not in _FP8}
        same = {setting: getattr(self, name) for name, setting in settings.items() if setting in known}
        theirs = {"positions_as_matrices": True, "moe_capacity_per": "micro_batch", "mtp_zero_last_input": True}
        return ModelConfig(**theirs | same | self._activation() | self._translated() | given)

    def parallel_options(self) -> ParallelOptions:
        """Return the options of the engine's parallel layers."""
        kinds = self.cp_comm_type or "p2p"
        return ParallelOptions(
            sequence_parallel=self.sequence_parallel,
            params_dtype=self.params_dtype,
            tp_comm_overlap=self.tp_comm_overlap,
            cp_comm_type=(kinds,) if isinstance(kinds, str) else tuple(kinds),
            perform_initialization=self.perform_initialization,
            kernel_backend=self.kernel_backend,
            device=self.device,
            arithmetic=self._arithmetic(),
        )

    def fp8_settings(self) -> FP8Config | None:
        """Return the engine's settings of FP8; None without FP8."""
        if not self.fp8:
            return None
        legal = {"fp8": ("e4m3", "hybrid"), "fp8_recipe": get_args(Recipe)}
        for name, values in legal.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name}={getattr(self, name)!r} is none of {', '.join(values)}")
        return FP8Config(fp8_format=self.fp8, **{name: getattr(self, name) for name in _FP8})

    def _arithmetic(self) -> LayerArithmetic:
        settings = self.fp8_settings()
        if settings is None:
            return PLAIN
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )
        config = RunConfig(model=self.model_config(), parallel=parallel, training=TrainingConfig(**vars(settings)))
        for problem in fp8_problems(config):
            raise ConfigError(problem)
        return fp8_arithmetic(config, current().context.whole, 1)

    def _translated(self) -> dict[str, Any]:
        """Return the fields whose values differ between Megatron and the engine."""
        unfused = self.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        freq, skip, without = self.moe_layer_freq, self.window_attn_skip_freq, self.no_rope_freq
        for hook, std in (
            ("init_method", self.init_method_std / self.mup_width_mult**0.5),
            ("embedding_init_method", None),
        ):
            method = getattr(self, hook)
            if not isinstance(method, Normal) or (std is not None and method.std != std):
                raise ConfigError(f"{hook}={method} is not supported by the models; set init_method_std instead")
        if self.cross_entropy_fusion_impl not in ("native", "linear"):
            raise ConfigError(
                f"cross_entropy_fusion_impl={self.cross_entropy_fusion_impl!r} is not supported; use native"
            )
        yarn = {} if not isinstance(self, MLATransformerConfig) else self.rotary_scaling()
        return yarn | {
            "disable_bias_linear": not self.add_bias_linear,
            "attention_backend": "unfused" if unfused else "auto",
            "group_query_attention": self.num_query_groups != self.num_attention_heads,
            "moe_layer_freq": (freq,) if isinstance(freq, int) else tuple(freq),
            "window_attn_skip_freq": (skip,) if isinstance(skip, int) else skip and tuple(skip),
            "no_rope_freq": (without,) if isinstance(without, int) else without and tuple(without),
            "moe_router_dtype": self.moe_router_dtype or "fp32",
            **self._balancing(),
            "moe_token_dispatcher_type": "allgather" if self.moe_token_dispatcher_type == "allgather" else "alltoall",
            "recompute_modules": tuple(self.recompute_modules or ()),
            "recompute_method": self.recompute_method or ("block" if self.recompute_granularity == "full" else None),
        }

    def _balancing(self) -> dict[str, Any]:
        """Return the types of load balancing that have an effect, and their coefficients."""
        types, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        types = [types] if isinstance(types, str) else list(types)
        coefficients = [coefficients] if isinstance(coefficients, int | float) else list(coefficients)
        given = f"moe_router_load_balancing_type={types} with moe_aux_loss_coeff={coefficients}"
        if len(types) != len(coefficients):
            raise ConfigError(f"{given}: give one coefficient for each type")
        if wrong := [kind for kind in types if kind not in get_args(LoadBalancing)]:
            raise ConfigError(f"{given}: {wrong[0]!r} is none of {', '.join(get_args(LoadBalancing))}")
        pairs = list(zip(types, coefficients, strict=True))
        active = [(kind, c) for kind, c in pairs if kind == "sinkhorn" or (c and kind != "none")] or pairs[:1]
        if len(active) > 1 and "sinkhorn" in dict(active):
            raise ConfigError(f"{given}: sinkhorn has no other type; set the other coefficients to 0")
        (kind, coefficient), *further = active
        return {
            "moe_router_load_balancing_type": kind,
            "moe_aux_loss_coeff": coefficient,
            "moe_further_balancing_types": tuple(kind for kind, _ in further),
            "moe_further_aux_loss_coeffs": tuple(coefficient for _, coefficient in further),
        }

    def _activation(self) -> dict[str, bool]:
        function = self.activation_func
        name = getattr(function, "__name__", str(function))
        fused = self.bias_activation_fusion and self.add_bias_linear
        approximate = {"openai_gelu": name == "openai_gelu" or (name == "gelu" and fused)}
        if self.gated_linear_unit and name in ("silu", "gelu", "openai_gelu", "quick_gelu"):
            kinds = {"silu": "swiglu", "quick_gelu": "quick_geglu"}
            return {kinds.get(name, "geglu"): True} | approximate
        if not self.gated_linear_unit and name in ("gelu", "openai_gelu", "squared_relu"):
            return {"squared_relu": name == "squared_relu"} | approximate
        raise ConfigError(
            f"activation_func={name} with gated_linear_unit={self.gated_linear_unit} is not supported; legal: gelu, "
            "openai_gelu, squared_relu, and gated silu, gelu, openai_gelu, quick_gelu"
        )


_FP8 = setting_names(FP8) & {f.name for f in fields(TransformerConfig)}
"""Settings of FP8 with the same name in both configurations."""


@dataclass
class MLATransformerConfig(mirror("MLATransformerConfig"), TransformerConfig):  # type: ignore[misc]
    """``TransformerConfig`` of models with multi-latent attention, with Megatron Core's defaults for these."""

    def rotary_scaling(self) -> dict[str, Any]:
        """Return the scaling of rotary positions under the engine's names."""
        return {
            "use_rope_scaling": self.rope_type == "yarn",
            "rope_scaling_type": "yarn" if self.rope_type == "yarn" else "llama3",
            "rope_scaling_factor": self.rotary_scaling_factor,
            "yarn_beta_fast": self.beta_fast,
            "yarn_beta_slow": self.beta_slow,
        }
