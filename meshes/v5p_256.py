"""256 chips of TPU v5p, a torus of 4 x 8 x 8: experts over its planes of 8 x 8."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_256",
    chip="v5p",
    axes={"fsdp": 4, "ep": 64},
    tiers=(ICI.torus(4, 8, 8),),
    topology="v5p:4x8x8",
    cloud="v5p-512",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
)
