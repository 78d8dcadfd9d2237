"""Names of ``megatron.training.utils``."""

from megatron.training.global_vars import get_args, get_timers
from megatron.training.models.dist_utils import to_empty_if_meta_device
from megatron.training.utils import common_utils
from megatron.training.utils.common_utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_device_arch_version,
    get_local_rank_preinit,
    get_ltor_masks_and_position_ids,
    get_nvtx_range,
    has_nvrx_checkpointing_async_support,
    has_nvrx_installed,
    is_first_or_last_pipeline_stage,
    is_gtp_remat_active,
    is_hybrid_model,
    is_last_rank,
    is_rank0,
    logical_and_across_model_parallel_group,
    print_rank_0,
    print_rank_last,
    reduce_max_stat_across_model_parallel_group,
    report_memory,
    unwrap_model,
    update_use_dist_ckpt,
    warn_rank_0,
)
from megatron.training.utils.log_utils import append_to_progress_log, barrier_and_log, setup_logging
from megatron.training.utils.params_norm import calc_params_l2_norm
