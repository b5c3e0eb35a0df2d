"""Who works on what in a pipeline, tick by tick: arithmetic only, the same in Python and traced.

In every tick each stage takes one microbatch forwards through one run of its layers, and one back. Microbatches go in
rounds of as many as there are stages; a stage takes a round through its first run of layers, then through the next.
So microbatch i of a round is in run c of stage d at tick ``round * V * P + c * P + i + d`` (P stages, V runs each),
and on its way back, mirrored, `first_backward` ticks later: GPipe's way (arXiv 1811.06965) if that is after the last
forward, 1F1B (PipeDream, arXiv 2006.09503) if it is the tick in which the first microbatch comes out, and with V > 1
its interleaved form (arXiv 2104.04473).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Job:
    """What a stage does in a tick. live: whether anything at all; else the rest is of some job, and of no meaning.

    index: of the job among those of its stage on the way forwards. microbatch; run: of its layers.
    """

    live: Any
    index: Any
    microbatch: Any
    run: Any


@dataclass(frozen=True)
class Schedule:
    stages: int
    virtual: int
    microbatches: int
    late: bool

    @property
    def jobs(self) -> int:
        """Of one stage, one way."""
        return self.microbatches * self.virtual

    @property
    def forward_ticks(self) -> int:
        return self.jobs + self.stages - 1

    @property
    def first_backward(self) -> int:
        return self.forward_ticks if self.late else self.stages * self.virtual - 1

    @property
    def ticks(self) -> int:
        return self.first_backward + self.forward_ticks

    @property
    def kept(self) -> int:
        """Inputs of a stage that wait to be gone through again, at most."""
        return min(self.jobs, self.first_backward + self.stages * self.virtual)

    @property
    def bubble(self) -> float:
        """Share of its time that a stage has nothing to do."""
        return (self.stages - 1) / self.forward_ticks

    def forward(self, tick: Any, stage: Any) -> Job:
        index = tick - stage
        live = (index >= 0) & (index < self.jobs)
        index = jnp.clip(index, 0, self.jobs - 1)
        turn, rest = index // (self.virtual * self.stages), index % (self.virtual * self.stages)
        return Job(live, index, turn * self.stages + rest % self.stages, rest // self.stages)

    def backward(self, tick: Any, stage: Any) -> Job:
        mirrored = self.forward(tick - self.first_backward, self.stages - 1 - stage)
        run = self.virtual - 1 - mirrored.run
        index = mirrored.index + (run - mirrored.run) * self.stages
        return Job(mirrored.live, index, mirrored.microbatch, run)
