"""Where arrays lie on a mesh: logical axes, one table of rules, `NamedSharding`.

A mesh has six axes (`AXES`), from what talks least to what talks most. Every dimension of a parameter, an adapter or an
activation has a logical name; a rule says over which mesh axes a name is cut. "embed", the dimension by which matrices
are kept apart when nobody multiplies them (fully sharded data parallelism), is whole wherever they are used.

A `Layout` is static: a model that carries one is traced for it, a model without one runs on one device.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trillion_moe.blueprint import layer_numbers, leaf_names, path_parts
from trillion_moe.weights import Dims, is_copies, is_weight, weight_axes

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Pipeline stages, replicas, fully sharded replicas, experts, context (the sequence), tensors (heads and hidden)."""

BATCH = ("dp", "fsdp", "ep")
"""What a microbatch is cut over."""

TRANSPORTS = ("replicated", "all_to_all", "ragged", "hierarchical")
"""How tokens reach their experts; see `layers.exchange`."""

WIRES = ("float8_e4m3fn",)
"""Narrow dtypes in which rows may travel to experts and back; see `layers.wire`."""

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("pp", *BATCH),
    "time": ("cp",),
    # parameters
    "repeats": (),
    "stages": ("pp",),
    "embed": ("fsdp", "ep"),
    "norm": (),
    "vocab": ("tp",),
    "heads": ("tp",),
    "head_dim": (),
    "conv": (),
    "q_lora": (),
    "kv_lora": (),
    "mlp": ("tp",),
    "router": (),
    "latent": ("tp",),
    "expert": ("ep",),
    "expert_slot": (),
    "expert_embed": (),
    "expert_mlp": (),
    "lora_rank": (),
    "patch": (),
    "pos_height": (),
    "pos_width": (),
    "vision_embed": (),
    "vision_heads": (),
    "vision_mlp": (),
    "vision_window": (),
}
"""Logical axis to mesh axes. A machine's file changes single rules."""

GATHERED = "embed"

_FIXED: dict[str, tuple[tuple[str, ...], ...]] = {  # what islands communicate over
    "batch": (("pp", *BATCH), BATCH),
    "repeats": ((),),
    "stages": (("pp",),),
    "time": (("cp",),),
    "vocab": (("tp",),),
    "expert": (("ep",),),
    "expert_embed": ((),),
    "expert_mlp": ((), ("tp",)),
}
SCHEDULES = ("1f1b", "gpipe")
"""When a stage goes back: as soon as it can, or after it has seen all microbatches."""

_NO_RAGGED = ("TPU7x",)  # seen with jaxlib 0.10.2


