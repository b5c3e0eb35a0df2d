"""64 chips of TPU v5p, a cube of 4 x 4 x 4."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_64",
    chip="v5p",
    axes={"ep": 64},
    tiers=(ICI.torus(4, 4, 4),),
    topology="v5p:4x4x4",
    cloud="v5p-128",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
)
