"""Programs compiled for accelerators that are not there: libtpu and the CUDA plugin need no device for that.

Needs the extra `aot`, in an environment of its own: a CUDA plugin without a driver complains at every start.
"""

import os
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillion_moe.meshes.chips import CHIPS, Chip, Gpu, Tpu


class AotError(RuntimeError):
    """Why nothing can be compiled for a chip: what is missing and how it is installed."""


def devices(chip: Chip, topology: str | None = None) -> list[Any]:
    """Compile-only devices. topology: "v5p:8x8x16" for TPUs, "hosts x devices x 1" for GPUs; the smallest by default.

    Raises AotError without the compiler's plugin.
    """
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of libraries that only running needs
    try:
        if isinstance(chip, Tpu):
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs, so processes cannot disturb
            _without_a_host()
            return topologies.get_topology_desc(topology or chip.topology, "tpu").devices
        _find_cuda()
        return topologies.get_topology_desc(
            chip.name, "cuda", target_config=chip.target, topology=topology or "1x1x1"
        ).devices
    except Exception as error:  # plugins raise many kinds
        package = "libtpu" if isinstance(chip, Tpu) else "jax-cuda13-plugin and ptxas"
        raise AotError(
            f"no compiler for {chip.name} ({package} is needed: make aot, or pip install 'trillion-moe[aot]'): {error}"
        ) from error


def _without_a_host() -> None:
    """libtpu asks which TPUs its host has, and complains where nobody answers: it is told some, if there are none."""
    from jax._src import hardware_utils

    if not hardware_utils.num_available_tpu_chips_and_device_id()[0]:
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _find_cuda() -> None:
    """Make the plugin known, and ptxas with it, which the CUDA compiler's wheel has."""
    from jax._src import xla_bridge

    if str(cuda_tools()) not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += f"{os.pathsep}{cuda_tools()}"
    jax.devices()  # JAX looks for plugins when it looks for devices
    if "cuda" not in xla_bridge._backend_factories:  # it had looked before, and found the libraries missing
        xla_bridge.discover_pjrt_plugins()


def cuda_tools() -> Path:
    """The folder of ptxas."""
    return Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")


class Program(NamedTuple):
    """What JAX hands to the compiler, and what the compiler makes of it."""

    lowered: Any
    compiled: Any


def compile_for(chip: Chip | str, f: Callable, *shapes: Any, options: dict[str, Any] | None = None) -> Program:
    """The program of `f` for one device of a chip. shapes: trees of ``jax.ShapeDtypeStruct``, without sharding.

    options: of XLA, such as ``{"xla_dump_to": folder}``. Raises AotError; what a compiler refuses is its own error.
    """
    chip = CHIPS[chip] if isinstance(chip, str) else chip
    mesh = Mesh(np.array(devices(chip)[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    return compile_over(chip, mesh, jax.jit(f), *placed, options=options)


def compile_over(
    chip: Chip,
    mesh: Mesh,
    jitted: Any,
    *shapes: Any,
    options: dict[str, Any] | None = None,
    static: Mapping[str, Any] | None = None,
) -> Program:
    """The program of a jitted function over a mesh of a chip's `devices`, where the shapes' shardings have them.

    static: its keyword arguments.
    """
    platform = "cuda" if isinstance(chip, Gpu) else "tpu"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.trace(*shapes, **(static or {})).lower(lowering_platforms=(platform,))
        return Program(lowered, lowered.compile(options))
