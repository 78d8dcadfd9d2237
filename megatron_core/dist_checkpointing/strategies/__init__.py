"""For Megatron Core's users: how sharded state dicts are written."""
