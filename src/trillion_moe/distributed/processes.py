"""The processes of a run: how they come together, reach a point together, and end together."""

import ctypes
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from trillion_moe.distributed.environment import Place, ProcessesError, find
from trillion_moe.distributed.hub import Timing
from trillion_moe.distributed.link import Link, leave_at_once

VERDICT, SOON = 10.0, 1.0  # seconds for the hub to find that another process is to blame; where that is not likely
SHUTDOWN = 10  # seconds that JAX waits at the end for processes that have all said they are there
INTERRUPTED = 130
ALONE, USUAL = Place(), Timing()


class Processes:
    """This process and the others; alone by default. A context: an error inside ends all of them, each with its text.

    index: of this one, from 0. count: how many there are. hosts: their names.
    """

    def __init__(self, place: Place = ALONE, link: Link | None = None, *, known: tuple[type[BaseException], ...] = ()):
        self.index, self.count = place.index, place.count
        self.hosts = () if link is None else link.hosts
        self._link, self._known = link, known

    @property
    def first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.index == 0

    def wait(self, what: str) -> None:
        """Until all have reached the same point; who waits says for whom."""
        self.gather(what)

    def gather(self, what: str, value: Any = None) -> dict[int, Any]:
        """`wait`, with a value of JSON -> that of process 0, and of every process that has another one."""
        return {0: value} if self._link is None else self._link.gather(what, value)

    def same(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises ProcessesError, in all of them, naming those of these values by name that differ among them; a name
        that one of them lacks differs, too."""
        found = self.gather(what, dict(values))
        wrong = [
            f"{name} is {_shown(found[i], name)} in process {i} (host {self.hosts[i]}), {_shown(found[0], name)} in "
            "process 0"
            for i in sorted(found)
            for name in {**found[0], **found[i]}
            if _shown(found[i], name) != _shown(found[0], name)
        ]
        if wrong:
            raise ProcessesError(f"the {what} of all processes must be the same: {'; '.join(wrong)}")

    def __enter__(self) -> "Processes":
        global _current
        _current = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _current
        _current = Processes()
        if self._link is None:
            return
        if error is not None:
            self._fail(error)
        self.wait("end")
        self._link.leave()
        jax.distributed.shutdown()

    def _fail(self, error: BaseException) -> NoReturn:
        """Say what is wrong, here and to the others, and end."""
        assert self._link is not None
        # Most errors of JAX here are of another process that is no more; they come as other kinds too.
        self._link.await_verdict(VERDICT if isinstance(error, jax.errors.JaxRuntimeError) else SOON)
        known = isinstance(error, (*self._known, ProcessesError))
        text = str(error) if known else "".join(traceback.format_exception_only(error)).strip()
        self._link.fail(f"process {self.index} (host {self.hosts[self.index]}): {text}")
        said = text if known else "".join(traceback.format_exception(error)).rstrip()
        leave_at_once(f"process {self.index}: {said}", INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        raise AssertionError


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"


_current = Processes()


def current() -> Processes:
    """The processes of the context that this is called in; outside of one, this process alone.

    ProcessesError outside of one where JAX has joined others: nobody would know who writes what.
    """
    if _current.count == 1 and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ProcessesError(
            f"JAX has joined {jax.process_count()} processes by itself: legal is `with distributed.join():` "
            "in place of jax.distributed.initialize()"
        )
    return _current


def join(
    given: Mapping[str, str | None] = {},
    *,
    known: tuple[type[BaseException], ...] = (),
    timing: Timing = USUAL,
) -> Processes:
    """Come together with the other processes of this job, before JAX has looked for devices; alone if there are none.

    given: flags, see `environment`. known: errors whose text says it all; others are shown with their traceback.
    Raises ProcessesError for a job that cannot be told, or whose processes do not all come in `timing.join` seconds.
    """
    place = find(given)
    if place.count == 1:
        return Processes()
    link = Link(place, timing)
    link.come()
    _before_abort()
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    try:
        jax.distributed.initialize(
            place.coordinator, place.count, place.index, place.devices, cluster_detection_method="deactivate",
            initialization_timeout=int(timing.join), heartbeat_timeout_seconds=2 * int(timing.silence) + 10,
            shutdown_timeout_seconds=SHUTDOWN,
        )  # fmt: skip
    except Exception as error:
        link.fail(f"process {place.index} (host {link.hosts[place.index]}): {error}")
        raise
    print(f"process {place.index} of {place.count} on {link.hosts[place.index]}", file=sys.stderr, flush=True)
    return Processes(place, link, known=known)


def report(given: Mapping[str, str | None], text: str, timing: Timing = USUAL) -> None:
    """End the other processes with what keeps this one from joining them. Nothing where there are none."""
    place = find(given)
    if place.count > 1:
        Link(place, timing).fail(f"process {place.index}: {text}")


def _before_abort() -> None:
    """JAX's client aborts the process as soon as it has lost process 0, before anybody can say so. Let the thread that
    aborts sleep first: a handler is given the number of its signal, and `sleep` sleeps as many seconds, six."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def whole(array: Any) -> np.ndarray:
    """An array on the host, gathered from all processes if it lies over them; then all must call this."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
