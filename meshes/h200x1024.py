"""128 nodes of eight H200: heads within a node, experts over 32 nodes."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h200x1024",
    chip="h200",
    axes={"fsdp": 4, "ep": 32, "tp": 8},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(1024)),
    topology="128x8x1",
    transport="ragged",
    chunks=8,
)
