"""What a device computes while a collective is underway: read from the order in which XLA has scheduled a program.

A collective is asynchronous if it is begun in one place and awaited in another, and the compiler has not marked it as
one that is waited for (a GPU's compiler marks what stands side by side). What is scheduled between the two is work that
hides it. Work is products of matrices and kernels; passes over memory alone are not counted, nor products that are too
small to hide anything (a TPU's compiler makes products of cumulative sums).
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from trillion_moe.hlo import Instruction, arrays, callees, instructions

_KERNELS = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton|__cublas|__cudnn)')
_BATCH = re.compile(r"lhs_batch_dims=\{([\d,]+)\}")


LEAST = 100  # FLOPs for each byte a collective gives. A v5p does 850 in the time that all its links take for a byte.


class Work(NamedTuple):
    """flops: of products of matrices. kernels: runs of custom kernels and libraries, whose FLOPs the text has not."""

    flops: int = 0
    kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.kernels + other.kernels)

    def times(self, count: int) -> "Work":
        return Work(self.flops * count, self.kernels * count)

    def hides(self, size: int) -> bool:
        """Whether it is something, next to a collective of so many bytes."""
        return bool(self.kernels) or self.flops >= LEAST * max(size, 1)


class Program:
    """A scheduled program; the work of each of its computations is counted once."""

    def __init__(self, computations: dict[str, list[str]]):
        self._lines = computations
        self._parsed: dict[str, list[Instruction]] = {}
        self._work: dict[str, Work] = {}

    def instructions(self, computation: str) -> list[Instruction]:
        if computation not in self._parsed:
            self._parsed[computation] = instructions(self._lines[computation])
        return self._parsed[computation]

    def work(self, computation: str) -> Work:
        """Of one run of it, with what it calls."""
        if computation not in self._work:
            self._work[computation] = self._sum(computation, self.instructions(computation))
        return self._work[computation]

    def hidden(self, computation: str, begun: Instruction) -> Work | None:
        """The work between the beginning of a collective and its end; None if it is not asynchronous."""
        if not begun.opcode.endswith("-start") or '"is_sync":true' in begun.line:
            return None
        return self._sum(computation, list(self._until_done(computation, begun)))

    def _until_done(self, computation: str, begun: Instruction) -> Iterator[Instruction]:
        found = self.instructions(computation)
        for one in found[found.index(begun) + 1 :]:
            if one.opcode.endswith("-done") and begun.name in one.operands:
                return
            yield one
        raise ValueError(f"nothing awaits {begun.line.strip()[:200]}")

    def _sum(self, computation: str, found: list[Instruction]) -> Work:
        total = Work()
        for one in found:
            total += self._own(computation, one)
            for callee, times in callees(one.line, self._lines).items():
                total += self.work(callee).times(times)
        return total

    def _own(self, computation: str, one: Instruction) -> Work:
        match one.opcode:
            case "dot" | "convolution":
                return Work(flops=self._product(computation, one))
            case "custom-call" if _KERNELS.search(one.line):
                return Work(kernels=1)
        return Work()

    def _product(self, computation: str, one: Instruction) -> int:
        """FLOPs: 2 b m k n = 2 sqrt(bmk bkn bmn / b). Of a convolution the batch is not known: b counts as 1."""
        shapes = {other.name: other.shape for other in self.instructions(computation)}
        sizes = [math.prod(arrays(shape)[0][1]) for shape in (one.shape, *(shapes[name] for name in one.operands[:2]))]
        batch = 1
        if found := _BATCH.search(one.line):
            lhs = arrays(shapes[one.operands[0]])[0][1]
            batch = math.prod(lhs[int(dim)] for dim in found[1].split(","))
        return 2 * math.isqrt(math.prod(sizes) // batch)
