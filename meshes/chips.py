"""Accelerators, and how their compilers are asked without one being there.

Sources: NVIDIA's data sheets of H200 and B200; limits per block and multiprocessor from the CUDA programming guide,
compute capabilities 9.0 and 10.0.
"""

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Tpu:
    """topology: the smallest slice that libtpu compiles for."""

    name: str
    topology: str


@dataclass(frozen=True)
class Gpu:
    """memory_bandwidth in bytes a second; capability: CUDA's compute capability."""

    name: str
    hbm_bytes: int
    cores: int
    memory_bandwidth: int
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
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.hbm_bytes}
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


Chip = Tpu | Gpu

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Tpu("v5p", "v5p:2x2x1"),
        Tpu("v6e", "v6e:2x2"),
        Tpu("tpu7x", "tpu7x:2x2x1"),
        Gpu("h200", 141 * GB, 132, 4800 * GB, 50 * 2**20, 1.98, (9, 0)),
        Gpu("b200", 180 * GB, 148, 8000 * GB, 126 * 2**20, 1.965, (10, 0)),
    )
}
