"""Setting up a run, its steps and its loop; names for Megatron-LM's users are imported when they are first used."""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names
from megatron_core.training.entry import pretrain
from megatron_core.training.pretrain import read_settings

if TYPE_CHECKING:
    from megatron_core.training.global_vars import get_args, get_timers, get_tokenizer
    from megatron_core.training.initialize import initialize_megatron
    from megatron_core.training.program import (
        evaluate_and_print_results,
        get_model,
        setup_model_and_optimizer,
        train_step,
    )
    from megatron_core.training.training import get_train_valid_test_num_samples
    from megatron_core.training.utils import is_last_rank, print_rank_0, print_rank_last

__getattr__ = lazy_names(__name__, __file__)
