"""Layers: Flax nnx modules used as immutable pytrees. Construct one from the config, fill its Specs, then call it.

Shape suffixes on local arrays: B batch, T time, S cached time, D model width, L latent width, E experts, K top-k (or a
contraction), F expert hidden, N out, H heads, R routed rows, V vocabulary, C conv channels, P patches.

Segments are int32 ``[B, T]``: 0 = padding, which inside the model stands only at the end of a row (`model` compacts
rows first), 1, 2, ... = documents. Statistics, routing scores, gates, states and softmax are float32 whatever the
activations are.

A layer that is given `tap` (a dict) writes its named intermediate arrays there; None costs nothing.
"""

import jax
import jax.numpy as jnp

Tap = dict[str, jax.Array] | None


def tap_into(tap: Tap, **arrays: jax.Array) -> None:
    """Record arrays under their names when tracing."""
    if tap is not None:
        tap.update(arrays)


def real_tokens(segments_BT: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """bool ``[B, T]``: which positions hold a token; all of them without segments."""
    return jnp.ones(shape, bool) if segments_BT is None else segments_BT > 0
