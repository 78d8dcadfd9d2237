from .training.engine import Engine as Engine
from .training.engine import initialize as initialize
