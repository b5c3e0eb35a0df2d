"""Tree to tree: adapters, precision and what is trained, on a blueprint and on arrays alike.

Nothing here knows a layer: leaves are found by their names (`targets`), and a transformed model computes by the same
code as before.
"""

from trillion_moe.transforms.lora import LoRAConfig, add_lora, count_by_group, describe, experts_from_load, remove_lora
from trillion_moe.transforms.merge import merge_lora, merge_report
from trillion_moe.transforms.partition import combine, partition
from trillion_moe.transforms.placement import arrange_experts, imbalance, plan_experts, restore_experts
from trillion_moe.transforms.quantize import cast, dequantize_experts, quantize_experts
from trillion_moe.transforms.segments import split_segments
from trillion_moe.transforms.targets import GROUPS, moe_layers

__all__ = [
    "GROUPS",
    "LoRAConfig",
    "add_lora",
    "arrange_experts",
    "cast",
    "combine",
    "count_by_group",
    "dequantize_experts",
    "describe",
    "experts_from_load",
    "imbalance",
    "merge_lora",
    "merge_report",
    "moe_layers",
    "partition",
    "plan_experts",
    "quantize_experts",
    "remove_lora",
    "restore_experts",
    "split_segments",
]
