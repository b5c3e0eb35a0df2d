"""A node of eight H200.

Kimi K3's packed experts (1.45 TB) do not fit: for smaller models, or experts kept on the host.
"""

from trillion_moe.meshes.machine import NVLINK_4, Machine

MESH = Machine(
    name="h200x8",
    chip="h200",
    axes={"ep": 8},
    tiers=(NVLINK_4.switched(8),),
    topology="1x8x1",
    transport="ragged",
    chunks=8,
)
