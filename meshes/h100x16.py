"""Two nodes of eight H100.

Kimi K3's packed experts (1.45 TB) do not fit: for smaller models, or experts kept on the host.
"""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h100x16",
    chip="h100",
    axes={"ep": 16},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(16)),
    topology="2x8x1",
    transport="hierarchical",
    chunks=8,
)
