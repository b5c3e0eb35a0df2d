"""Several processes, of one host or of many, as one run."""

from trillion_moe.distributed.environment import NAMES, Place, ProcessesError, add_place_flags, find, place_flags
from trillion_moe.distributed.hub import Timing
from trillion_moe.distributed.processes import Processes, current, join, report, whole

__all__ = [
    "NAMES",
    "Place",
    "Processes",
    "ProcessesError",
    "Timing",
    "add_place_flags",
    "current",
    "find",
    "join",
    "place_flags",
    "report",
    "whole",
]
