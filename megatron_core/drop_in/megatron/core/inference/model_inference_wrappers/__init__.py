"""Models for generation."""
