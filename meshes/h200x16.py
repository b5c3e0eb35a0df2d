"""Two nodes of eight H200: NVLink within a node, a port of 400 Gb/s InfiniBand for each GPU between them.

A pipeline stage is a node, so that between nodes only rows of microbatches travel. Pairs of GPUs share heads and the
inside of experts, which halves temporaries.
"""

from trillion_moe.meshes.machine import INFINIBAND, NVLINK_4, Machine

MESH = Machine(
    name="h200x16",
    chip="h200",
    axes={"pp": 2, "ep": 4, "tp": 2},
    tiers=(NVLINK_4.switched(8), INFINIBAND.switched(16)),
    topology="2x8x1",
    rules={"expert_mlp": ("tp",)},
    transport="ragged",
    chunks=8,
    microbatches=4,
)
