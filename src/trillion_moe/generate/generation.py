"""From prompts in any form to completions, streamed or whole."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillion_moe.data.chat import DEFAULT_OPTIONS, ChatOptions
from trillion_moe.data.processor import Processor
from trillion_moe.generate import engine
from trillion_moe.generate.output import Completion, Piece, Row, Shown
from trillion_moe.generate.prompts import read_prompts
from trillion_moe.generate.session import Session
from trillion_moe.inputs import Images, InputError
from trillion_moe.model import Model
from trillion_moe.sampling import SamplingConfig
from trillion_moe.sharding import check_caches


def generate(
    model: Model,
    prompts: Any,
    *,
    tokenizer: Processor | None = None,
    images: Images = None,
    max_new_tokens: int = 128,
    eos_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    chat: ChatOptions = DEFAULT_OPTIONS,
    specials: bool = False,
) -> list[Completion]:
    """Continue every prompt until an end token, a stop string or `max_new_tokens`.

    prompts: a list; each item is token ids, a string, or a list of messages in OpenAI's form with pictures as paths,
        data URIs or PIL images. They may differ in length and in form.
    tokenizer: of `load_processor`; not needed for token ids, whose completions then have no text.
    images: of token-id prompts: pictures as patches, in the order of the prompts, one placeholder each.
    eos_ids: the tokens that end a row; None = the config's and the tokenizer's, () = none.
    stop: strings that end a row; they are not part of its text.
    temperature, top_k, top_p, min_p, repetition_penalty, seed: see `SamplingConfig`; 0 = greedy. One seed for all
        prompts or one each.
    chat: tools, thinking, effort and response format for message lists. specials: whether names of special tokens in
        strings become control ids.

    A prompt whose logits are not finite ends with finish "error"; the others do not notice. Programs are compiled for
    shapes rounded up to powers of two (see `engine`), and the vision tower for each set of picture sizes.

    Raises:
        InputError, ChatError, ImageError, TokenizerError: a prompt or setting that does not fit; names it.
        LayoutError: a model over a mesh with pp or cp.
        FloatingPointError: the logits of every prompt were not finite.
    """
    pieces = stream(
        model, prompts, tokenizer=tokenizer, images=images, max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop=stop,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed, chat=chat, specials=specials,
    )  # fmt: skip
    done = {piece.prompt: piece.completion for piece in pieces if piece.completion}
    completions = [done[i] for i in range(len(done))]
    if all(completion.finish == "error" for completion in completions):
        raise FloatingPointError("; ".join(str(completion.error) for completion in completions))
    return completions


def stream(
    model: Model,
    prompts: Any,
    *,
    tokenizer: Processor | None = None,
    images: Images = None,
    max_new_tokens: int = 128,
    eos_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    chat: ChatOptions = DEFAULT_OPTIONS,
    specials: bool = False,
    session: Session | None = None,
) -> Iterator[Piece]:
    """`generate`, text as it comes: pieces of all prompts, interleaved; the last one of a prompt has its completion.

    session: of one prompt: what it leaves in the caches serves the next call with the same session, if that prompt
        begins with it. Prompts and settings are checked before the first piece is asked for.
    """
    if session is not None and len(prompts) != 1:
        raise InputError(f"a session holds one conversation, and there are {len(prompts)} prompts")
    check_caches(model.layout)
    stops = check_limits(max_new_tokens, stop)
    eos = _end_tokens(model, tokenizer) if eos_ids is None else tuple(eos_ids)
    if wrong := [i for i in eos if not 0 <= i < model.config.vocab_size]:
        raise InputError(f"eos_ids holds {wrong[0]}; token ids are 0..{model.config.vocab_size - 1}")
    read = read_prompts(prompts, tokenizer, images, chat, specials=specials)
    if stops and tokenizer is None:
        raise InputError("stop strings need text: give tokenizer=trillion_moe.load_processor(folder, model.config)")
    seeds: Any = np.asarray(seed).tolist() if np.ndim(seed) else [np.asarray(seed).item()] * len(read.ids)
    if len(seeds) != len(read.ids):
        raise InputError(
            f"seed holds {len(seeds)} numbers for {len(read.ids)} prompts; legal is one number, or one each"
        )
    sampling = [SamplingConfig(temperature, top_k, top_p, min_p, repetition_penalty, one) for one in seeds]
    checked = engine.Prompts.of(model, read.ids, read.images)
    engine.check_room(checked, max_new_tokens)
    rows = [Row(reader(eos), eos, stops) for reader in read.readers]
    barred = _without_token(model, tokenizer)
    return _run(model, checked, sampling, rows, eos, max_new_tokens, session, barred)


def check_limits(max_new_tokens: int, stop: str | Sequence[str]) -> tuple[str, ...]:
    """-> the stop strings. InputError for what would end every answer before it begins."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise InputError("stop holds an empty string, which would end every answer at once")
    return stops


