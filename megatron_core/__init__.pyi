from .training.engine import Engine as Engine
from .training.engine import LayerSpec as LayerSpec
from .training.engine import PipelineModule as PipelineModule
from .training.engine import TiedLayerSpec as TiedLayerSpec
from .training.engine import initialize as initialize
from .training.engine import meta_init as meta_init
from .training.engine import parallelize as parallelize
