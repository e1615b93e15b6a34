"""What the simulator raises."""

from __future__ import annotations


class SimulatorError(Exception):
    """The simulator cannot run this: what it was given is wrong, or not modelled."""


class PtxSyntaxError(SimulatorError):
    """The text is not PTX that the parser knows."""


class UnknownInstructionError(SimulatorError):
    """An instruction, or a form of one, that the simulator does not model. Nothing is skipped silently."""
