"""What every test shares: the device it runs on, and where the golden files are.

Tests run on CPU, cut into eight devices so that meshes can be built. `TRILLION_MOE_TEST_PLATFORM=cuda` (or `tpu`)
puts that platform first, for the tests marked `gpu` and `tpu`.
"""

import os
import signal
import threading
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

PLATFORM = os.environ.get("TRILLION_MOE_TEST_PLATFORM", "cpu")
PLATFORMS = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"

os.environ["JAX_PLATFORMS"] = PLATFORMS  # for the processes that tests start
jax.config.update("jax_platforms", PLATFORMS)
# A compilation cache that outlives the run would hide compile errors and make timings depend on history.
jax.config.update("jax_enable_compilation_cache", False)
# Tests compile thousands of small programs and run each once: LLVM's optimisation and XLA's newer way to write loops
# would cost more than they save (LOG.md). `TRILLION_MOE_TEST_OPTIMIZED=1` leaves both on, as users have it.
if not os.environ.get("TRILLION_MOE_TEST_OPTIMIZED"):
    quick = "--xla_backend_optimization_level=0"
    if find_spec("libtpu") is None:  # which ends a process with a flag that it does not know
        quick += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
# A shell that runs the tests in the background leaves SIGINT ignored, and tests of Ctrl-C would wait for nothing.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
if PLATFORM == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Folder of the golden files, whose arrays other implementations computed."""
    return Path(__file__).parent / "goldens"


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
    """What a module compiled is of no use to the next: kept, thousands of programs exhaust the process's mappings."""
    yield
    jax.clear_caches()
