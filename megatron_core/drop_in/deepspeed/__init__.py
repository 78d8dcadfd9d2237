"""DeepSpeed's interface over ``megatron_core.any_model``; see docs/from_deepspeed.md."""

import megatron_core.drop_in  # finds the modules of named_modules.yaml, so before the imports below

# isort: split
# Not ``from deepspeed import comm``: readers of the source know this folder by another name, and would find no module.
import deepspeed.comm
import deepspeed.elasticity  # type: ignore[import-not-found,unused-ignore]
import deepspeed.moe  # type: ignore[import-not-found,unused-ignore]
import deepspeed.ops
import deepspeed.runtime
import deepspeed.utils
from deepspeed import pipe as pipe  # type: ignore[attr-defined,unused-ignore]
from deepspeed.accelerator import get_accelerator as get_accelerator
from deepspeed.comm import comm as dist
from deepspeed.comm.comm import init_distributed as init_distributed
from deepspeed.git_version_info import git_branch as __git_branch__
from deepspeed.git_version_info import git_hash as __git_hash__
from deepspeed.git_version_info import major as __version_major__
from deepspeed.git_version_info import minor as __version_minor__
from deepspeed.git_version_info import patch as __version_patch__
from deepspeed.git_version_info import version as __version__
from deepspeed.git_version_info import version as version
from deepspeed.inference.engine import InferenceEngine as InferenceEngine
from deepspeed.inference.engine import init_inference as init_inference
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime import zero as zero
from deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
from deepspeed.runtime.config import DeepSpeedConfigError as DeepSpeedConfigError
from deepspeed.runtime.config import add_config_arguments as add_config_arguments
from deepspeed.runtime.dataloader import DeepSpeedDataLoader as DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
from deepspeed.runtime.engine import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
from deepspeed.runtime.engine import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable
from deepspeed.runtime.initialize import initialize as initialize
from deepspeed.runtime.initialize import tp_model_init as tp_model_init
from deepspeed.runtime.pipe.engine import PipelineEngine as PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule as PipelineModule
from deepspeed.utils.init_on_device import OnDevice as OnDevice
from deepspeed.utils.logging import log_dist as log_dist
from deepspeed.utils.logging import logger as logger
