"""Commands of the package: a module for each, which ``start`` runs as ``megatron-NAME``, as a script of ``tools/`` and
with ``python -m``."""
