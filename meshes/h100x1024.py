"""128 nodes of eight H100: heads within a node, experts over 64 nodes."""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h100x1024",
    chip="h100",
    axes={"fsdp": 2, "ep": 64, "tp": 8},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(1024)),
    topology="128x8x1",
    transport="ragged",
    chunks=8,
)
