"""Maximal update parametrization (muP): transfer learning rates from a narrow model to a wide one.

Source: Yang et al. 2022 (arXiv 2203.03466), table 8 and appendix B.3.
"""


def width_factors(optimizer: str, width: float, *, hidden: bool) -> tuple[float, float]:
    """Return the factors on learning rate and epsilon at ``width`` times the base width.

    ``hidden``: whether the parameter is a hidden matrix, as opposed to embedding, output layer, bias or norm. SGD
    multiplies the learning rate of parameters that are not hidden by width. Every other optimizer multiplies the
    learning rate of hidden matrices by 1 / width, and Adam also its epsilon. The caller must not scale matrices
    updated by Muon: the size of their updates does not depend on the width.
    """
    if optimizer == "sgd":
        return (1.0 if hidden else width), 1.0
    if not hidden:
        return 1.0, 1.0
    return 1.0 / width, 1.0 / width if optimizer == "adam" else 1.0
