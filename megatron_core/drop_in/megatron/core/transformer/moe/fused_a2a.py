"""Names of fused token exchange, with their values in Megatron where DeepEP, HybridEP and NCCL's EP are not installed.

``moe_token_dispatcher_type="flex"`` gives the same result with the engine's own exchange.
"""

HAVE_DEEP_EP = HAVE_HYBRIDEP = HAVE_TE_EP = False

fused_dispatch = fused_combine = set_deepep_num_sms = None
hybrid_ep_dispatch = hybrid_ep_combine = None
