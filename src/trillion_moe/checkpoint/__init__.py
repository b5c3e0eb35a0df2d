"""Checkpoints: folders of safetensors with Hugging Face names, and Orbax.

    read_config, load_into            a folder's config, and its tensors into a blueprint
    files_beside                      what a folder holds besides config and weights
    save                              a model back into such a folder, bit for bit
    save_orbax, load_orbax, is_orbax  a model with whatever weights it has, adapters included
    compare_experts                   a packed checkpoint against the one it was made from
    export_adapter, read_adapter      adapters as PEFT writes them, or under the released names of experts

What is wrong with a checkpoint comes in one `CheckpointError`.
"""

from trillion_moe.checkpoint.adapter_export import export_adapter
from trillion_moe.checkpoint.adapters import read_adapter
from trillion_moe.checkpoint.compare import compare_experts
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.load import load_into, read_config
from trillion_moe.checkpoint.orbax_io import is_orbax, load_orbax, save_orbax
from trillion_moe.checkpoint.save import files_beside, save

__all__ = [
    "CheckpointError",
    "compare_experts",
    "export_adapter",
    "files_beside",
    "is_orbax",
    "load_into",
    "load_orbax",
    "read_adapter",
    "read_config",
    "save",
    "save_orbax",
]
