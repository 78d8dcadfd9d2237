"""Adagrad under DeepSpeed's name."""

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad
