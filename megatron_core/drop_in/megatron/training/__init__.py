"""Names of ``megatron.training``."""

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import inprocess_restart
from megatron.training.from_arguments import get_train_valid_test_num_samples
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers, get_tokenizer
from megatron.training.initialize import initialize_megatron
from megatron.training.job import pretrain
from megatron.training.program import (
    build_train_valid_test_data_iterators,
    evaluate_and_print_results,
    get_model,
    get_optimizer_param_scheduler,
    setup_model_and_optimizer,
    train_step,
)
from megatron.training.startup import set_startup_timestamps
from megatron.training.utils.common_utils import is_last_rank, print_rank_0, print_rank_last
