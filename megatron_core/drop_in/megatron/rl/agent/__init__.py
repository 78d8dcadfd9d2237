"""Reinforcement learning, which is not supported."""
