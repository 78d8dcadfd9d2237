from .layer import MoELayer as MoELayer
from .layer import moe_loss_names as moe_loss_names
from .router import Routing as Routing
from .router import TopKRouter as TopKRouter
from .router import update_expert_biases as update_expert_biases
