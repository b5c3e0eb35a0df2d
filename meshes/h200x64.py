"""Eight nodes of eight H200."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h200x64",
    chip="h200",
    axes={"ep": 64},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(64)),
    topology="8x8x1",
    transport="hierarchical",
    chunks=8,
)
