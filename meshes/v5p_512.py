"""512 chips of TPU v5p, a torus of 8 x 8 x 8: experts over its planes."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_512",
    chip="v5p",
    axes={"fsdp": 8, "ep": 64},
    tiers=(ICI.torus(8, 8, 8),),
    topology="v5p:8x8x8",
    cloud="v5p-1024",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
)
