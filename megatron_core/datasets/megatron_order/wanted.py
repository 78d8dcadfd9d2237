"""How many samples of each split a run asks for, by Megatron's rule."""


def samples_wanted(
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    eval_interval: int,
    eval_iters: int,
) -> tuple[int, int, int]:
    """Samples of training, validation and test.

    With B = global_batch_size: train_iters B, or train_samples; (train_iters // eval_interval + 1) eval_iters B;
    eval_iters B. A run that is given in samples has train_iters = train_samples // B. These numbers decide about the
    epochs, and so about the order: another --train-iters is another order.
    """
    if train_samples is not None:
        iterations = train_samples // global_batch_size
    else:
        iterations = train_iters or 0
        train_samples = iterations * global_batch_size
    evaluations = iterations // eval_interval + 1
    return train_samples, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size
