"""256 chips of TPU v6e, a whole pod: a torus of 16 x 16.

Experts over 16 chips are too much for 32 GB, and 256 does not divide them: so each is also cut along the other side.
"""

from trillion_moe.meshes.machine import ICI, Machine

MESH = Machine(
    name="v6e_256",
    chip="v6e",
    axes={"ep": 16, "tp": 16},
    tiers=(ICI.torus(16, 16),),
    topology="v6e:16x16",
    cloud="v6e-256",
    rules={"expert_mlp": ("tp",)},
    transport="ragged",
    chunks=8,
)
