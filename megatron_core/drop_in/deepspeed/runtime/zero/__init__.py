"""ZeRO 3 for programs: ``Init`` and ``GatheredParameters``."""

from deepspeed.runtime.zero.partition_parameters import GatheredParameters as GatheredParameters
from deepspeed.runtime.zero.partition_parameters import Init as Init
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as ZeroParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamType as ZeroParamType
from deepspeed.runtime.zero.partition_parameters import register_external_parameter as register_external_parameter
from deepspeed.runtime.zero.partition_parameters import unregister_external_parameter as unregister_external_parameter
from deepspeed.runtime.zero.partition_parameters import unwrap_model_for_generation as unwrap_model_for_generation
from deepspeed.runtime.zero.tiling import TiledLinear as TiledLinear
from deepspeed.runtime.zero.tiling import TiledLinearReturnBias as TiledLinearReturnBias
