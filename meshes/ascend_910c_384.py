"""A CloudMatrix384: 384 packages of Ascend 910C with two dies each, and a die is a device. For planning only."""

from trillion_moe.meshes.machine import PACKAGE, UNIFIED_BUS, Machine

MESH = Machine(
    name="ascend_910c_384",
    chip="ascend_910c",
    axes={"dp": 3, "ep": 128, "tp": 2},
    tiers=(PACKAGE.switched(2), UNIFIED_BUS.switched(768)),
    transport="ragged",
    chunks=8,
)
