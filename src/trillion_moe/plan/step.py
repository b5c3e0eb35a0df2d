"""The training step of a run's configuration, compiled ahead of time for a machine, and what its compiler says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trillion_moe import aot
from trillion_moe.blueprint import is_spec
from trillion_moe.compiler import OPTIONS
from trillion_moe.config import ModelConfig
from trillion_moe.layers.segments import Stages, stages_of
from trillion_moe.meshes.chips import Chip, Gpu
from trillion_moe.meshes.machine import Machine, compiled_for
from trillion_moe.model import least_tokens
from trillion_moe.ops import IMPLEMENTATIONS, using
from trillion_moe.optimizer import make_optimizer
from trillion_moe.plan.collectives import Collective, collectives
from trillion_moe.programs import checked, gradients, model_config, rows_of_a_pass, update
from trillion_moe.run_config import RunConfig, RunConfigError
from trillion_moe.sharding import Layout, bytes_on_a_device, check_batch, place, shardings
from trillion_moe.transforms import partition

SHARE = 0.9  # of a device's memory that a step may take: the rest is the runtime's
AIM = 0.87  # what a GPU's compiler is told it may take: it takes all that, and a little more
STEPS = 1000  # of the schedule; no size depends on it


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of one device at the greater peak of a step's two programs, by XLA's memory analysis.

    rows, tokens: of one pass. pipeline: its stages, if any. peak_bytes: arguments, results that share no memory with
    them, temporaries and code, and what the program is not given but a run still holds (the optimizer's state while
    gradients are made; frozen weights and the batch while weights are updated). argument_bytes: of the peak, arguments
    and what is held; temp_bytes: the rest of it. host_bytes: in the memory of the host. collectives: of both programs.
    """

    rows: int
    tokens: int
    pipeline: Stages | None
    peak_bytes: int
    argument_bytes: int
    temp_bytes: int
    host_bytes: int
    collectives: list[Collective]


def compile_step(config: RunConfig, mesh: Machine) -> Compiled:
    """The step of one pass over text of the greatest length, rows as in `config.train`; `Layout.rows` if that is None.

    Both programs of `train`: gradients, then the update; `balance_step`, which moves biases alone, is not among them.
    Raises RunConfigError for settings that are not planned, LayoutError for a machine without compiler and a model or
    batch that it cannot cut, AotError without the compiler's plugin and where it refuses the step.
    """
    chip = compiled_for(mesh)
    cfg, t = model_config(config), config.train
    if t.accumulate != 1 or t.dropout:
        raise RunConfigError(
            f"train.accumulate = {t.accumulate}, train.dropout = {t.dropout}: legal are 1 and 0, what is compiled is "
            "one pass and its update"
        )
    tokens = config.examples.max_length
    if tokens is None:
        raise RunConfigError("examples.max_length is null: a plan needs the length of its rows")
    checked(cfg, config, _platform(chip), None)  # what no machine could run is said without a compiler, too
    layout = mesh.layout(aot.devices(chip, mesh.topology))
    rows = rows_of_a_pass(config, layout)
    check_batch(layout, rows, tokens, least=least_tokens(cfg))
    trained, frozen = partition(_model(cfg, config, chip, layout), trainable="all" if config.lora is None else "lora")
    optimizer = make_optimizer(config.optimizer, STEPS)
    state, batch = _state(optimizer, trained, layout), _batch(layout, rows, tokens)
    held = bytes_on_a_device((trained, frozen, state, batch))
    static: dict[str, Any] = {"remat": t.remat, "dropout": 0.0, "balance": t.balance}
    one = _compiled(mesh, layout, gradients, held, trained, frozen, batch, jax.random.key(0), **static)
    _, sums = one.lowered.out_info
    # Gradients lie as what is trained.
    two = _compiled(mesh, layout, update, held, optimizer, trained, state, trained, _replicated(sums, layout))
    memories = [program.compiled.memory_analysis() for program in (one, two)]
    waiting = bytes_on_a_device(state), bytes_on_a_device((frozen, batch))
    peak, arguments = max((_peak(m) + w, m.argument_size_in_bytes + w) for m, w in zip(memories, waiting, strict=True))
    return Compiled(
        rows,
        tokens,
        stages_of(trained.plan, layout, rows),
        peak,
        arguments,
        peak - arguments,
        max(memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes for memory in memories),
        collectives([program.compiled.as_text() or "" for program in (one, two)], layout.mesh),
    )


def _model(cfg: ModelConfig, config: RunConfig, chip: Chip, layout: Layout) -> Any:
    """The model as it would be loaded for this chip, of arrays without values that lie over the mesh."""
    model = place(checked(cfg, config, _platform(chip), layout), layout)

    def abstract(spec: Any, where: Any) -> jax.ShapeDtypeStruct:
        assert is_spec(spec)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=where)

    return jax.tree.map(abstract, model, shardings(model, layout))


def _state(optimizer: optax.GradientTransformation, trained: Any, layout: Layout) -> Any:
    def like(state: Any, parameter: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(state.shape, state.dtype, sharding=parameter.sharding)

    def counter(state: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(state.shape, state.dtype, sharding=layout.sharding())

    state = jax.eval_shape(optimizer.init, trained)
    return optax.tree.map_params(optimizer, like, state, trained, transform_non_params=counter)


def _replicated(shapes: Any, layout: Layout) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.sharding()), shapes)


def _compiled(mesh: Machine, layout: Layout, program: Any, held: int, *args: Any, **static: Any) -> aot.Program:
    chip = compiled_for(mesh)
    with using(dict.fromkeys(IMPLEMENTATIONS, _platform(chip))):  # a platform chooses its own only where it is there
        try:
            options = _options(chip, held) or None
            return aot.compile_over(chip, layout.mesh, program, *args, options=options, static=static)
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
            raise aot.AotError(f"the compiler of {mesh.name} refuses this step: {str(error)[:500]}") from error


def _peak(memory: Any) -> int:
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes + code


def _batch(layout: Layout, rows: int, tokens: int) -> dict[str, Any]:
    dtypes = {"tokens": jnp.int32, "segments": jnp.int32, "loss_mask": jnp.bool_}
    where = layout.sharding("batch", "time")
    return {name: jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=where) for name, dtype in dtypes.items()}


def _options(chip: Chip, held: int) -> dict[str, Any]:
    """As the step is compiled to be run, but for what stands in the way of asking about it.

    A TPU's gathers stay off its sparse cores: libtpu (of jaxlib 0.10.2) cannot give the text of a program with them
    there. And without a device XLA gives a GPU's program four fifths of its memory, with this `AIM` of it.
    """
    options = dict(OPTIONS.get(_platform(chip), {}))
    if not isinstance(chip, Gpu):
        return options | {"xla_tpu_offload_gather_to_sparsecore": False}
    assumed, wanted = (share * chip.facts.hbm_bytes - held for share in (0.8, AIM))
    return options | ({"xla_gpu_memory_limit_slop_factor": round(100 * wanted / assumed)} if assumed > 0 else {})


def _platform(chip: Chip) -> str:
    return "gpu" if isinstance(chip, Gpu) else "tpu"
