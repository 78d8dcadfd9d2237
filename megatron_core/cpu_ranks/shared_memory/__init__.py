"""Shared-memory collectives and messages between CPU ranks of one host: the torch.distributed backend ``shm``.

``host``: the shared memory and the reachable ranks; ``work``: waiting, time limits and lost ranks; ``group``: the
process group; ``backend``: its registration, and the fallback to gloo.
"""
