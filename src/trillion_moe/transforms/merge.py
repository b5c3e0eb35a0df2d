"""Adapters folded into the weights they adapt, one matrix at a time, so that a packed bank is never decoded whole."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trillion_moe.blueprint import is_spec
from trillion_moe.kernels import mxfp4
from trillion_moe.transforms.lora import adapted_places
from trillion_moe.transforms.quantize import dense_spec, matrix, placed_like
from trillion_moe.transforms.targets import dims
from trillion_moe.weights import MXFP4, LoRA

Packed = Literal["requantize", "decode"]


def merge_lora(model: Any, *, packed: Packed = "requantize") -> Any:
    """The model with ``base + scaling a b`` in the place of every adapted matrix, summed in float32, in base's dtype.

    packed: what becomes of a 4-bit base. "requantize" encodes the sum again, on the host (not under `jax.jit`);
    matrices without an adapter keep their bytes, and `merge_report` says what the others lose. "decode" leaves an
    array in the model's dtype. A blueprint gives the blueprint of the result. ValueError without an adapter.
    """
    if packed not in get_args(Packed):
        raise ValueError(f"packed = {packed!r}: legal is {', '.join(get_args(Packed))}")
    found, treedef = adapted_places(model)
    return treedef.unflatten(
        [_merged(p.leaf, packed, model) if isinstance(p.leaf, LoRA) else p.leaf for p in found],
    )


def merge_report(model: Any) -> dict[str, float]:
    """What `merge_lora` loses by rounding: for every adapted matrix, by name, RMS(merged - exact) / RMS(exact).

    exact is the sum in float32, merged its MXFP4 encoding or base's dtype; a bank of experts is taken together.
    """
    report = {}
    found, _ = adapted_places(model)
    for place in found:
        if isinstance(place.leaf, LoRA):
            sums = np.array([_squares(one, place.leaf.base) for one in _each(place.leaf)])
            rows = [0] if place.rows is None else list(place.rows)
            stack = 1 if place.rows is None else dims(place.leaf)[0][0]
            error, exact = sums.reshape(stack, -1, 2).sum(axis=1)[rows].T
            report |= zip(place.names, np.sqrt(error / np.where(exact > 0, exact, 1)).tolist(), strict=True)
    return report


def _squares(one: "_One", base: Any) -> tuple[float, float]:
    """Sum of squares of the rounding error and of the exact values of one merged matrix."""
    exact = one.exact_nk.astype(np.float64)
    if isinstance(base, MXFP4):
        rounded = mxfp4.decode(*map(jnp.asarray, one.stored())) if one.adapted else exact
    else:
        rounded = one.exact_nk.astype(base.dtype)
    return float(np.square(np.asarray(rounded, np.float64) - exact).sum()), float(np.square(exact).sum())


# --- one matrix ------------------------------------------------------------------------------------------------------


class _One(NamedTuple):
    exact_nk: np.ndarray
    adapted: bool

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        return mxfp4.encode(self.exact_nk)


def _each(w: LoRA) -> Iterator[_One]:
    """The matrices of a leaf in order, merged exactly, on the host."""
    batch, _, _ = dims(w)
    live = np.ones(batch, bool) if w.slots is None else np.asarray(w.slots) >= 0
    for i, adapted in enumerate(live.reshape(-1).tolist()):
        yield _One(np.asarray(_exact_jit(w, i)).T, adapted)


def _exact(w: LoRA, i: jax.Array | int) -> jax.Array:
    """Matrix i, counted over all leading dims: ``base + scaling a b`` [K, N] in float32 (float64 for float64)."""
    batch, _, _ = dims(w)
    at = jnp.unravel_index(i, batch) if batch else ()
    base = matrix(jax.tree.map(lambda leaf: leaf[at], w.base))
    slot = None if w.slots is None else w.slots[at]

    def pick(m: jax.Array) -> jax.Array:
        if m.ndim < len(batch) + 2:
            return m[at[:-1]]  # shared by the experts
        return m[at] if slot is None else m[(*at[:-1], jnp.maximum(slot, 0))]

    delta = jnp.matmul(pick(w.a).astype(base.dtype), pick(w.b).astype(base.dtype), precision=lax.Precision.HIGHEST)
    merged = base + w.scaling * delta
    return merged if slot is None else jnp.where(slot >= 0, merged, base)


_exact_jit = jax.jit(_exact)


# --- one leaf --------------------------------------------------------------------------------------------------------


def _merged(w: LoRA, packed: Packed, model: Any) -> Any:
    base: Any = w.base
    if not isinstance(base, MXFP4):
        return base if is_spec(base) else placed_like(_merged_array(w, base.dtype), base)
    if packed == "requantize":
        return base if is_spec(base.packed) else _requantized(w)
    return dense_spec(base, model) if is_spec(base.packed) else _merged_array(w, jnp.dtype(model.dtype))


@partial(jax.jit, static_argnums=1)
def _merged_array(w: LoRA, dtype: jnp.dtype) -> jax.Array:
    batch, k, n = dims(w)
    if not batch:
        return _exact(w, 0).astype(dtype)
    return lax.map(lambda i: _exact(w, i).astype(dtype), jnp.arange(math.prod(batch))).reshape(*batch, k, n)


def _requantized(w: LoRA) -> MXFP4:
    base: Any = w.base
    stored = mxfp4.to_layout(np.asarray(base.packed), np.asarray(base.scale), base.layout, "nk")
    stored = [np.array(a) for a in stored]
    flat = [a.reshape(-1, *a.shape[-2:]) for a in stored]
    for i, one in enumerate(_each(w)):
        if one.adapted:
            flat[0][i], flat[1][i] = one.stored()
    packed, scale = mxfp4.to_layout(stored[0], stored[1], "nk", base.layout)
    return dataclasses.replace(base, packed=placed_like(packed, base.packed), scale=placed_like(scale, base.scale))
