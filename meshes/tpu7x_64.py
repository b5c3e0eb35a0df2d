"""64 chips of TPU7x, a cube of 4 x 4 x 4. A chip is two devices, which share its links.

The two reach each other faster than ICI; by how much is left out of account.
"""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="tpu7x_64",
    chip="tpu7x",
    axes={"ep": 64, "tp": 2},
    tiers=(ICI.torus(4, 4, 4, per_chip=2),),
    topology="tpu7x:4x4x4",
    cloud="tpu7x-128",  # counts TensorCores, two a chip
    transport="all_to_all",  # ragged does not compile with jaxlib 0.10.2; without a capacity nothing is dropped
    chunks=8,
)
