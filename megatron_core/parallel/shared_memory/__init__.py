"""Collectives and messages between CPU ranks of one host through shared memory: torch.distributed's backend ``shm``.

``host``: the memory and who can reach whom; ``work``: waiting, time limits and ranks that died; ``group``: the process
group that torch.distributed calls; ``backend``: its registration, and when gloo is taken instead.
"""
