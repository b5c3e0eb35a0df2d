"""Prompts in any form -> token ids, pictures as patches, and how to read the answer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trillion_moe.data.chat import ChatError, ChatOptions
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.processor import Processor
from trillion_moe.data.tokenizer import TokenizerError
from trillion_moe.generate.output import ChatText, IdsOnly, PlainText, Reader
from trillion_moe.inputs import Images, InputError
from trillion_moe.layers.vision import ImageBatch


@dataclasses.dataclass(frozen=True)
class ReadPrompts:
    """ids: a list for each prompt, one placeholder a picture. readers: makes what turns a prompt's new tokens into
    text."""

    ids: list[Sequence[Any]]
    images: Images
    readers: list[Callable[[Iterable[int]], Reader]]


def read_prompts(
    prompts: Any, processor: Processor | None, images: Images, options: ChatOptions, *, specials: bool
) -> ReadPrompts:
    """prompts: a list of token-id lists, strings, or message lists (OpenAI's form, pictures included).

    Raises: InputError, ChatError, ImageError, TokenizerError; each names the prompt.
    """
    legal = "a non-empty list whose items are token-id lists, strings or message lists"
    if isinstance(prompts, str | Mapping) or not len(prompts) or any(isinstance(p, int | Mapping) for p in prompts):
        raise InputError(f"prompts must be {legal}")
    forms = [_form(prompt, i) for i, prompt in enumerate(prompts)]
    if images is not None and {*forms} != {"ids"}:
        raise InputError("images are given beside prompts that are not token ids; put pictures into messages")
    if processor is None and {*forms} != {"ids"}:
        raise InputError(f"prompt {next(i for i, f in enumerate(forms) if f != 'ids')} is no list of token ids: "
                         "give tokenizer=trillion_moe.load_processor(folder, model.config)")  # fmt: skip
    found = [_read(prompts[i], form, i, processor, options, specials) for i, form in enumerate(forms)]
    ids, patches, readers = zip(*found, strict=True)
    if any(one is not None for one in patches):
        images = [None if one is None else ImageBatch(one.patches, one.grid_thw) for one in patches]
    return ReadPrompts(list(ids), images, list(readers))


def _form(prompt: Any, index: int) -> str:
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__len__"):
        raise InputError(
            f"prompt {index} is {type(prompt).__name__}; legal is a token-id list, a string, a message list"
        )
    return "messages" if len(prompt) and isinstance(prompt[0], Mapping) else "ids"


def _read(prompt: Any, form: str, index: int, processor: Processor | None, options: ChatOptions, specials: bool):
    """-> ids, patches or None, and what makes a Reader of the new tokens, given the end tokens."""
    if processor is None:
        return prompt, None, lambda eos_ids: IdsOnly()

    def plain(eos_ids: Iterable[int]) -> Reader:
        return PlainText(processor.tokenizer, eos_ids)

    if form == "ids":
        return prompt, None, plain
    try:
        if form == "text":
            return processor.text(prompt, specials=specials).ids, None, plain
        parser, encoded = processor.format.parser(options), processor.messages(prompt, options)
        return encoded.ids, encoded.patches, lambda eos_ids: ChatText(processor.tokenizer, parser, eos_ids)
    except ChatError as error:
        raise ChatError(f"prompt {index}: {error.where}", error.what) from error
    except (ImageError, TokenizerError) as error:
        raise type(error)(f"prompt {index}: {error}") from error
