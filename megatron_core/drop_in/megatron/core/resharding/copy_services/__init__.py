"""Changes of the layout of a running model, which are not supported."""
