"""Generation: prompts to completions."""

from trillion_moe.generate.generation import generate, stream
from trillion_moe.generate.output import Completion, Piece
from trillion_moe.generate.session import Session

__all__ = ["Completion", "Piece", "Session", "generate", "stream"]
