"""32 chips of TPU v5p, 2 x 4 x 4. Less than a cube of 4 x 4 x 4 has no rings."""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v5p_32",
    chip="v5p",
    axes={"pp": 2, "ep": 16},
    tiers=(ICI.torus(2, 4, 4, rings=False),),
    topology="v5p:2x4x4",
    cloud="v5p-64",  # counts TensorCores, two a chip
    transport="ragged",
    chunks=8,
    microbatches=4,
)
