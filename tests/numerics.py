"""How tests compare arrays: relative RMS, cosine, and one table of tolerances by dtype."""

import numpy as np

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
"""Relative RMS between two ways of computing the same thing."""


def rel_rms(found, expected) -> float:
    """Root mean square of the difference over that of the expected values (over 1 if those are all 0)."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.isfinite(found).all()
    assert np.isfinite(expected).all()
    scale = np.sqrt(np.mean(expected**2)) if expected.size else 0.0
    return float(np.sqrt(np.mean((found - expected) ** 2)) / (scale or 1.0)) if expected.size else 0.0


def cosine(found, expected) -> float:
    found, expected = (np.asarray(a, np.float64).ravel() for a in (found, expected))
    return float(found @ expected / np.sqrt((found @ found) * (expected @ expected)))
