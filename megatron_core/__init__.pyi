from .training.engine import Engine as Engine
from .training.engine import initialize as initialize
from .training.engine import parallelize as parallelize
