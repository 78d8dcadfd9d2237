from .any_model import Engine as Engine
from .any_model import LayerSpec as LayerSpec
from .any_model import PipelineModule as PipelineModule
from .any_model import TiedLayerSpec as TiedLayerSpec
from .any_model import initialize as initialize
from .any_model import meta_init as meta_init
from .any_model import parallelize as parallelize
