"""A second implementation of everything that trains: slow, in float64, on one process, without any code of the engine.

Every function is an equation of a paper, named in its docstring, written with plain torch operations, so that it can be
read against the paper. Nothing here imports ``megatron_core``, except ``engine.py``, which runs the engine, and tests.
Settings are read by name from a flat namespace ``s`` and weights from a dict by their global names.
"""
