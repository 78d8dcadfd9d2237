"""A simulated world: ranks of a job as threads, with collectives through memory.

``scheduler``: one rank of a process computes at a time, until it waits; ``meeting``: collectives and messages;
``group``: the process group; ``world``: the threads of the ranks, and what torch.distributed knows of each;
``divided``: the processes of a world; ``report``: which ranks wait for what, and where.
"""
