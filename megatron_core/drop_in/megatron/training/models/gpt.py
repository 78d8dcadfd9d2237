"""The settings of a GPT and its builder."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from megatron.core.enums import AttnBackend, ModelType
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (  # type: ignore[attr-defined]
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_heterogeneous_layer_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_inference_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec  # type: ignore[import-not-found]
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks
from megatron.training.models.dist_utils import unimodal_build_distributed_models
from megatron.training.utils.common_utils import calculate_padded_vocab_size
from megatron_core.errors import ConfigError

logger = logging.getLogger(__name__)


def default_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Return the specification of the layers of a ``GPTModelConfig``: of one layer, or of all if they differ."""
    settings = config.transformer
    engine = settings.transformer_impl == "transformer_engine"
    if settings.transformer_impl == "inference_optimized":
        return get_gpt_layer_with_inference_spec(
            settings.qk_layernorm, settings.multi_latent_attention, qk_l2_norm=settings.qk_l2_norm
        )
    if config.restore_modelopt_state:
        from megatron.core import parallel_state

        given = config.use_arbitrary_attention_mask
        return get_gpt_modelopt_spec(
            config=settings,
            local_core_attention=False,
            remap_te_layernorm=True,
            real_quant_cfg="None",
            use_arbitrary_attention_mask=(
                parallel_state.get_context_parallel_world_size() == 1 if given is None else given
            ),
        )
    if settings.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config=settings, vp_stage=vp_stage)
    if settings.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(
            settings,
            use_transformer_engine=engine,
            normalization=settings.normalization,
            qk_l2_norm=settings.qk_l2_norm,
            vp_stage=vp_stage,
        )
    if isinstance(settings, HeterogeneousTransformerConfig):
        return get_gpt_heterogeneous_layer_spec(settings, engine)
    return _te_or_local_layer_spec(config, vp_stage)


