"""Running the layers: an ordinary residual stream, or block attention residuals over a bank of block sums.

The layers are a tuple of segments; a segment is a tuple of Blocks whose leaves carry a leading "repeats" axis when it
repeats, and then runs under `lax.scan`. Both runners return the last state, the caches and per layer what it reports.

With attention residuals nothing but the bank ``[1 + blocks, B, T, D]`` of the embedding and the block sums crosses a
block edge: row 0 is the embedding, row b + 1 the sum of block b, which reads rows 0..b. So every block can be run again
on the *final* bank with its later rows masked, and `bank_remat` saves that bank and nothing else of token size.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from trillion_moe.config import ModelConfig
from trillion_moe.layers.balance import LOSS
from trillion_moe.layers.block import Block, Context
from trillion_moe.ops import accumulator

Segments = tuple[tuple[Block, ...], ...]
LayerCaches = tuple[tuple[Any, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class Run:
    """What is fixed for one pass over the depth."""

    cfg: ModelConfig
    repeats: tuple[int, ...]  # of every segment
    tracing: bool = False
    remat: bool = False


def residual_stream(segments: Segments, x_BTD, ctx: Context, caches: LayerCaches, run: Run):
    """``x += attend(x); x += feed(x)`` through every layer -> x, caches, aux per segment and layer."""

    def layer(x_BTD, block: Block, cache):
        tap, block = {} if run.tracing else None, block.collected(run.cfg, ctx.layout)
        attn_BTD, cache = block.attend(x_BTD, ctx, cache, run.cfg, tap)
        x_BTD = x_BTD + attn_BTD
        ffn_BTD, aux = block.feed(x_BTD, ctx, run.cfg, tap)
        x_BTD = x_BTD + ffn_BTD
        return x_BTD, cache, aux | ({} if tap is None else tap | {"after": x_BTD})

    layer = jax.checkpoint(layer) if run.remat else layer

    def body(x_BTD, repeat):
        blocks, block_caches, _ = repeat
        new_caches, auxes = [], []
        for block, cache in zip(blocks, block_caches, strict=True):
            x_BTD, cache, aux = layer(x_BTD, block, cache)
            new_caches.append(cache)
            auxes.append(aux)
        return x_BTD, (tuple(new_caches), tuple(auxes))

    return _over_segments(body, x_BTD, segments, caches, run)


def attention_residuals(segments: Segments, x_BTD, ctx: Context, caches: LayerCaches, run: Run):
    """Block attention residuals -> bank ``[1 + blocks, B, T, D]``, caches, aux per segment and layer."""
    blocks = sum(run.repeats)
    # Padded, not written into zeros: the derivative of a write keeps a second bank of zeros.
    bank_NBTD = jnp.pad(x_BTD[None], ((0, blocks), (0, 0), (0, 0), (0, 0)))
    if run.remat:
        bank_NBTD, aux = bank_remat(segments, bank_NBTD, ctx, run)
        return bank_NBTD, None, aux
    return _run_bank(segments, bank_NBTD, ctx, caches, run)


def _run_bank(segments: Segments, bank_NBTD, ctx: Context, caches: LayerCaches, run: Run):
    def body(bank_NBTD, repeat):
        blocks, block_caches, b = repeat
        prefix_BTD, new_caches, auxes = None, [], []
        for block, cache in zip(blocks, block_caches, strict=True):
            prefix_BTD, cache, aux = _bank_layer(block, cache, bank_NBTD, b, prefix_BTD, ctx, run)
            new_caches.append(cache)
            auxes.append(aux)
        bank_NBTD = lax.dynamic_update_index_in_dim(bank_NBTD, prefix_BTD, b + 1, 0)
        return bank_NBTD, (tuple(new_caches), tuple(auxes))

    return _over_segments(body, bank_NBTD, segments, caches, run)


def _bank_layer(block: Block, cache, bank_NBTD, b, prefix_BTD, ctx: Context, run: Run):
    """One layer of block b -> the block's running sum, which is no source of the block's first mix."""
    cfg, tap = run.cfg, {} if run.tracing else None
    block = block.collected(cfg, ctx.layout)
    h_BTD = block.attn_res(bank_NBTD, b, prefix_BTD, cfg.rms_norm_eps)
    attn_BTD, cache = block.attend(h_BTD, ctx, cache, cfg, tap)
    prefix_BTD = attn_BTD if prefix_BTD is None else prefix_BTD + attn_BTD
    h_BTD = block.ffn_res(bank_NBTD, b, prefix_BTD, cfg.rms_norm_eps)
    ffn_BTD, aux = block.feed(h_BTD, ctx, cfg, tap)
    prefix_BTD = prefix_BTD + ffn_BTD
    return prefix_BTD, cache, aux | ({} if tap is None else tap | {"after": prefix_BTD})


def _over_segments(body, carry, segments: Segments, caches: LayerCaches, run: Run):
    """`body(carry, (blocks, caches, index)) -> carry, (caches, aux)` for every repeat of every segment, in order.

    index counts repeats over all segments: an int where a segment does not repeat, traced inside a scan.
    """
    new_caches, auxes, start = [], [], 0
    for s, (blocks, repeats) in enumerate(zip(segments, run.repeats, strict=True)):
        block_caches = (None,) * len(blocks) if caches is None else caches[s]
        if repeats == 1:
            carry, (block_caches, aux) = body(carry, (blocks, block_caches, start))
        else:
            carry, (block_caches, aux) = lax.scan(body, carry, (blocks, block_caches, start + jnp.arange(repeats)))
        new_caches.append(block_caches)
        auxes.append(aux)
        start += repeats
    return carry, None if caches is None else tuple(new_caches), tuple(auxes)


def bank_remat(segments: Segments, bank_NBTD, ctx: Context, run: Run):
    """`_run_bank` whose backward saves the final bank only and recomputes one block, then one layer, at a time.

    -> bank, aux, of which only balance losses have a gradient. None flows into leaves that are not differentiated: they
    are told apart by their tangents, so that frozen weights cost neither gradient nor copy. Stacked frozen leaves are
    indexed inside the recomputed layer; sliced outside, each block's weights would be kept. Cotangents of the bank are
    summed over blocks in float32.
    """
    leaves, treedef = jax.tree.flatten(segments)
    forward = jax.custom_vjp(lambda bank, leaves, ctx: _run_bank(treedef.unflatten(leaves), bank, ctx, None, run)[::2])

    def fwd(bank, leaves, ctx):
        perturbed = _Perturbed(tuple(leaf.perturbed for leaf in leaves))
        bank, leaves, ctx = jax.tree.map(
            lambda p: p.value, (bank, leaves, ctx), is_leaf=lambda p: hasattr(p, "perturbed")
        )
        out = _run_bank(treedef.unflatten(leaves), bank, ctx, None, run)[::2]
        return out, (out[0], leaves, ctx, perturbed)

    def bwd(saved, cotangents):
        bank, leaves, ctx, perturbed = saved
        ct_bank, ct_aux = cotangents
        if isinstance(ct_bank, SymbolicZero):
            ct_bank = jnp.zeros_like(bank)
        ct_losses = tuple(tuple(map(_of_loss, layers)) for layers in ct_aux)
        ct_bank, ct_leaves = _backward_bank(bank, leaves, treedef, perturbed.mask, ctx, (ct_bank, ct_losses), run)
        return ct_bank, ct_leaves, None

    forward.defvjp(fwd, bwd, symbolic_zeros=True)
    return forward(bank_NBTD, leaves, ctx)


def _of_loss(ct_aux: dict[str, Any]) -> Any:
    """The cotangent of a layer's balance loss, None where it has none."""
    ct = ct_aux.get(LOSS)
    if not isinstance(ct, SymbolicZero):
        return ct
    zero: Any = ct.aval
    return jnp.zeros(zero.shape, zero.dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    mask: tuple[bool, ...]


def _backward_bank(bank_NBTD, leaves, treedef, trained: tuple[bool, ...], ctx: Context, cotangents, run: Run):
    """Reverse over the blocks -> cotangents of the bank's initial rows and of the leaves (None where frozen)."""
    indices, (ct_bank, ct_losses) = treedef.unflatten(range(len(leaves))), cotangents
    ct_bank, ct_leaves, end = ct_bank.astype(accumulator(bank_NBTD.dtype)), [None] * len(leaves), sum(run.repeats)
    for segment, repeats, ct_losses_s in reversed(list(zip(indices, run.repeats, ct_losses, strict=True))):
        start, ids = end - repeats, jax.tree.leaves(segment)
        train = [leaves[i] for i in ids if trained[i]]
        frozen = [leaves[i] for i in ids if not trained[i]]
        rebuild = partial(_merge, jax.tree.structure(segment), [trained[i] for i in ids], repeats > 1)

        layers = len(segment)

        def step(ct_bank, xs, frozen=frozen, rebuild=rebuild, start=start, layers=layers):
            r, train_r, ct_losses_r = xs
            b = start + r

            def block_sum(bank, train_r):
                return _recomputed_block_sum(lambda *at: rebuild(frozen, *at), layers, train_r, r, bank, b, ctx, run)

            ct_sum = lax.dynamic_index_in_dim(ct_bank, b + 1, 0, keepdims=False).astype(bank_NBTD.dtype)
            ct_bank_b, ct_train = jax.vjp(block_sum, bank_NBTD, train_r)[1]((ct_sum, ct_losses_r))
            return ct_bank + ct_bank_b.astype(ct_bank.dtype), ct_train

        if repeats == 1:
            ct_bank, ct_train = step(ct_bank, (0, train, ct_losses_s))
        else:
            ct_bank, ct_train = lax.scan(step, ct_bank, (jnp.arange(repeats), train, ct_losses_s), reverse=True)
        for i, ct in zip([i for i in ids if trained[i]], ct_train, strict=True):
            ct_leaves[i] = ct
        end = start
    only_input = jnp.arange(ct_bank.shape[0]) == 0  # rows 1.. of the initial bank are overwritten
    ct_bank = jnp.where(only_input[:, None, None, None], ct_bank, 0).astype(bank_NBTD.dtype)
    return ct_bank, ct_leaves


def _merge(treedef, trained: list[bool], stacked: bool, frozen, train_r, r) -> tuple[Block, ...]:
    """The segment's Blocks at repeat r, from stacked frozen leaves and already sliced trained ones."""
    frozen_it, train_it = iter(frozen), iter(train_r)
    pick = (lambda leaf: lax.dynamic_index_in_dim(leaf, r, 0, keepdims=False)) if stacked else (lambda leaf: leaf)
    return treedef.unflatten([next(train_it) if t else pick(next(frozen_it)) for t in trained])


def _recomputed_block_sum(rebuild, layers: int, train_r, r, bank_NBTD, b, ctx: Context, run: Run):
    """The sum of block b and its layers' balance losses; all under `jax.checkpoint`, weights picked inside."""
    silent = dataclasses.replace(run, tracing=False)

    def layer(j: int, train_r, bank_NBTD, prefix_BTD):
        prefix_BTD, _, aux = _bank_layer(rebuild(train_r, r)[j], None, bank_NBTD, b, prefix_BTD, ctx, silent)
        return prefix_BTD, aux.get(LOSS)

    prefix_BTD, losses = None, []
    for j in range(layers):
        prefix_BTD, loss = jax.checkpoint(partial(layer, j))(train_r, bank_NBTD, prefix_BTD)
        losses.append(loss)
    return prefix_BTD, tuple(losses)
