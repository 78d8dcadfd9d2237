"""Optional features: one folder each, and those of other packages. This list is the only place that names them."""

from megatron_core import cpu_ranks, data_parts, hub, reports, resilience, storage, vocabularies
from megatron_core.features.as_megatron import AS_MEGATRON
from megatron_core.features.averages import AVERAGES
from megatron_core.features.background_saves import BACKGROUND_SAVES
from megatron_core.features.batch_growth import BATCH_GROWTH
from megatron_core.features.bf16_state import BF16_STATE
from megatron_core.features.compilation import COMPILATION
from megatron_core.features.compression import COMPRESSION
from megatron_core.features.context_parallelism import CONTEXT_PARALLELISM
from megatron_core.features.conversations import CONVERSATIONS
from megatron_core.features.cuda_graphs import CUDA_GRAPHS
from megatron_core.features.data_phases import DATA_PHASES
from megatron_core.features.device_draws import DEVICE_DRAWS
from megatron_core.features.distillation import DISTILLATION
from megatron_core.features.dynamic_context_parallelism import DYNAMIC_CONTEXT_PARALLELISM
from megatron_core.features.equal_bits import EQUAL_BITS
from megatron_core.features.experts import EXPERTS
from megatron_core.features.fill_in_the_middle import FILL_IN_THE_MIDDLE
from megatron_core.features.flex_attention import FLEX_ATTENTION
from megatron_core.features.fp8 import FP8
from megatron_core.features.hyper_connections import HYPER_CONNECTIONS
from megatron_core.features.lamb import LAMB
from megatron_core.features.latent_attention import LATENT_ATTENTION
from megatron_core.features.layer_sizes import LAYER_SIZES
from megatron_core.features.length_warmup import LENGTH_WARMUP
from megatron_core.features.local_copies import LOCAL_COPIES
from megatron_core.features.lora import LORA
from megatron_core.features.loss_scaling import LOSS_SCALING
from megatron_core.features.matrix_optimizers import MATRIX_OPTIMIZERS
from megatron_core.features.mean_of_means import MEAN_OF_MEANS
from megatron_core.features.megatron_flags import MEGATRON_FLAGS
from megatron_core.features.megatron_order import MEGATRON_ORDER
from megatron_core.features.multi_token import MULTI_TOKEN
from megatron_core.features.mup import MUP
from megatron_core.features.mxfp8_messages import MXFP8_MESSAGES
from megatron_core.features.nvidia_libraries import NVIDIA_LIBRARIES
from megatron_core.features.offload import OFFLOAD
from megatron_core.features.outer_steps import OUTER_STEPS
from megatron_core.features.output_losses import OUTPUT_LOSSES
from megatron_core.features.paired_passes import PAIRED_PASSES
from megatron_core.features.pipeline_schedules import PIPELINE_SCHEDULES
from megatron_core.features.positions import POSITIONS
from megatron_core.features.preferences import PREFERENCES
from megatron_core.features.presets import MODEL_PRESETS
from megatron_core.features.qk_clip import QK_CLIP
from megatron_core.features.questions import QUESTIONS
from megatron_core.features.recurrent import RECURRENT
from megatron_core.features.sgd_and_lion import SGD_AND_LION
from megatron_core.features.sparse_attention import SPARSE_ATTENTION
from megatron_core.features.stage_layouts import STAGE_LAYOUTS
from megatron_core.features.value_head import VALUE_HEAD

FEATURES = (
    AS_MEGATRON,
    AVERAGES,
    BACKGROUND_SAVES,
    BATCH_GROWTH,
    BF16_STATE,
    COMPILATION,
    COMPRESSION,
    CONTEXT_PARALLELISM,
    CONVERSATIONS,
    CUDA_GRAPHS,
    DATA_PHASES,
    DEVICE_DRAWS,
    DISTILLATION,
    DYNAMIC_CONTEXT_PARALLELISM,
    EQUAL_BITS,
    FILL_IN_THE_MIDDLE,
    FLEX_ATTENTION,
    FP8,
    HYPER_CONNECTIONS,
    SGD_AND_LION,
    LAMB,
    LATENT_ATTENTION,
    LAYER_SIZES,
    LENGTH_WARMUP,
    LOCAL_COPIES,
    LORA,
    LOSS_SCALING,
    MATRIX_OPTIMIZERS,
    MEAN_OF_MEANS,
    MEGATRON_FLAGS,
    MEGATRON_ORDER,
    MULTI_TOKEN,
    MUP,
    MXFP8_MESSAGES,
    NVIDIA_LIBRARIES,
    OUTER_STEPS,
    OFFLOAD,
    PAIRED_PASSES,
    PIPELINE_SCHEDULES,
    POSITIONS,
    PREFERENCES,
    MODEL_PRESETS,
    QK_CLIP,
    QUESTIONS,
    RECURRENT,
    EXPERTS,
    SPARSE_ATTENTION,
    STAGE_LAYOUTS,
    VALUE_HEAD,
    OUTPUT_LOSSES,
    *cpu_ranks.FEATURES,
    *data_parts.FEATURES,
    *hub.FEATURES,
    *reports.FEATURES,
    *resilience.FEATURES,
    *storage.FEATURES,
    *vocabularies.FEATURES,
)
"""In the order in which their sections are shown, their parts of a run are called, and their methods of a section are
called, and optimizers are listed: ``RECURRENT`` replaces the layers that ``EXPERTS`` chooses, ``VALUE_HEAD`` the head
of ``OUTPUT_LOSSES``."""
