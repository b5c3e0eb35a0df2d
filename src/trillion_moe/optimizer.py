"""The optimizer of a run: AdamW under a warm-up and a cosine, gradients clipped by their global norm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trillion_moe.run_config import OptimizerConfig, RunConfigError


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update 0, 1, …: linear to `lr` over the warm-up, then a cosine to ``final * lr``."""
    warmup = min(round(config.warmup * steps), steps - 1)
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.lr / (warmup + 1), peak_value=config.lr, warmup_steps=warmup, decay_steps=steps,
        end_value=config.final * config.lr,
    )  # fmt: skip


@functools.cache  # one config, one object: what was compiled with it is found again
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """For `steps` updates. The state holds two moments of what is trained, and nothing of what is frozen."""
    adamw = optax.adamw(
        schedule(config, steps), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    clip = optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip)
    return optax.chain(clip, adamw)


def check_eps(config: OptimizerConfig, trainable: Any) -> None:
    """RunConfigError if eps may be 0 in a dtype that is trained: what has no gradient yet would become 0 / 0."""
    for dtype in sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trainable)}):
        if config.eps < (least := float(jnp.finfo(dtype).smallest_normal)):
            raise RunConfigError(
                f"optimizer.eps = {config.eps} is too small for {dtype}, which is trained: legal is at least {least}"
            )
