"""Post-training: objectives of log-probabilities, a trainer that a program drives, and its sampler."""

from megatron_core.post_training.answers import Answer, RolloutRequest, largest_difference
from megatron_core.post_training.environments import Environment, FunctionEnvironment, HttpEnvironment, Reply, Turn
from megatron_core.post_training.episodes import EnvironmentFailure, Episode, EpisodePlayer
from megatron_core.post_training.sampler import RolloutSampler
from megatron_core.post_training.trainer import TokenScores, Trainer
from megatron_core.post_training.trajectories import Trajectory
