"""Models with different layers."""
