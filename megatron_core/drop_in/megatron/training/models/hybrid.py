"""The settings of a hybrid model and its builder."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_layer_allocation import hybrid_stack_spec as default_hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

_OWN = ("hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
_SHARED = (
    *("fp16_lm_cross_entropy", "parallel_output", "share_embeddings_and_output_weights", "position_embedding_type"),
    *("rotary_percent", "rotary_base", "scatter_embedding_sequence_parallel", "seq_len_interpolation_factor"),
)


@dataclass(kw_only=True)
class HybridModelConfig(GPTModelConfig):
    """Arguments of ``HybridModel`` with the ``TransformerConfig`` in ``transformer``; see ``GPTModelConfig``."""

    builder: ClassVar[str] = "megatron.training.models.hybrid.HybridModelBuilder"

    hybrid_layer_pattern: str | None = None
    hybrid_override_pattern: str | None = None
    hybrid_attention_ratio: float = 0.0
    hybrid_mlp_ratio: float = 0.0
    hybrid_stack_spec: ModuleSpec | None = None
    seq_length: int = 8192
    position_embedding_type: str = "none"


class HybridModelBuilder(GPTModelBuilder):
    """Builds the stages of the model of a ``HybridModelConfig``."""

    def build_model(
        self,
        pg_collection: Any = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Build this rank's stage, or its chunk ``vp_stage``; see ``GPTModelBuilder.build_model``."""
        own: Any = self._model_config
        return HybridModel(
            hybrid_stack_spec=own.hybrid_stack_spec or default_hybrid_stack_spec,
            **self._stage(pg_collection, pre_process, post_process, vp_stage),
            **{name: getattr(own, name) for name in (*_OWN, *_SHARED)},
        )
