"""Flags of scripts for the Trainer of transformers and trl, and the flags here with the same meaning."""

SAME_MEANING = {
    "adam_epsilon": "--adam-eps",
    "eval_steps": "--eval-interval",
    "gradient_accumulation_steps": "--global-batch-size (of a step: per device x accumulation x data-parallel ranks)",
    "gradient_checkpointing": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "learning_rate": "--lr",
    "logging_steps": "--log-interval",
    "lr_scheduler_type": "--lr-decay-style",
    "max_grad_norm": "--clip-grad",
    "max_length": "--seq-length",
    "max_seq_length": "--seq-length",
    "max_steps": "--train-iters",
    "model_name_or_path": "--load-hf (a folder)",
    "num_train_epochs": "--train-samples (epochs x samples, whose number a note at the start gives)",
    "output_dir": "--save",
    "packing": "--sft-packing first_fit",
    "per_device_eval_batch_size": "--micro-batch-size",
    "per_device_train_batch_size": "--micro-batch-size",
    "resume_from_checkpoint": "--load",
    "save_steps": "--save-interval",
    "save_total_limit": "--keep-last",
    "train_file": "--train-data-path",
    "validation_file": "--valid-data-path",
    "warmup_ratio": "--lr-warmup-fraction",
    "warmup_steps": "--lr-warmup-iters",
}
"""Name of their flag -> what to give here."""
