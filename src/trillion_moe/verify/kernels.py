"""What the Pallas kernels are for chips that are not here: the tables of docs/kernels.md.

python -m trillion_moe.verify.kernels [--chip NAME ...] [--output docs/kernels.md]
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from trillion_moe.meshes.chips import CHIPS
from trillion_moe.verify import grouped_kernels, kda_kernels
from trillion_moe.verify.grouped_kernels import EXPERTS, HIDDEN, LATENT, RANK, ROWS

HEAD = """# Kernels, compiled for chips that were not there

Written by `python -m trillion_moe.verify.kernels --output docs/kernels.md` (`make aot` makes its environment); the
tests marked `aot` hold every row to its bars. Kimi K3's shapes on one device of 16 that share its experts: {experts}
experts, {rows:,} rows, {latent} x {hidden}, bfloat16. Nothing here ran on an accelerator.

- *calls*: Mosaic (TPU) or Triton (GPU) kernels in the program; none of it falls back to XLA's own products.
- *left to the next*: arrays that one kernel of the program writes and the next reads, the gradients to gate and up.
- *temporaries*: what the compiler reports beyond arguments, results and those; and as a share of the bank's bytes. Bar:
  below 1 %, so that no expert is decoded outside a kernel.
- *registers*, *spilled*: the most of a thread, and bytes a thread, as ptxas reports. Bar: no spills.
- *work*: floating-point operations that the kernels execute, counted from their own products along their own control
  flow, over the ideal number; for equal groups, groups drawn with popularity 1/rank, and all rows in one group. What
  kernels declare to XLA (`CostEstimate`) is the ideal number. Bar: 1.1.
- Factors of rank {rank} have no bars: a GPU's tile is 16 wide, twice the work. A TPU's lanes are padded to 128, and for
  v5p and tpu7x XLA copies a factor into that form first, which shows in the temporaries. Both are bound by memory.

{versions}

"""
KDA = """
Kimi Delta Attention: {heads} heads of {dim} x {dim}, one sequence, bfloat16 with log decays in float32. *gradients*:
the forward pass and those to every input. *temporaries* grow with the tokens and with nothing else: nothing is
quadratic in them. On an H200 gradients spill: for a thread of the kernel of q, k and g about 1 KB stored and 1 KB
loaded, of which *spilled* is the sum, over all kernels; which costs time that is not measured. Forward it is 8 bytes
at most, on a B200 nothing.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=sorted(CHIPS), action="append", help="may be repeated; all by default")
    parser.add_argument("--output", type=Path, help="a Markdown file; printed without")
    args = parser.parse_args()
    if args.chip and args.output:
        parser.error("--output is of all chips: without --chip")
    chips = [CHIPS[chip] for chip in args.chip or CHIPS]
    products = grouped_kernels.KERNELS.values()
    grouped = grouped_kernels.table(grouped_kernels.prove(c, k) for c in chips for k in products)
    kda = kda_kernels.table(kda_kernels.prove(c, *each) for c in chips for each in kda_kernels.PASSES)
    if args.output is None:
        print(f"{grouped}\n{kda}")
        return 0
    names = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    head = HEAD.format(
        experts=EXPERTS, rows=ROWS, latent=LATENT, hidden=HIDDEN, rank=RANK,
        versions="Versions: " + ", ".join(f"{name} {version(name)}" for name in names) + ".",
    )  # fmt: skip
    between = KDA.format(heads=kda_kernels.HEADS, dim=kda_kernels.DIM)
    args.output.write_text(head + grouped + between + kda, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
