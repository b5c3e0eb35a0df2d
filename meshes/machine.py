"""What a machine is: its devices, how they are joined, and how a model lies on it.

A machine's file is `MESH = Machine(...)`, found by its name with `machine`. Bandwidths are bytes a second that one
device sends when all send to all others alike, as tokens to their experts; latencies are seconds of one message between
two devices. `Link.source` says which of them are published and which assumed.
"""

import importlib
import math
import pkgutil
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trillion_moe.meshes.chips import KNOWN, Chip, Facts, Uncompiled
from trillion_moe.sharding import AXES, Layout, LayoutError


@dataclass(frozen=True)
class Tier:
    """Devices that reach each other alike: `span` of them, neighbours in the order of the mesh."""

    name: str
    span: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Link:
    """What joins devices, one way: of a GPU or a die all it has, of a torus one of the links to a neighbour."""

    name: str
    bandwidth: float
    latency: float
    source: str

    def switched(self, span: int) -> Tier:
        """Behind switches that carry whatever the devices send."""
        return Tier(self.name, span, self.bandwidth, self.latency)

    def torus(self, *sides: int, rings: bool = True, per_chip: int = 1) -> Tier:
        """Of chips with `per_chip` devices each; rings: whether the sides close.

        Half of what n chips send to each other crosses the middle of the longest side, k, half of that each way, over
        2 n / k links (n / k without rings). So a chip sends at 8 / k (4 / k) of a link. A collective along one side is
        faster: it has the two links of a ring.
        """
        share = (8 if rings else 4) / max(sides) / per_chip
        return Tier(self.name, math.prod(sides) * per_chip, share * self.bandwidth, self.latency)


_NCCL = "latency: NCCL's model of a ring, hwLat in src/graph/tuning.cc of github.com/NVIDIA/nccl"
NVLINK_4 = Link("NVLink", 450e9, 1.9e-6, f"https://www.nvidia.com/en-us/data-center/h100: 900 GB/s both ways; {_NCCL}")
NVLINK_5 = Link(
    "NVLink", 900e9, 1.9e-6, f"https://www.nvidia.com/en-us/data-center/gb200-nvl72: 1.8 TB/s both ways; {_NCCL}"
)
INFINIBAND = Link("InfiniBand", 50e9, 4e-6, f"NDR, a port of 400 Gb/s for each GPU as in DGX systems; {_NCCL}")
ICI = Link(
    "ICI",
    100e9,
    1e-6,
    "https://cloud.google.com/tpu/docs/v5p, v6e, tpu7x: 1,200, 800, 1,200 GB/s a chip both ways over 6, 4, 6 links; "
    "latency: an assumption, of one hop",
)
UNIFIED_BUS = Link("Unified Bus", 196e9, 2e-6, "https://arxiv.org/abs/2506.12708, of a die; latency: an assumption")
PACKAGE = Link("package", 270e9, 1e-6, "https://arxiv.org/abs/2506.12708, die to die; latency: an assumption")
MEMORY = Link("memory", 10e9, 1e-6, "an assumption: devices cut from one host copy within its memory")


