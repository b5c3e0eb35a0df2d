"""1,024 chips of TPU v5p, a torus of 8 x 8 x 16: experts over its planes of 8 x 8, where exchange is fastest."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_1024",
    chip="v5p",
    axes={"fsdp": 16, "ep": 64},
    tiers=(ICI.torus(8, 8), ICI.torus(8, 8, 16)),
    topology="v5p:8x8x16",
    cloud="v5p-2048",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
)