class LayoutError(ValueError):
    """A model, a batch or a table of rules that does not fit a mesh; the message has the sizes and the legal ones."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules.

    rules: pairs of a logical axis and its mesh axes, sorted, so that equal layouts are one static value; see `make`.
    transport: how tokens reach their experts, one of `TRANSPORTS`.
    capacity: share of a chunk's tokens that a device may send to one other, with transport "all_to_all"; None = all.
    capacities: among which training chooses the capacity by what was asked for; none = it stays. See `train.capacity`.
    chunks: into how many parts a device's tokens are exchanged, so that one is underway while another is computed. One
    exchange more a layer carries nothing, which costs bytes where sizes are fixed ("replicated", "all_to_all").
    node: for transport "hierarchical", neighbours along "ep" that reach each other faster than the rest.
    wire: the dtype in which rows travel to experts and back, one of `WIRES`; None = their own.
    schedule, virtual, microbatches: of a pipeline, see `layers.schedule`: one of `SCHEDULES`, how many runs of layers a
    stage holds, and into how many parts a batch is cut, a multiple of pp; None = one row a device each.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    transport: str = "replicated"
    capacity: float | None = None
    chunks: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int | None = None
    node: int | None = None
    wire: str | None = None
    capacities: tuple[float, ...] = ()

    @classmethod
    def make(
        cls, sizes: Mapping[str, int], *, devices: Sequence[Any] | None = None, rules: Mapping[str, Any] = {}, **options
    ) -> "Layout":
        """A layout over the first devices there are (or those given, in order: neighbours talk most).

        sizes: of mesh axes, 1 where none is named. rules: what differs from `RULES`. options: as of the class.
        Raises LayoutError: an unknown axis, too few devices, a rule for an unknown name.
        """
        if odd := [axis for axis in sizes if axis not in AXES]:
            raise LayoutError(f"no mesh axis {odd[0]!r}: legal are {', '.join(AXES)}")
        shape = tuple(sizes.get(axis, 1) for axis in AXES)
        if bad := [f"{axis}={size!r}" for axis, size in zip(AXES, shape, strict=True) if not _is_count(size)]:
            raise LayoutError(f"mesh axis {bad[0]}: legal are whole numbers from 1")
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) < math.prod(shape):
            wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            hint = "; JAX_NUM_CPU_DEVICES makes more of a CPU" if devices and devices[0].platform == "cpu" else ""
            raise LayoutError(f"{wanted} = {math.prod(shape)} devices, but there are {len(devices)}{hint}")
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[: math.prod(shape)])
        return cls(mesh, _rules(rules), **options)

    def __post_init__(self):
        if odd := set(self.over(GATHERED)) - set(BATCH):
            raise LayoutError(f"the rule of {GATHERED!r} names {min(odd)!r}: legal are {', '.join(BATCH)}")
        for name, legal in _FIXED.items():
            if self.over(name) not in legal:
                raise LayoutError(f"the rule of {name!r} is {self.over(name)}: legal is {' or '.join(map(str, legal))}")
        if self.transport not in TRANSPORTS:
            raise LayoutError(f"no transport {self.transport!r}: legal are {', '.join(TRANSPORTS)}")
        if not isinstance(self.capacities, (list, tuple)):
            raise LayoutError(f"capacities = {self.capacities!r}: legal are tuples of numbers, () for none")
        object.__setattr__(self, "capacities", tuple(self.capacities))  # of a file, maybe a list
        for share in (*self.capacities, *(() if self.capacity is None else (self.capacity,))):
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if self.transport != "all_to_all" or not number or not 0 < share <= 1:
                raise LayoutError(f"capacity = {share!r}: legal is above 0 up to 1, with 'all_to_all' alone")
        if self.capacities and (
            self.capacity not in self.capacities or list(self.capacities) != sorted(set(self.capacities))
        ):
            raise LayoutError(
                f"capacities = {self.capacities}, capacity = {self.capacity}: legal are rising capacities, one of "
                "which is the first to be used"
            )
        for name, optional in (("chunks", False), ("virtual", False), ("microbatches", True), ("node", True)):
            if not (_is_count(value := getattr(self, name)) or (optional and value is None)):
                raise LayoutError(f"{name} = {value!r}: legal are whole numbers from 1")
        self._check_pipeline()
        ep = self.size("ep")
        if self.capacity is not None and ep == 1:
            raise LayoutError(f"capacity = {self.capacity} over ep = 1, where nothing is exchanged: legal is null")
        if (self.transport == "hierarchical") != (self.node is not None):
            raise LayoutError(f"transport {self.transport!r} with node = {self.node}: 'hierarchical' alone has nodes")
        if self.node is not None and not (1 < self.node < ep and ep % self.node == 0):
            legal = ", ".join(str(n) for n in range(2, ep) if ep % n == 0) or "none"
            raise LayoutError(f"node = {self.node} of ep = {ep} devices: legal are {legal}; one tier needs no nodes")
        if self.wire is not None and (self.wire not in WIRES or ep == 1):
            raise LayoutError(f"wire = {self.wire!r} over ep = {ep}: legal is {', '.join(WIRES)}, where ep is above 1")
        kind = self.mesh.devices.flat[0].device_kind
        if self.transport in ("ragged", "hierarchical") and kind in _NO_RAGGED:
            raise LayoutError(
                f"transport {self.transport!r} does not compile for {kind}: legal are replicated, all_to_all"
            )

    @property
    def platform(self) -> str:
        """Of its devices, as JAX names it."""
        return self.mesh.devices.flat[0].platform

    def _check_pipeline(self) -> None:
        stages = self.size("pp")
        if self.schedule not in SCHEDULES:
            raise LayoutError(f"no schedule {self.schedule!r}: legal are {', '.join(SCHEDULES)}")
        if stages == 1 and self.schedule != SCHEDULES[0]:
            raise LayoutError(f"schedule = {self.schedule!r} over pp = 1 has no effect: legal is {SCHEDULES[0]!r}")
        if stages == 1 and self.virtual != 1:
            raise LayoutError(f"virtual = {self.virtual} over pp = {stages}: legal is at least 1, and 1 without stages")
        if self.microbatches is not None and self.microbatches % stages:
            raise LayoutError(f"microbatches = {self.microbatches}: legal are multiples of pp = {stages}")
        if self.microbatches not in (None, 1) and stages == 1:
            raise LayoutError(f"microbatches = {self.microbatches} over pp = 1: legal is null, without stages")

    @property
    def rows(self) -> int:
        """Rows of a batch that keep every device busy: one each, over stages four microbatches for each stage."""
        stages = self.size("pp")
        return self.size(*BATCH) * (1 if stages == 1 else self.microbatches or 4 * stages)

    @property
    def within(self) -> "Layout":
        """Of one stage: its batch is a microbatch, which is not cut over stages."""
        rules = tuple((name, BATCH if name == "batch" else axes) for name, axes in self.rules)
        return dataclasses.replace(self, rules=rules)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes over which tokens lie, no two devices along them the same."""
        return *self.over("batch"), *self.over("time")

    def size(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def over(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes of a logical axis; none of None."""
        if logical is None:
            return ()
        for name, axes in self.rules:
            if name == logical:
                return axes
        raise LayoutError(f"no rule for the logical axis {logical!r}: there are {', '.join(n for n, _ in self.rules)}")

    def spec(self, axes: Sequence[str | None], *, whole: Iterable[str] = ()) -> PartitionSpec:
        """Of an array whose dimensions have these names; None and those in `whole` are not cut.

        Raises LayoutError if two dimensions would lie over one mesh axis.
        """
        cut = [() if axis is None or axis in whole else self.over(axis) for axis in axes]
        used = [name for names in cut for name in names]
        if twice := {name for name in used if used.count(name) > 1}:
            raise LayoutError(f"dimensions {tuple(axes)} lie over mesh axis {min(twice)!r} more than once")
        return PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in cut))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Of an array with these dimensions."""
        return NamedSharding(self.mesh, self.spec(axes))

    def here(self) -> Any:
        """The mesh as it is where this is traced: without devices where a program is compiled ahead of time."""
        around = jax.sharding.get_abstract_mesh()
        return around if around.axis_names == AXES else self.mesh

    def pin(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """x, lying as the rules say of an array with these dimensions."""
        return lax.with_sharding_constraint(x, NamedSharding(self.here(), self.spec(axes)))


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _rules(changed: Mapping[str, Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(changed, Mapping):
        raise LayoutError(f"rules are {changed!r}: legal is a dict of logical axes, {{}} for none")
    if odd := sorted(changed.keys() - RULES.keys()):
        raise LayoutError(f"a rule for {odd[0]!r}, which is no logical axis: there are {', '.join(RULES)}")
    for name, axes in changed.items():
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            raise LayoutError(f"the rule of {name!r} is {axes!r}: legal is a tuple of mesh axes, () for none")
    table = RULES | {name: tuple(axes) for name, axes in changed.items()}
    for name, axes in table.items():
        if odd := [axis for axis in axes if axis not in AXES]:
            raise LayoutError(f"the rule of {name!r} names mesh axis {odd[0]!r}: legal are {', '.join(AXES)}")
    return tuple(sorted(table.items()))


def pin(layout: Layout | None, x: jax.Array, *axes: str | None) -> jax.Array:
    return x if layout is None else layout.pin(x, *axes)


def island(
    layout: Layout | None, f: Callable, in_axes: tuple[Any, ...], out_axes: Any, *, whole: Iterable[str] = ()
) -> Callable:
    """f on every device by itself, over the parts of its arguments that lie there: `jax.shard_map`.

    in_axes, out_axes: trees of `Dims`, each for the arrays below it. Without a layout it is f.
    """
    if layout is None:
        return f
    here = layout.here()

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda d: layout.spec(d.axes, whole=whole), tree, is_leaf=lambda d: isinstance(d, Dims))

    manual = jax.sharding.get_abstract_mesh().manual_axes  # of a pipeline around
    names = set(AXES) - set(manual)
    return jax.shard_map(
        f, mesh=here, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=names, check_vma=False
    )


def dims(*axes: str | None) -> Dims:
    """The logical axes of an array of activations; a dimension that is None is not cut."""
    return Dims(axes)


# --- trees of weights ------------------------------------------------------------------------------------------------


def axes_like(tree: Any, blueprint: Any) -> Any:
    """Of a module, filled or not, packed or adapted or neither: the same tree with `Dims` for arrays.

    blueprint: the module as it is built, of Specs.
    """
    weights, treedef = jax.tree.flatten(tree, is_leaf=lambda node: is_weight(node) or is_copies(node))
    specs = iter(jax.tree.leaves(blueprint))
    found = [_whole(w) if is_copies(w) else weight_axes(w, next(specs).axes) for w in weights]
    assert next(specs, None) is None, "the blueprint has more arrays than the tree"
    return treedef.unflatten(found)


def _whole(tree: Any) -> Any:
    """`Dims` of arrays that every device has."""
    return jax.tree.map(lambda a: Dims((None,) * a.ndim), tree)


def model_axes(model: Any) -> Any:
    """`axes_like` of a whole model."""
    return axes_like(model, type(model)(model.config, dtype=model.dtype, plan=model.plan))


def pin_like(part: Any, model: Any) -> Any:
    """A part of a model, None where it lacks an array, or gradients of it, lying as the model's own arrays do."""
    if model.layout is None:
        return part

    def one(x: jax.Array | None, d: Dims | None) -> jax.Array | None:
        return None if x is None or d is None else model.layout.pin(x, *d.axes)

    return jax.tree.map(one, part, model_axes(model), is_leaf=lambda x: x is None)


def gathered(layout: Layout | None, module: Any, blueprint: Callable[[], Any]) -> Any:
    """A module with every array whole along "embed", as it is used: what lies apart is collected here."""
    if layout is None or layout.size(*layout.over(GATHERED)) == 1:
        return module

    def collect(x: jax.Array, d: Dims) -> jax.Array:
        if GATHERED not in d.axes:
            return x
        spec = layout.spec(d.axes, whole=(GATHERED,))
        return lax.with_sharding_constraint(x, NamedSharding(layout.here(), spec))

    return jax.tree.map(collect, module, axes_like(module, blueprint()))


def cut_for(model: Any) -> tuple[int, int]:
    """The pipeline stages, and runs of layers on each, that a model's depth plan is made for."""
    return next(((s.stages, s.virtual) for s in model.plan if s.numbers), (1, 1))


def shardings(model: Any, layout: Layout, *, whole: tuple[str, ...] = ()) -> Any:
    """The tree of `NamedSharding` of a model or blueprint; what is named in `whole` is not cut.

    Raises LayoutError naming the parameter, its size and what would divide it.
    """
    numbers = layer_numbers(model.plan)

    def one(path, leaf, d: Dims) -> NamedSharding:
        name = leaf_names(numbers, path_parts(path))[0]
        try:
            spec = layout.spec(d.axes, whole=whole)
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None
        for size, axis in zip(leaf.shape, d.axes, strict=True):
            if axis not in whole:
                _check_cut(name, size, axis, layout)
        return NamedSharding(layout.mesh, spec)

    found = jax.tree_util.tree_map_with_path(one, model, model_axes(model))
    _check_heads(model.config, layout)
    return found


def _check_heads(config: Any, layout: Layout) -> None:
    """No head is cut: the matrices that have several side by side do not say where one ends."""
    for kind in ("kda", "mla"):
        if (part := getattr(config, kind)) is not None:
            _check_cut(f"{kind}.num_heads", part.num_heads, "heads", layout)


def _check_cut(name: str, size: int, axis: str | None, layout: Layout) -> None:
    over = layout.over(axis)
    if size % layout.size(*over):
        raise LayoutError(
            f"{name} has {size} along {axis!r}, not a multiple of {layout.size(*over)} ({' x '.join(over)}); "
            f"legal are {_divisors(size)}"
        )


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 4096) + 1) if size % n == 0)


def bytes_on_a_device(tree: Any) -> int:
    """Of arrays, or of what has a shape, dtype and sharding."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the host, whole in every process, onto the devices: each takes its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check_batch(layout: Layout | None, rows: int, tokens: int, *, least: int = 1) -> None:
    """LayoutError for a batch [rows, tokens] that a mesh cannot cut, with what it can. least: tokens on each device."""
    if layout is None:
        return
    for what, size, name in (("rows", rows, "batch"), ("tokens a row", tokens, "time")):
        parts = layout.size(*layout.over(name))
        if size % parts:
            axes = " x ".join(f"{axis} {layout.size(axis)}" for axis in layout.over(name) if layout.size(axis) > 1)
            raise LayoutError(f"{size} {what} cannot be cut over {axes}: legal are multiples of {parts}")
    micro = layout.microbatches or layout.size("pp")
    least_rows, least_tokens = micro * layout.size(*BATCH), layout.size("pp", "cp")
    if rows % least_rows or tokens % least_tokens:
        raise LayoutError(
            f"{rows} rows of {tokens} tokens cannot be cut into {micro} microbatches for {layout.size('pp')} stages: "
            f"legal are multiples of {least_rows} rows and {least_tokens} tokens"
        )
    if layout.size("cp") > 1 and tokens // layout.size("cp") < least:
        raise LayoutError(
            f"{tokens} tokens a row leave {tokens // layout.size('cp')} on each device along cp: its convolutions need "
            f"at least {least}"
        )


def check_caches(layout: Layout | None) -> None:
    """LayoutError for a mesh over which nothing can be generated."""
    if layout is not None and layout.size("pp") > 1:
        raise LayoutError(f"a mesh with pp = {layout.size('pp')} has stages, which have no caches: legal is 1")
    if layout is not None and layout.size("cp") > 1:
        raise LayoutError(f"a mesh with cp = {layout.size('cp')} cuts sequences, and caches cannot be cut: legal is 1")


def place(model: Any, layout: Layout) -> Any:
    """The model with its arrays on the mesh and the layout with it. A blueprint stays one; see `shardings`.

    Raises LayoutError, too, for a model that is not cut into the stages of this mesh.
    """
    if (cut := cut_for(model)) != (layout.size("pp"), layout.virtual):
        raise LayoutError(
            f"the model's layers are cut for pp {cut[0]} x virtual {cut[1]}, the mesh has pp {layout.size('pp')} x "
            f"virtual {layout.virtual}: load it with mesh=, or place it with tm.place"
        )
    where = shardings(model, layout)
    placed = jax.tree.map(lambda x, at: jax.device_put(x, at) if isinstance(x, jax.Array) else x, model, where)
    placed.layout = layout
    return placed


def as_placed(model: Any) -> Any:
    """A model of which some arrays are new, all where its layout has them; as it is without one."""
    return model if model.layout is None else place(model, model.layout)


def relaid(tree: Any, layout: Layout) -> Any:
    """A tree with models in it, each with another layout over the same mesh and rules: no array moves."""

    def laid(node: Any) -> bool:
        return isinstance(getattr(node, "layout", None), Layout)  # packed weights have a layout of another kind

    def one(model: Any) -> Any:
        if not laid(model):
            return model
        model = jax.tree.map(lambda x: x, model)
        model.layout = layout
        return model

    return jax.tree.map(one, tree, is_leaf=laid)
