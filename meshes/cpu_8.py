"""Eight devices cut from one host's CPU, for tests and notebooks: every axis that most models need is 2."""

from trillion_moe.meshes.machine import MEMORY, Machine

MESH = Machine(
    name="cpu_8",
    chip="cpu",
    axes={"fsdp": 2, "ep": 2, "tp": 2},
    tiers=(MEMORY.switched(8),),
    transport="replicated",
)
