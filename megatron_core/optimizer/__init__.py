"""Optimizers, loss scaling and learning-rate schedules."""
