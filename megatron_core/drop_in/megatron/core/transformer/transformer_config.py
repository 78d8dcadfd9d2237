"""The configuration of a transformer."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.config_changes import ChangingConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron_core.config import ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_core.config.fp8 import FP8Config, Recipe
from megatron_core.config.moe import LoadBalancing
from megatron_core.config.rules_fp8 import fp8_problems
from megatron_core.config.rules_parallel import RECOMPUTABLE
from megatron_core.config.tables import read_table
from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.parallel.initialization import Normal
from megatron_core.tensor_parallel.fp8 import FP8Precision
from megatron_core.tensor_parallel.options import ModelParallelConfig as ParallelOptions


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return nn.functional.relu(x).square()


_TABLES = read_table(__file__)
_WITHOUT_EFFECT: dict[str, object] = _TABLES["without_effect"]
_NOT_SUPPORTED: dict[str, object] = _TABLES["not_supported"]
_FP8: dict[str, object] = _TABLES["fp8"]
_OTHERS = _WITHOUT_EFFECT | _NOT_SUPPORTED | _FP8
_OtherFields = make_dataclass("_OtherFields", [(name, Any, field(default=value)) for name, value in _OTHERS.items()])
_RENAMED: dict[str, str] = _TABLES["renamed"]
_DISPATCHERS = ("allgather", "alltoall", "flex", "alltoall_seq")
_TRANSLATED = frozenset(_TABLES["translated"].split())


@dataclass
class TransformerConfig(ChangingConfig, ModelParallelConfig, _OtherFields):  # type: ignore[misc, valid-type]
    """Megatron Core's fields with Megatron Core's defaults; ``model_config`` makes this package's configuration of it.

    Those that models here do not read are in ``transformer_config.yaml``; of these, the ones that are not supported
    keep their values for modules of the caller, and are an error in ``model_config``.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: Any = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    attention_backend: AttnBackend = AttnBackend.auto
    softmax_scale: float | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = nn.functional.gelu
    bias_activation_fusion: bool = False
    """With biases, GELU in the tanh approximation, which Megatron Core's fused kernel computes."""
    num_moe_experts: int | None = None
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | Sequence[int] | None = None
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    multi_latent_attention: bool = False
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = 0.1
    init_method: Callable[[Tensor], object] | None = None
    output_layer_init_method: Callable[[Tensor], object] | None = None
    embedding_init_method: Callable[[Tensor], object] | None = None
    init_method_std: float = 0.02
    embedding_init_method_std: float | None = None
    use_mup: bool = False
    mup_width_mult: float = 1.0
    """hidden_size / mup_base_hidden_size, whatever is given."""
    mup_base_hidden_size: int | None = None
    mup_base_head_dim: float | None = None
    mup_attn_scale_power: float = 1.0
    mup_embedding_mult: float = 1.0
    mup_output_mult: float = 1.0
    apply_query_key_layer_scaling: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str | None = None
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_input_jitter_eps: float | None = None
    moe_router_force_load_balancing: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_enable_routing_replay: bool = False
    cp_comm_type: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from other fields, as Megatron Core does, and check what cannot be."""
        super().__post_init__()
        self.ffn_hidden_size = self.ffn_hidden_size or 4 * self.hidden_size
        if self.kv_channels is None and self.num_attention_heads:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        self.num_query_groups = self.num_query_groups or self.num_attention_heads
        self.recompute_modules = ["core_attn"] if self.recompute_modules is None else list(self.recompute_modules)
        if self.moe_layer_recompute:
            self.recompute_granularity = "selective"
            self.recompute_modules = list(dict.fromkeys([*self.recompute_modules, "moe"]))
        if self.num_moe_experts is not None:
            self.moe_ffn_hidden_size = self.moe_ffn_hidden_size or self.ffn_hidden_size
        if self.params_dtype == torch.float32 and (self.fp16 or self.bf16):
            self.params_dtype = torch.float16 if self.fp16 else torch.bfloat16
        if (layout := self.pipeline_model_parallel_layout) is not None:
            if not isinstance(layout, PipelineParallelLayerLayout):
                layout = PipelineParallelLayerLayout(layout, self.pipeline_model_parallel_size)
            layout.validate_layer_layout(self.num_layers, self.mtp_num_layers)
            chunks = layout.virtual_pipeline_model_parallel_size
            if self.virtual_pipeline_model_parallel_size not in (None, chunks):
                raise ConfigError(
                    f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size}, but "
                    f"pipeline_model_parallel_layout={layout} has {chunks} chunks on each rank; leave the size out"
                )
            self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
            self.pipeline_model_parallel_layout = layout
        for wrong in self._problems():
            raise ConfigError(wrong)
        if self.use_mup:
            self._set_mup()
        # Under Megatron's names, for modules of the caller.
        std = self.init_method_std / self.mup_width_mult**0.5
        self.init_method = self.init_method or Normal(std)
        self.output_layer_init_method = self.output_layer_init_method or Normal(
            std / (2.0 * max(self.num_layers, 1)) ** 0.5
        )
        self.embedding_init_method_std = self.embedding_init_method_std or self.init_method_std
        self.embedding_init_method = self.embedding_init_method or Normal(self.embedding_init_method_std)

    def _set_mup(self) -> None:
        """What maximal update parametrisation makes of the width (``config.MuPConfig``)."""
        self.mup_base_hidden_size = self.hidden_size if self.mup_base_hidden_size is None else self.mup_base_hidden_size
        if self.mup_base_hidden_size <= 0:
            raise ConfigError(f"mup_base_hidden_size={self.mup_base_hidden_size} must be positive")
        self.mup_width_mult = self.hidden_size / self.mup_base_hidden_size
        if self.softmax_scale is None:
            base = (self.mup_base_head_dim or 1.0) ** 0.5
            self.softmax_scale = base / (self.kv_channels or 1) ** self.mup_attn_scale_power
        if self.mup_output_mult == 1.0:
            self.mup_output_mult = 1.0 / self.mup_width_mult
        given = [name for name in ("init_method", "output_layer_init_method") if getattr(self, name) is not None]
        if given:
            warnings.warn(f"use_mup is enabled, and {', '.join(given)} does not know of it", stacklevel=3)

    def _problems(self) -> list[str]:
        heads, groups, tp = self.num_attention_heads, self.num_query_groups or 0, self.tensor_model_parallel_size
        rules = {
            "fp16 and bf16 exclude each other": self.fp16 and self.bf16,
            f"num_attention_heads={heads} must be a multiple of tensor_model_parallel_size={tp}": heads % tp,
            f"num_query_groups={groups} must be a multiple or a divisor of tensor_model_parallel_size={tp}": groups
            and groups % tp
            and tp % groups,
            f"num_moe_experts={self.num_moe_experts} must be above 0": (self.num_moe_experts or 1) < 1,
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
        return [text for text, broken in rules.items() if broken]

    def model_config(self, **given: Any) -> ModelConfig:
        """This package's configuration of the same model; ``given`` are fields of it that Megatron keeps elsewhere.

        ConfigError, with all of them in one message: fields that are not supported and not at their defaults.
        """
        known = {f.name for f in fields(ModelConfig)}
        off = {
            name: (default, [], ()) if default is not None else (None, False, [], ())
            for name, default in _NOT_SUPPORTED.items()
        }
        wrong = [name for name, values in off.items() if getattr(self, name) not in values and name not in known]
        defaults = {f.name: f.default for f in fields(TransformerConfig)}
        values: dict[str, Any] = self._activation() | self._translated()
        for item in fields(type(self)):
            name, value = item.name, getattr(self, item.name)
            target = _RENAMED.get(name, name)
            if target in values or name in _WITHOUT_EFFECT or name in _TRANSLATED or name in _FP8:
                continue
            if target in known:
                values[target] = value
            elif name not in _NOT_SUPPORTED and name not in _PARALLEL and value != defaults.get(name, value):
                wrong.append(name)
        if wrong:
            listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise ConfigError(f"TransformerConfig: the models of this package do not support {listed}; leave them out")
        return ModelConfig(**values | given)

    def parallel_options(self) -> ParallelOptions:
        """What this package's layers read."""
        kinds = self.cp_comm_type or "p2p"
        return ParallelOptions(
            sequence_parallel=self.sequence_parallel,
            params_dtype=self.params_dtype,
            tp_comm_overlap=self.tp_comm_overlap,
            cp_comm_type=(kinds,) if isinstance(kinds, str) else tuple(kinds),
            perform_initialization=self.perform_initialization,
            variable_seq_lengths=self.variable_seq_lengths,
            kernel_backend=self.kernel_backend,
            fp8_precision=self._fp8(),
            device=self.device,
        )

    def fp8_settings(self) -> FP8Config | None:
        """This package's settings of FP8; None without it."""
        if not self.fp8:
            return None
        legal = {"fp8": ("e4m3", "hybrid"), "fp8_recipe": get_args(Recipe)}
        for name, values in legal.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name}={getattr(self, name)!r} is none of {', '.join(values)}")
        return FP8Config(fp8_format=self.fp8, **{name: getattr(self, name) for name in _FP8 if name != "fp8"})

    def _fp8(self) -> FP8Precision | None:
        settings = self.fp8_settings()
        if settings is None:
            return None
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )
        training = TrainingConfig(**vars(settings))
        for problem in fp8_problems(RunConfig(model=self.model_config(), parallel=parallel, training=training)):
            raise ConfigError(problem)
        return FP8Precision(settings, settings.fp8_layers(self.num_layers), current().context.whole)

    def _translated(self) -> dict[str, Any]:
        """Fields that have other values here."""
        unfused = self.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        freq, skip = self.moe_layer_freq, self.window_attn_skip_freq
        for hook, std in (
            ("init_method", self.init_method_std / self.mup_width_mult**0.5),
            ("embedding_init_method", None),
        ):
            method = getattr(self, hook)
            if not isinstance(method, Normal) or (std is not None and method.std != std):
                raise ConfigError(f"{hook}={method} is not supported by the models; give init_method_std")
        if self.cross_entropy_fusion_impl not in ("native", "linear"):
            raise ConfigError(f"cross_entropy_fusion_impl={self.cross_entropy_fusion_impl!r} is not supported: native")
        yarn = {} if not isinstance(self, MLATransformerConfig) else self.rotary_scaling()
        return yarn | {
            "disable_bias_linear": not self.add_bias_linear,
            "attention_backend": "unfused" if unfused else "auto",
            "group_query_attention": self.num_query_groups != self.num_attention_heads,
            "moe_layer_freq": (freq,) if isinstance(freq, int) else tuple(freq),
            "window_attn_skip_freq": (skip,) if isinstance(skip, int) else skip and tuple(skip),
            "moe_router_dtype": self.moe_router_dtype or "fp32",
            **self._balancing(),
            "moe_token_dispatcher_type": "allgather" if self.moe_token_dispatcher_type == "allgather" else "alltoall",
            "recompute_modules": tuple(self.recompute_modules or ()),
            "recompute_method": self.recompute_method or ("block" if self.recompute_granularity == "full" else None),
        }

    def _balancing(self) -> dict[str, Any]:
        """The type of load balancing and its coefficient; of several types one may have an effect."""
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
        if len(active) > 1:
            raise ConfigError(f"{given}: a model has one of them; set the coefficients of the others to 0")
        kind, coefficient = active[0]
        return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}

    def _activation(self) -> dict[str, bool]:
        function = self.activation_func
        name = getattr(function, "__name__", str(function))
        fused = self.bias_activation_fusion and self.add_bias_linear
        approximate = {"openai_gelu": name == "openai_gelu" or (name == "gelu" and fused)}
        if self.gated_linear_unit and name in ("silu", "gelu", "openai_gelu"):
            return {"swiglu": name == "silu", "geglu": name != "silu"} | approximate
        if not self.gated_linear_unit and name in ("gelu", "openai_gelu", "squared_relu"):
            return {"squared_relu": name == "squared_relu"} | approximate
        raise ConfigError(
            f"activation_func={name} with gated_linear_unit={self.gated_linear_unit} is not supported; legal: gelu, "
            "openai_gelu, squared_relu, and gated silu, gelu, openai_gelu"
        )


_PARALLEL = {f.name for f in fields(ModelParallelConfig)}


@dataclass
class MLATransformerConfig(TransformerConfig):
    """``TransformerConfig`` of models with multi-latent attention, with Megatron Core's defaults of these."""

    multi_latent_attention: bool = True
    normalization: str = "RMSNorm"
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: str = "yarn"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    cache_mla_latents: bool = False
    mla_down_proj_fusion: bool = False

    def rotary_scaling(self) -> dict[str, Any]:
        """The scaling of rotary positions under this package's names."""
        return {
            "use_rope_scaling": self.rope_type == "yarn",
            "rope_scaling_type": "yarn" if self.rope_type == "yarn" else "llama3",
            "rope_scaling_factor": self.rotary_scaling_factor,
            "yarn_beta_fast": self.beta_fast,
            "yarn_beta_slow": self.beta_slow,
        }
