from .checkpoint import CheckpointConfig as CheckpointConfig
from .data import DataConfig as DataConfig
from .model import ModelConfig as ModelConfig
from .monitor import MonitorConfig as MonitorConfig
from .parallel import ParallelConfig as ParallelConfig
from .run import RunConfig as RunConfig
from .training import OptimizerConfig as OptimizerConfig
from .training import TrainingConfig as TrainingConfig
