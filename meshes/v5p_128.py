"""128 chips of TPU v5p, a torus of 4 x 4 x 8."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_128",
    chip="v5p",
    axes={"ep": 128},
    tiers=(ICI.torus(4, 4, 8),),
    topology="v5p:4x4x8",
    cloud="v5p-256",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
)
