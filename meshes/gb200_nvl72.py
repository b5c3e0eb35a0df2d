"""A GB200 NVL72: a rack whose 72 GPUs are all joined by NVLink.

64 of them work and 8 stand by: 896 experts go over 64, but of the divisors of 72 only over 8, which cannot hold them.
"""

from trillion_moe.meshes.machine import NVLINK_5, Machine

MESH = Machine(
    name="gb200_nvl72",
    chip="gb200",
    axes={"ep": 64},
    tiers=(NVLINK_5.switched(64),),
    topology="1x64x1",  # one host to the compiler, so that it counts on NVLink everywhere
    transport="ragged",
    chunks=8,
)
