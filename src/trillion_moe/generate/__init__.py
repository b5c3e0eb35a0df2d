"""Generation: prompts to completions."""

from trillion_moe.generate.greedy import Completion, generate

__all__ = ["Completion", "generate"]
