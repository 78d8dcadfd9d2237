"""A server with the API of Tinker: its client trains and samples with a ``Trainer`` in any layout.

``messages`` (bytes), ``bodies`` (JSON) and ``losses`` are the protocol; ``trainings`` exchanges the states of several
trainings in one trainer; ``operations`` executes requests on all ranks, ``service`` orders them, ``web`` answers.
"""
