"""Optional features: one folder each, and those of other packages. This list is the only place that names them."""

from megatron_core import cpu_ranks, reports, resilience
from megatron_core.features.averages import AVERAGES
from megatron_core.features.compression import COMPRESSION
from megatron_core.features.cuda_graphs import CUDA_GRAPHS
from megatron_core.features.distillation import DISTILLATION
from megatron_core.features.preferences import PREFERENCES
from megatron_core.features.qk_clip import QK_CLIP
from megatron_core.features.questions import QUESTIONS
from megatron_core.features.recurrent import RECURRENT
from megatron_core.features.sparse_attention import SPARSE_ATTENTION

FEATURES = (
    AVERAGES,
    COMPRESSION,
    CUDA_GRAPHS,
    DISTILLATION,
    PREFERENCES,
    QK_CLIP,
    QUESTIONS,
    RECURRENT,
    SPARSE_ATTENTION,
    *cpu_ranks.FEATURES,
    *reports.FEATURES,
    *resilience.FEATURES,
)
"""In the order in which their sections are shown and their parts of a run are called."""
