"""The pure steps that are compiled: what is run is what is planned and verified.

Each takes and returns values only. Jit them where they are used, donating what is replaced.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import Caches, Model, embed, loss, trunk, unembed
from trillion_moe.transforms import combine


def prefill_step(model: Model, tokens_BT, segments_BT, caches: Caches, images: ImageBatch | None = None):
    """Enter prompts, or a piece of them, into the caches -> logits float32 [B, V] after each row's last token, caches.

    segments_BT: int32, 0 = padding, which stands at the end of a row; None without padding.
    """
    hidden_BTD, caches, *_ = trunk(model, embed(model, tokens_BT, images, segments_BT), segments_BT, caches)
    if segments_BT is None:
        return unembed(model, hidden_BTD[:, -1]), caches
    last_B = jnp.maximum(jnp.sum(segments_BT > 0, axis=1) - 1, 0)
    hidden_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
    return unembed(model, hidden_BD), caches


def decode_step(model: Model, token_B, active_B, caches: Caches):
    """One more token per active row -> logits float32 [B, V], caches. Rows that are not active change nothing."""
    segments_B1 = jnp.where(active_B, jnp.maximum(caches.segment, 1), 0)[:, None]
    hidden_B1D, caches, *_ = trunk(model, embed(model, token_B[:, None]), segments_B1, caches)
    return unembed(model, hidden_B1D[:, 0]), caches


def greedy_steps(model: Model, logits_BV, caches: Caches, eos_ids: jax.Array, steps: int):
    """Up to `steps` greedy tokens per row, stopping early once every row has ended.

    A row ends with the first of `eos_ids` (int32 [n], may be empty), which is kept. -> tokens int32 [B, steps]
    (-1 after the end), and per row the step at which its logits were not finite (-1: never), caches.
    """
    batch = logits_BV.shape[0]

    def body(carry):
        i, logits_BV, active_B, tokens_BN, bad_B, caches = carry
        finite_B = jnp.all(jnp.isfinite(logits_BV), axis=-1)
        bad_B = jnp.where(active_B & ~finite_B & (bad_B < 0), i, bad_B)
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        tokens_BN = tokens_BN.at[:, i].set(jnp.where(active_B, token_B, -1))
        active_B &= finite_B & ~jnp.any(token_B[:, None] == eos_ids[None, :], axis=-1)
        more = (i + 1 < steps) & jnp.any(active_B)
        logits_BV, caches = lax.cond(
            more, lambda: decode_step(model, token_B, active_B, caches), lambda: (logits_BV, caches)
        )
        return i + 1, logits_BV, active_B, tokens_BN, bad_B, caches

    def going(carry):
        i, _, active_B, *_ = carry
        return (i < steps) & jnp.any(active_B)

    none_BN = jnp.full((batch, steps), -1, jnp.int32)
    start = (0, logits_BV, jnp.ones(batch, bool), none_BN, none_BN[:, 0], caches)
    _, _, _, tokens_BN, bad_B, caches = lax.while_loop(going, body, start)
    return tokens_BN, bad_B, caches


def train_step(
    optimizer: optax.GradientTransformation,
    trainable: Any,
    frozen: Any,
    opt_state: Any,
    batch: Any,
    *,
    remat: bool = True,
):
    """One optimizer update of the trainable part -> trainable, opt_state, metrics (with ``loss``, ``grad_norm``).

    Only `trainable` is differentiated: frozen leaves have neither gradient nor optimizer state.
    """

    def objective(trainable):
        return loss(combine(trainable, frozen), batch, remat=remat)

    (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(trainable)
    updates, opt_state = optimizer.update(grads, opt_state, trainable)
    metrics = metrics | {"loss": value, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(trainable, updates), opt_state, metrics
