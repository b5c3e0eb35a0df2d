"""Eight nodes of eight H100."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h100x64",
    chip="h100",
    axes={"ep": 64},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(64)),
    topology="8x8x1",
    transport="hierarchical",
    chunks=8,
)
