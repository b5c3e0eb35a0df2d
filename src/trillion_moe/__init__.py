"""Kimi K3 and its relatives in JAX: exact models, adapters over experts that stay packed in 4 bits.

import trillion_moe as tm

model = tm.load("path/to/checkpoint")
logits, caches = tm.forward(model, [[1, 2, 3]])
"""

from trillion_moe.api import *  # noqa: F403
from trillion_moe.api import __all__ as __all__

__version__ = "0.1.0"
