"""How much room a fixed exchange needs: the capacity follows what was lately asked for, so that nothing is dropped.

A capacity is part of a compiled program. So there are few of them, each compiled when it is first used, and one that
has become too large is left only after a while: between two capacities nothing swings.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from trillion_moe.layers.exchange import SHARES
from trillion_moe.sharding import Layout

QUANTILE = 1.0  # of recent exchanges that must have room: all
WINDOW = 64  # updates that are looked back on
SPARE = 0.1  # room beyond what was asked for, as a share of that
PATIENCE = 32  # updates for which less must have been enough before less is taken


class Capacity:
    """capacities: rising. now: the one of them to begin with.

    Up at once, by as much as is needed: too small a capacity drops. Down a step at a time.
    """

    def __init__(
        self,
        capacities: Sequence[float],
        now: float,
        *,
        quantile: float = QUANTILE,
        window: int = WINDOW,
        patience: int | None = None,
    ):
        self.capacities, self.quantile = tuple(capacities), quantile
        self.patience = PATIENCE if patience is None else patience
        self._recent: deque[np.ndarray] = deque(maxlen=window)
        self._place = self.capacities.index(now)
        self._enough = 0

    @classmethod
    def of(cls, layout: Layout | None) -> "Capacity | None":
        """That of a layout, None where its capacity stays as it is."""
        if layout is None or layout.capacity is None or not layout.capacities:
            return None
        return cls(layout.capacities, layout.capacity)

    @property
    def now(self) -> float:
        return self.capacities[self._place]

    def seen(self, asked: np.ndarray) -> float:
        """The capacity after an update in which this was asked for: int [65], as `layers.exchange.demand` counts."""
        self._recent.append(np.asarray(asked, np.int64))
        wanted = self._smallest(min(1.0, self._load() * (1 + SPARE)))
        if wanted > self._place:
            self._place, self._enough = wanted, 0
        elif wanted < self._place:
            self._enough += 1
            if self._enough >= self.patience:
                self._place, self._enough = self._place - 1, 0
        else:
            self._enough = 0
        return self.now

    def _load(self) -> float:
        """The share that holds the quantile of recent exchanges; those of nothing are not counted."""
        counts = np.sum(self._recent, axis=0)[1:]
        if not counts.sum():
            return 0.0
        return (1 + int(np.searchsorted(np.cumsum(counts), self.quantile * counts.sum()))) / SHARES

    def _smallest(self, share: float) -> int:
        """The place of the smallest capacity that is enough, of the last if none is."""
        return next((i for i, capacity in enumerate(self.capacities) if capacity >= share), len(self.capacities) - 1)
