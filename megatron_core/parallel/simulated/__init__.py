"""A simulated world: all ranks of a job in one process, with collectives through memory.

``scheduler``: one rank computes at a time, until it waits; ``group``: the process group; ``world``: the threads of the
ranks, and what torch.distributed knows of each; ``report``: which ranks wait for what, and where.
"""
