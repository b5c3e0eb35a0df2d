"""Training: a run from its configuration to an adapter."""

from trillion_moe.train.trainer import NotFiniteError, Result, Trainer

__all__ = ["NotFiniteError", "Result", "Trainer"]
