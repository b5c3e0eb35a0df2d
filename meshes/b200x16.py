"""Two nodes of eight B200."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_5, Machine

MESH = Machine(
    name="b200x16",
    chip="b200",
    axes={"ep": 16},
    tiers=(NVLINK_5.switched(8), INFINIBAND.switched(16)),
    topology="2x8x1",
    transport="hierarchical",
    chunks=8,
)