@dataclass(frozen=True)
class Machine:
    """axes: sizes of the mesh axes that are not 1; their product is the number of devices.

    chip: of `chips.KNOWN`. tiers: the fastest first, the last spans all devices. topology: as `aot.devices` takes it,
    None where there is no compiler to ask. cloud: what a provider calls it. The rest, from rules on: as of
    `sharding.Layout`, whose `node` follows from the tiers.

    On a TPU every axis must be a side of the torus or a product of some: JAX lays it so that its neighbours are.
    """

    name: str
    chip: str
    axes: Mapping[str, int]
    tiers: tuple[Tier, ...]
    topology: str | None = None
    cloud: str | None = None
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    transport: str = "replicated"
    capacity: float | None = None
    chunks: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int | None = None
    wire: str | None = None
    capacities: tuple[float, ...] = ()

    def __post_init__(self):
        if self.chip not in KNOWN:
            raise LayoutError(f"{self.name}: no chip {self.chip!r}: there are {', '.join(KNOWN)}")
        spans = [tier.span for tier in self.tiers]
        if spans != sorted(set(spans)) or spans[-1:] != [self.devices]:
            raise LayoutError(
                f"{self.name}: tiers span {spans}, which must rise to the {self.devices} devices of its axes"
            )

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def facts(self) -> Facts | None:
        """Of one device; None for the CPU of whatever host it is."""
        return KNOWN[self.chip].facts

    def tier(self, axis: str) -> Tier:
        """The slowest tier that neighbours along a mesh axis have between them."""
        inner = math.prod(self.axes.get(name, 1) for name in AXES[AXES.index(axis) + 1 :])
        reach = inner * self.axes.get(axis, 1)
        return next(tier for tier in self.tiers if reach <= tier.span and tier.span % reach == 0)

    @property
    def node(self) -> int:
        """Neighbours along "ep" that the fastest tier joins."""
        inner = math.prod(self.axes.get(name, 1) for name in AXES[AXES.index("ep") + 1 :])
        return math.gcd(self.tiers[0].span // math.gcd(self.tiers[0].span, inner), self.axes.get("ep", 1))

    def layout(self, devices: Sequence[Any] | None = None) -> Layout:
        """Over these devices, by default those that JAX sees. Raises LayoutError if they are too few."""
        return Layout.make(
            self.axes,
            devices=devices,
            rules=self.rules,
            transport=self.transport,
            capacity=self.capacity,
            capacities=self.capacities,
            chunks=self.chunks,
            schedule=self.schedule,
            virtual=self.virtual,
            microbatches=self.microbatches,
            node=self.node if self.transport == "hierarchical" else None,
            wire=self.wire,
        )


def machines() -> list[str]:
    """The names of all machines that have a file."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if name not in ("chips", "machine"))


def machine(name: str) -> Machine:
    """The machine of this name, or of a file FILE.py like ours. Raises LayoutError with the names there are."""
    if name.endswith(".py"):
        try:
            mesh = runpy.run_path(name).get("MESH")
        except (Exception, SystemExit) as error:  # whatever a file of the user's may raise
            raise LayoutError(f"{name}: {type(error).__name__}: {error}") from error
        if not isinstance(mesh, Machine):
            raise LayoutError(f"{name} must define MESH = Machine(...), not {type(mesh).__name__}")
        return mesh
    if name not in machines():
        raise LayoutError(f"no machine {name!r}: legal are FILE.py and {', '.join(machines())}")
    return importlib.import_module(f"trillion_moe.meshes.{name}").MESH


def mesh_of(text: str) -> str | dict[str, int]:
    """What `--mesh` says: a machine's name or file as it is, ``ep=4,tp=2`` as sizes of axes. Raises LayoutError."""
    if "=" not in text or text.endswith(".py"):
        return text
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not (size.isascii() and size.isdecimal() and len(size) < 10) or axis in sizes:
            raise LayoutError(f"--mesh {text}: {part!r} is not legal, each axis is named once as in ep=4,tp=2")
        sizes[axis] = int(size)
    return sizes


def layout_of(mesh: str | Mapping[str, int] | Layout) -> Layout:
    """The layout that a machine's name, a machine's file or sizes of mesh axes mean here. Raises LayoutError."""
    match mesh:
        case str():
            return machine(mesh).layout()
        case Layout():
            return mesh
        case Mapping():
            return Layout.make(mesh)
        case _:
            raise LayoutError(
                f"mesh is {type(mesh).__name__}: legal are a machine's name, FILE.py, sizes of mesh axes, and a Layout"
            )


def compiled_for(mesh: Machine) -> Chip:
    """The chip to compile for. Raises LayoutError for a machine that nothing is compiled for ahead of time."""
    chip = KNOWN[mesh.chip]
    if mesh.topology is None or isinstance(chip, Uncompiled):
        raise LayoutError(f"{mesh.name}: nothing can be compiled ahead of time for {mesh.chip}")
    return chip
