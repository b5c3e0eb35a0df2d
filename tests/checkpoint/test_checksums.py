"""Checksums beside their definition in NumPy, over meshes, and what they notice."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_moe.checkpoint.checksums import _checksum, checksums
from trillion_moe.sharding import Layout

DTYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "bfloat16", "float16", "int32", "float32", "float64")


def by_definition(array: np.ndarray) -> int:
    """In Python's integers, an element at a time."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    width = min(array.dtype.itemsize, 4)
    words = array[..., None].view(f"u{width}") if array.dtype.itemsize == 8 else array.view(f"u{width}")
    total = 0
    for index in np.ndindex(words.shape):
        place = sum(i * 0x9E3779B1 ** (d + 1) for d, i in enumerate(index)) % 2**32
        total += mix(int(words[index]) * 0x9E3779B1 % 2**32 ^ mix(place))
    return total % 2**32


def values(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (2, 0, 3), (2, 3, 2, 5)])
def test_by_its_definition(dtype: str, shape: tuple[int, ...]) -> None:
    with jax.enable_x64(dtype == "float64"):
        array = values(shape, dtype)
        assert checksums({"x": array}) == {"x": by_definition(np.asarray(array))}


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"ep": 8}, P()),
        ({"ep": 8}, P("ep")),
        ({"ep": 4, "tp": 2}, P(None, "ep", None, "tp")),
        ({"ep": 4, "tp": 2}, P(None, None, ("ep", "tp"))),
        ({"ep": 4, "tp": 2}, P(None, None, ("tp", "ep"))),
        ({"pp": 2, "fsdp": 2, "tp": 2}, P("pp", None, "tp")),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
def test_however_it_is_cut(sizes, spec: P, dtype: str) -> None:
    """And nothing but one number for each device travels."""
    with jax.enable_x64(dtype == "float64"):
        array = values((8, 4, 16, 6), dtype)
        over = jax.device_put(array, NamedSharding(Layout.make(sizes).mesh, spec))
        assert checksums({"x": over}) == checksums({"x": array})
        text = _checksum.lower(over, over.sharding).compile().as_text() or ""
    moved = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-scatter|ragged-all-to-all)(?:-start)?\(", text)
    assert set(moved) <= {("u32[]", "all-reduce")}
    assert bool(moved) == (spec != P())


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_what_it_notices(dtype: str) -> None:
    """One bit anywhere, two elements, two rows or two matrices in each other's place, zeros that are elsewhere."""
    array = values((3, 4, 5), dtype)
    bits = np.asarray(array).view(f"u{array.dtype.itemsize}")
    others = []
    for at in np.ndindex(bits.shape):
        for bit in (0, 8 * array.dtype.itemsize - 1):
            others.append(bits.copy())
            others[-1][at] ^= bits.dtype.type(1 << bit)
    others += [bits[::-1], bits[:, ::-1], bits[..., ::-1], bits[[1, 0, 2]], bits[:, [0, 2, 1, 3]]]
    found = [checksums({"x": jnp.asarray(other.view(array.dtype))})["x"] for other in others]
    assert len({checksums({"x": array})["x"], *found}) == len(others) + 1
    row = jnp.zeros((4, 6), dtype).at[0, 0].set(1)
    assert checksums({"x": row}) != checksums({"x": row[:, ::-1]}) != checksums({"x": row[::-1]})


MANY = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from trillion_moe.checkpoint.checksums import checksums
from trillion_moe.sharding import Layout

where = NamedSharding(Layout.make({"ep": 8}).mesh, P("ep"))
arrays = {f"{i}": jax.device_put(jnp.full((8, 64), i), where) for i in range(60)}
for _ in range(10):
    assert len(set(checksums(arrays).values())) == 60
"""


def test_many_arrays() -> None:
    """All underway at once they take each other's threads on CPU, until XLA ends the process."""
    eight = os.environ | {"JAX_NUM_CPU_DEVICES": "8"}
    ended = subprocess.run([sys.executable, "-c", MANY], env=eight, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
