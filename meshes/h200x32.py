"""Four nodes of eight H200."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h200x32",
    chip="h200",
    axes={"ep": 32},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(32)),
    topology="4x8x1",
    transport="hierarchical",
    chunks=8,
)
