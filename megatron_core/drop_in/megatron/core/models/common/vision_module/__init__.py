"""Vision models, which are not supported."""
