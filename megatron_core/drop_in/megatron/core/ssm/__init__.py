"""State-space layers, which are not supported."""
