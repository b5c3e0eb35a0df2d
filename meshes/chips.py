"""Accelerators: facts to plan with, and how their compilers are asked without one being there.

Memory and peaks are those of one device as a program sees it, which on some chips is half the chip. Peaks are dense.
A GPU's limits per block and multiprocessor are from the CUDA programming guide (compute capabilities 9.0 and 10.0), its
clock and L2 cache from XLA's descriptions of devices
(github.com/openxla/xla, xla/backends/gpu/target_config/specs).
"""

from dataclasses import dataclass, replace

GB = 10**9
GIB = 2**30
TERA = 1e12


@dataclass(frozen=True)
class Facts:
    """Of one device: bytes, bytes a second, FLOP/s without sparsity (fp8: None where the chip has none)."""

    hbm_bytes: int
    memory_bandwidth: int
    bf16_flops: float
    fp8_flops: float | None
    devices_per_chip: int
    source: str


@dataclass(frozen=True)
class Tpu:
    """topology: the smallest slice that libtpu compiles for."""

    name: str
    topology: str
    facts: Facts


@dataclass(frozen=True)
class Gpu:
    """cores: streaming multiprocessors; capability: CUDA's compute capability."""

    name: str
    facts: Facts
    cores: int
    l2_bytes: int
    clock_ghz: float
    capability: tuple[int, int]

    @property
    def target(self) -> str:
        """XLA's description of the device (stream_executor's GpuTargetConfigProto, as text)."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.facts.memory_bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.facts.hbm_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "NVIDIA {self.name.upper()}"
"""


@dataclass(frozen=True)
class Uncompiled:
    """A chip for which nothing is compiled ahead of time. facts: None where they depend on the host."""

    name: str
    facts: Facts | None


Chip = Tpu | Gpu

# TPUs: a chip's published figures, halved where it is two devices. Memory is what libtpu (of jaxlib 0.10.2) says it has
# when a program needs more: a little less than the 96, 32 and 2 x 96 GiB that are built in.
_V5P = Facts(
    hbm_bytes=int(95.73 * GIB),
    memory_bandwidth=2765 * GB,
    bf16_flops=459 * TERA,
    fp8_flops=459 * TERA,
    devices_per_chip=1,
    source="https://cloud.google.com/tpu/docs/v5p",
)
_V6E = Facts(
    hbm_bytes=int(31.24 * GIB),
    memory_bandwidth=1638 * GB,
    bf16_flops=918 * TERA,
    fp8_flops=918 * TERA,
    devices_per_chip=1,
    source="https://cloud.google.com/tpu/docs/v6e; fp8: https://docs.cloud.google.com/tpu/docs/tpu7x",
)
_TPU7X = Facts(
    hbm_bytes=int(94.74 * GIB),
    memory_bandwidth=7370 * GB // 2,
    bf16_flops=2307 * TERA / 2,
    fp8_flops=4614 * TERA / 2,
    devices_per_chip=2,
    source="https://docs.cloud.google.com/tpu/docs/tpu7x",
)

# NVIDIA publishes most peaks with sparsity, which are twice these.
_H100 = Facts(
    hbm_bytes=80 * GB,
    memory_bandwidth=3350 * GB,
    bf16_flops=989.5 * TERA,
    fp8_flops=1979 * TERA,
    devices_per_chip=1,
    source="https://www.nvidia.com/en-us/data-center/h100 (SXM)",
)
_H200 = replace(
    _H100,
    hbm_bytes=141 * GB,
    memory_bandwidth=4800 * GB,
    source="https://www.nvidia.com/en-us/data-center/h200 (SXM)",
)
_B200 = Facts(
    hbm_bytes=180 * GB,
    memory_bandwidth=8000 * GB,
    bf16_flops=2250 * TERA,
    fp8_flops=4500 * TERA,
    devices_per_chip=1,
    source="an eighth of https://www.nvidia.com/en-us/data-center/dgx-b200",
)
_GB200 = Facts(  # may draw more power than a B200, and is that much faster
    hbm_bytes=186 * GB,
    memory_bandwidth=8000 * GB,
    bf16_flops=2500 * TERA,
    fp8_flops=5000 * TERA,
    devices_per_chip=1,
    source="a seventy-second of https://www.nvidia.com/en-us/data-center/gb200-nvl72",
)

# A die, of which a package has two. It multiplies int8 twice as fast as bfloat16, and has no fp8.
_ASCEND_910C = Facts(
    hbm_bytes=64 * GB,
    memory_bandwidth=1600 * GB,
    bf16_flops=376 * TERA,
    fp8_flops=None,
    devices_per_chip=2,
    source="https://arxiv.org/abs/2506.12708",
)

# Those whose kernels are compiled and looked at.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Tpu("v5p", "v5p:2x2x1", _V5P),
        Tpu("v6e", "v6e:2x2", _V6E),
        Tpu("tpu7x", "tpu7x:2x2x1", _TPU7X),
        Gpu("h200", _H200, 132, 50 * 2**20, 1.98, (9, 0)),
        Gpu("b200", _B200, 148, 126 * 2**20, 1.965, (10, 0)),
    )
}

# All that machines are made of. An H100 and a GPU of a GB200 run the kernels of the H200 and the B200.
KNOWN: dict[str, Chip | Uncompiled] = CHIPS | {
    chip.name: chip
    for chip in (
        Gpu("h100", _H100, 132, 50 * 2**20, 1.98, (9, 0)),
        Gpu("gb200", _GB200, 152, 135528448, 2.062, (10, 0)),
        Uncompiled("cpu", None),
        Uncompiled("ascend_910c", _ASCEND_910C),
    )
}
