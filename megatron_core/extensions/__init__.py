"""For Megatron Core's users: modules of other libraries, by this package's own."""
