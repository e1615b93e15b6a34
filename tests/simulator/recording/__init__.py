"""Micro-kernels and access patterns that a GPU ran once, and the records that the simulator is checked against.

``instructions`` records what each instruction computes, ``traffic`` what each pattern moves (both are commands for a
machine with a GPU); ``replay`` runs a record of the first through the simulator.
"""

from tests.simulator.recording.replay import Record, read_record, replay

__all__ = ["Record", "read_record", "replay"]
