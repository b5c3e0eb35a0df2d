"""LoRA of rank 8 on Kimi K3's attention, shared experts and latent projections; routed experts stay packed in 4 bits.

``kimi_k3/config.json`` is the release's: enough to plan with. To train, name a checkpoint: ``--model FOLDER``.
"""

from pathlib import Path

from trillion_moe.data.examples import DataConfig
from trillion_moe.run_config import RunConfig, TrainConfig
from trillion_moe.transforms import LoRAConfig


def config() -> RunConfig:
    return RunConfig(
        model=str(Path(__file__).parent / "kimi_k3"),
        data="",
        lora=LoRAConfig(rank=8, targets=("attention", "shared_experts", "latent")),
        examples=DataConfig(max_length=4096),
        train=TrainConfig(batch_size=None),
    )
