"""Named shapes for MXFP4: those of `grouped_matmul`, cut to the ones whose K the format's groups of 32 divide."""

from ..grouped_matmul.cases import CASES as GROUPED
from ..grouped_matmul.cases import Case, all_to_one, balanced, zipf
from .codec import GROUP

__all__ = ["CASES", "Case", "all_to_one", "balanced", "zipf"]

CASES: dict[str, Case] = {name: case for name, case in GROUPED.items() if case.k % GROUP == 0} | {
    "kimi_k3_down": Case(experts=896, top_k=16, k=3072, n=3584),
    "tiny_odd": Case(experts=5, top_k=3, k=96, n=17),
}
