"""LoRA on conversations, with the defaults: ``trillion-moe train --config lora --model FOLDER --data FILE.jsonl``."""

from trillion_moe.run_config import RunConfig


def config() -> RunConfig:
    return RunConfig(model="", data="")
