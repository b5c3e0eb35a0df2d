"""Mixture-of-experts language models at the trillion-parameter scale, in JAX."""

__version__ = "0.1.0"