def _end_tokens(model: Model, processor: Processor | None) -> tuple[int, ...]:
    """The config's, which ends a turn, and the tokenizer's, which ends a text: Kimi K3 has two different ones."""
    ends = model.config.eos_ids
    extra = None if processor is None else processor.tokenizer.eos_id
    return ends if extra is None or extra in ends else (*ends, extra)


def _without_token(model: Model, processor: Processor | None) -> tuple[int, ...]:
    """Ids of the model's vocabulary that the tokenizer has no token for: they could not be read."""
    if processor is None:
        return ()
    tokenizer = processor.tokenizer
    return (*sorted(tokenizer.holes), *range(tokenizer.vocab_size, model.config.vocab_size))


def _run(
    model: Model,
    prompts: engine.Prompts,
    sampling: list[SamplingConfig],
    rows: list[Row],
    eos: Sequence[int],
    max_new_tokens: int,
    session: Session | None,
    barred: Sequence[int],
) -> Iterator[Piece]:
    rest, caches, before = (prompts, None, []) if session is None else session.take(model, prompts)
    now = engine.start(
        model, rest, sampling, [max_new_tokens] * len(rows), caches=caches, before=[before] * len(rows), barred=barred
    )
    open_rows, steps = set(range(len(rows))), 1  # the first token is shown as soon as it is there
    made: list[int] = []  # of row 0, and whether the last one is in the caches
    fed = failed = False
    while open_rows:
        tokens, now = engine.decode(model, now, eos, steps)
        left, bad, steps = np.array(now.left), np.asarray(now.failed), engine.STEPS
        made += tokens[0][tokens[0] >= 0].tolist()
        fed, failed = bool(left[0]), bool(bad[0])
        for i in sorted(open_rows):
            for token in tokens[i][tokens[i] >= 0].tolist():
                if rows[i].finish is None:
                    yield from _pieces(i, rows[i], rows[i].push(token), token)
            if rows[i].finish or not left[i]:
                open_rows.discard(i)
                left[i] = 0  # behind a stop string it would go on
                yield from _end(i, rows[i], failed=bool(bad[i]), limit=max_new_tokens)
        now = dataclasses.replace(now, left=jnp.asarray(left))
    if session is not None and not failed:
        session.keep(model, now.caches, [*prompts.row(0), *(made if fed else made[:-1])], prompts.images)


def _pieces(i: int, row: Row, shown: Shown, token: int) -> Iterator[Piece]:
    """At least one, which brings the token."""
    (channel, text), *more = shown or [(row.channel, "")]
    yield Piece(i, text, channel, (token,))
    yield from (Piece(i, text, channel) for channel, text in more)


def _end(i: int, row: Row, *, failed: bool, limit: int) -> Iterator[Piece]:
    where = f"prompt {i}: logits are not finite at new token {len(row.ids)} (of {limit})"
    shown, completion = row.end("error", where) if failed and row.finish is None else row.end("length")
    yield from (Piece(i, text, channel) for channel, text in shown)
    yield Piece(i, "", row.channel, completion=completion)
