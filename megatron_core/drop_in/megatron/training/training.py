"""Functions of a training program, at Megatron-LM's path."""

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer.factory import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.from_arguments import (
    SequenceLengths,
    consume_seqlen_stats_in_iteration,
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_train_valid_test_num_samples,
    num_floating_point_operations,
    settings_of,
    update_seqlen_stats_from_cu_seqlens,
)
from megatron.training.global_vars import get_args, get_timers, get_tokenizer
from megatron.training.initialize import initialize_megatron
from megatron.training.job import pretrain
from megatron.training.program import (
    Provider,
    build_pretraining_data_loader,
    build_train_valid_test_data_iterators,
    evaluate,
    evaluate_and_print_results,
    get_model,
    get_optimizer_param_scheduler,
    setup_model_and_optimizer,
    train,
    train_step,
)
from megatron.training.startup import set_startup_timestamps
from megatron.training.utils import print_rank_0, print_rank_last, unwrap_model
from megatron_core.drop_in.unsupported import unsupported

training_log = unsupported(
    "training_log writes to TensorBoard, which programs of the drop-in do not have; leave out tensorboard_dir, and log "
    "the values that train_step returns"
)
