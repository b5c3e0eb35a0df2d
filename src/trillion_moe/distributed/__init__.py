"""Several processes, of one host or of many, as one run."""

from trillion_moe.distributed.environment import NAMES, Place, ProcessesError, find
from trillion_moe.distributed.hub import Timing
from trillion_moe.distributed.processes import Processes, current, join, report, whole

__all__ = ["NAMES", "Place", "Processes", "ProcessesError", "Timing", "current", "find", "join", "report", "whole"]