def _te_or_local_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Return the specification of one layer of the kind ``transformer_impl``."""
    settings = config.transformer
    engine = settings.transformer_impl == "transformer_engine"
    function = get_gpt_layer_with_transformer_engine_spec if engine else get_gpt_layer_local_spec
    kind: tuple[Any, ...] = (
        settings.num_moe_experts,
        settings.moe_grouped_gemm,
        settings.qk_layernorm,
        settings.multi_latent_attention,
    )
    kind += (settings.experimental_attention_variant,)
    names = ["use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"]
    others: dict[str, Any] = {} if engine else {"normalization": settings.normalization}
    if engine:
        names += ["qk_l2_norm", "use_te_activation_func", "mla_down_proj_fusion", "use_grouped_gemm_for_dense_mlp"]
        if "use_te_op_fuser" in inspect.signature(function).parameters:
            others["use_te_op_fuser"] = config.use_transformer_engine_op_fuser
    return function(*kind, **others, **{name: getattr(settings, name, False) for name in names})


def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
    """Return the specification of multi-token prediction, whose layers equal the model's last; None without it."""
    settings = config.transformer
    if settings.mtp_num_layers is None:
        return None
    engine = settings.transformer_impl == "transformer_engine"
    if getattr(transformer_layer_spec, "layer_specs", None) == []:  # the last stage may have no other layers
        layer = _te_or_local_layer_spec(config, vp_stage)
    else:
        layer = get_gpt_decoder_layer_specs(
            settings,
            use_transformer_engine=engine,
            normalization=settings.normalization,
            qk_l2_norm=settings.qk_l2_norm,
            vp_stage=vp_stage,
        )[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(settings, layer, use_transformer_engine=engine, vp_stage=vp_stage)


@dataclass(kw_only=True)
class GPTModelConfig(ModelConfig):
    """Arguments of ``GPTModel`` with the ``TransformerConfig`` in ``transformer``.

    ``transformer_layer_spec`` is a specification, a function of this object (and ``vp_stage``) that returns one, or
    None for ``default_layer_spec``. ``should_pad_vocab`` rounds ``vocab_size`` up to a multiple of
    ``make_vocab_size_divisible_by`` x tensor_model_parallel_size. Attributes of ``transformer`` can be read and set
    here.
    """

    builder: ClassVar[str] = "megatron.training.models.gpt.GPTModelBuilder"

    transformer: TransformerConfig
    transformer_layer_spec: Any = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    should_pad_vocab: bool = False
    seq_length: int = 1024
    fp16_lm_cross_entropy: bool = False
    logit_dtype: torch.dtype | None = None
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    scatter_embedding_sequence_parallel: bool = True
    seq_len_interpolation_factor: float | None = None
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None
    use_arbitrary_attention_mask: bool | None = None

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("transformer")
        if inner is None or name.startswith("__") or not hasattr(inner, name):
            raise AttributeError(f"neither GPTModelConfig nor its transformer has an attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("transformer")
        if inner is not None and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def finalize(self) -> None:
        """Check settings that depend on each other.

        The layers of each stage must be divisible by the number of its chunks, unless ``transformer`` describes the
        stages, and CUDA graphs need ``use_te_rng_tracker``. Raises AssertionError.
        """
        own: Any = self.transformer
        if callable(getattr(own, "finalize", None)):
            own.finalize()
        assert own.cuda_graph_impl == "none" or own.use_te_rng_tracker, (
            f"cuda_graph_impl={own.cuda_graph_impl} needs Transformer Engine's RNG tracker; set use_te_rng_tracker=True"
        )
        described = (
            own.account_for_embedding_in_pipeline_split,
            own.account_for_loss_in_pipeline_split,
            own.num_layers_in_first_pipeline_stage,
            own.num_layers_in_last_pipeline_stage,
            own.pipeline_model_parallel_layout,
        )
        chunks, stages = own.virtual_pipeline_model_parallel_size, own.pipeline_model_parallel_size
        if chunks and not any(described):
            assert own.num_layers // stages % chunks == 0, (
                f"num_layers={own.num_layers} over {stages} stages must be a multiple of the number of model chunks "
                f"virtual_pipeline_model_parallel_size={chunks}"
            )


_OWN = ("transformer", "transformer_layer_spec", "vocab_size", "make_vocab_size_divisible_by", "should_pad_vocab")
_OTHERS = (*_OWN, "seq_length", "tp_comm_overlap_cfg", "use_arbitrary_attention_mask")
_PASSED = [each.name for each in fields(GPTModelConfig) if each.name not in {*_OTHERS, *vars(ModelConfig())}]
"""The fields that are arguments of ``GPTModel`` with the same name."""


class GPTModelBuilder(ModelBuilder[GPTModel, GPTModelConfig]):
    """Builds the stages of the model of a ``GPTModelConfig``."""

    def build_model(
        self,
        pg_collection: Any = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Build this rank's stage, or its chunk ``vp_stage``.

        The defaults of ``pre_process`` and ``post_process`` are whether the chunk is the first and the last one. Raises
        ConfigError without a ``vocab_size`` and for unsupported settings.
        """
        own: Any = self._model_config
        given, spec = self._stage(pg_collection, pre_process, post_process, vp_stage), self._spec(vp_stage)
        return GPTModel(
            transformer_layer_spec=spec,
            mtp_block_spec=mtp_block_spec(own, spec, vp_stage=vp_stage),
            **given,
            **{name: getattr(own, name) for name in _PASSED},
        )

    def _stage(self, pg_collection: Any, pre: bool | None, post: bool | None, vp_stage: int | None) -> dict[str, Any]:
        """Return the arguments of the model of a stage that have other names in the configuration."""
        own: Any = self._model_config
        if own.vocab_size is None:
            raise ConfigError(f"{type(own).__name__}: vocab_size=None; set the number of tokens")
        size = own.vocab_size
        if own.should_pad_vocab:
            unit = own.make_vocab_size_divisible_by
            size = calculate_padded_vocab_size(size, unit, own.transformer.tensor_model_parallel_size)
        pp = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(["pp"])).pp
        chunk = {"vp_stage": vp_stage, "vp_size": own.virtual_pipeline_model_parallel_size}
        return {
            "config": own.transformer,
            "vocab_size": size,
            "max_sequence_length": own.seq_length,
            "pre_process": is_vp_first_stage(**chunk) and is_pp_first_stage(pp) if pre is None else pre,
            "post_process": is_vp_last_stage(**chunk) and is_pp_last_stage(pp) if post is None else post,
            "vp_stage": vp_stage,
            "pg_collection": pg_collection,
        }

    def _spec(self, vp_stage: int | None) -> Any:
        own: Any = self._model_config
        spec = own.transformer_layer_spec
        if spec is None:
            spec = default_layer_spec(own, vp_stage)
        elif callable(spec) and not isinstance(spec, ModuleSpec):
            takes_chunk = "vp_stage" in inspect.signature(spec).parameters
            spec = spec(own, vp_stage=vp_stage) if takes_chunk else spec(own)
        if own.attention_backend == AttnBackend.local and hasattr(spec, "submodules"):
            spec.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: Any = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = True,
        mixed_precision_wrapper: Callable[[Any, Any], Any] | None = Float16Module,
        model_type: ModelType = ModelType.encoder_or_decoder,
        **layer_wise: Any,
    ) -> list[Any]:
        """Build this rank's chunks and wrap them, with the hooks of the configuration before and after."""
        own: Any = self._model_config
        wrapping = (overlap_param_gather_with_optimizer_step, use_megatron_fsdp, use_torch_fsdp2, wrap_with_ddp)
        modes = (data_parallel_random_init, mixed_precision_wrapper, compose_hooks(own.pre_wrap_hooks), model_type)
        models = unimodal_build_distributed_models(
            self.build_model, own.transformer, pg_collection, ddp_config, *wrapping, *modes, **layer_wise
        )
        changed: list[Any] | None = compose_hooks(own.post_wrap_hooks)(models)
        if changed is None:
            logger.warning("post_wrap_hooks returned None: the chunks remain; let them return their list")
        return models if changed is None else changed
