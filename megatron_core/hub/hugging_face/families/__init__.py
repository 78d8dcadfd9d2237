"""Rules and rows of architectures that need more than the tables of ``declarations.yaml``."""
