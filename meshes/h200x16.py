"""Two nodes of eight H200: NVLink within a node, a port of 400 Gb/s InfiniBand for each GPU between them.

Pairs of GPUs share heads and the inside of experts: a step over 16 x 1 needs twice the temporaries.
"""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h200x16",
    chip="h200",
    axes={"ep": 8, "tp": 2},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(16)),
    topology="2x8x1",
    rules={"expert_mlp": ("tp",)},
    transport="ragged",
    chunks=8,
)
