"""Whether an interpreted TPU kernel has a race."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def races(run: Callable[[], Any]) -> bool:
    """Of kernels interpreted with `detect_races`. JAX sets a flag until 0.10, and raises an error from 0.12 on."""
    try:
        jax.block_until_ready(run())
        return interpret_pallas_call.races.races_found
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        pltpu.reset_tpu_interpret_mode_state()
