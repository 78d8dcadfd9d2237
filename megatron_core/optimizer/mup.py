"""Learning rates of maximal update parametrisation, with which those of a narrow model are right for a wide one.

Source: Yang et al. 2022 (arXiv 2203.03466), table 8 and appendix B.3.
"""


def width_factors(optimizer: str, width: float, *, hidden: bool) -> tuple[float, float]:
    """The factors of learning rate and epsilon at ``width`` times the base width.

    ``hidden`` are matrices between two layers; embeddings, the output layer, biases and norms are not. SGD scales these
    others by width; every other optimizer scales hidden matrices by 1 / width, and Adam its epsilon with them. Matrices
    that Muon makes orthogonal are the callers' exception: their updates have the same size at every width.
    """
    if optimizer == "sgd":
        return (1.0 if hidden else width), 1.0
    if not hidden:
        return 1.0, 1.0
    return 1.0 / width, 1.0 / width if optimizer == "adam" else 1.0
