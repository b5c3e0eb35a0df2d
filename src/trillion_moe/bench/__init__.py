"""Measurements: every figure is a ratio to a named rival, timed in turn with it in one process."""
