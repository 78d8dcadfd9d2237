import megatron_core.feature

from .attention import SplitSequence as SplitSequence
from .attention import split_attention as split_attention
from .exchange import AllGatherExchange as AllGatherExchange
from .exchange import Exchange as Exchange
from .exchange import HeadExchange as HeadExchange
from .exchange import RingExchange as RingExchange
from .products import Mask as Mask
from .products import Products as Products
from .products import Unfused as Unfused
from .products import fused_products as fused_products
from .tiles import Tile as Tile

CONTEXT_PARALLELISM: megatron_core.feature.Feature
