"""Post-training: objectives of log-probabilities, and a trainer that a program drives."""

from megatron_core.post_training.trainer import TokenScores, Trainer
from megatron_core.post_training.trajectories import Trajectory
