"""A process's connection to the hub: it comes, waits for the others, hears what ends all, and says what ends it."""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from trillion_moe.distributed.environment import Place, ProcessesError
from trillion_moe.distributed.hub import BEAT, TOLD, Hub, Lines, Timing, send

ENDED = 1  # exit code of a process that ends because another one has
RETRY = 0.2  # seconds between two attempts to reach a hub that is not there yet


class Link:
    """Of one process; its thread hears the hub. Where another process ends the run, it says why on standard error and
    ends this process at once, whatever that is waiting for: the interpreter's own way out waits for those that died."""

    def __init__(self, place: Place, timing: Timing):
        self.place, self.timing = place, timing
        self.hosts: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._gone: dict[str, Mapping[str, Any]] = {}
        self._end: Mapping[str, Any] | None = None
        self._failing = self._left = False
        if place.index == 0:
            Hub(_listen(place), place.count, timing).start()
        self._connection = _reach(place, timing)
        hello = {"hello": place.index, "count": place.count, "host": socket.gethostname()}
        send(self._connection, hello)
        threading.Thread(target=self._hear, name="link", daemon=True).start()

    def come(self) -> None:
        """Wait for all to have come, which the hub limits."""
        with self._changed:
            self._changed.wait_for(lambda: self.hosts)

    def gather(self, what: str, value: Any) -> dict[int, Any]:
        """Wait for all at one point -> the values of process 0 and of those that have another one."""
        send(self._connection, {"at": what, "value": value})
        with self._changed:
            self._changed.wait_for(lambda: what in self._gone)
            return {int(index): value for index, value in self._gone.pop(what).items()}

    def fail(self, text: str) -> None:
        """Tell all to end with this; returns when they have heard it. The caller says it too, and ends."""
        self._failing = True
        send(self._connection, {"failed": text})
        self._await_end(TOLD + (self.timing.join if not self.hosts else TOLD))

    def await_verdict(self, seconds: float) -> None:
        """Let the hub say first what is wrong: then the thread ends this process, and this does not return."""
        if self._await_end(seconds):
            time.sleep(TOLD)

    def _await_end(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._end is not None, seconds)

    def leave(self) -> None:
        """What ends from here on is nothing to speak of."""
        self._left = True
        send(self._connection, {"left": True})

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        lines, heard, beat = Lines(self._connection), time.monotonic(), 0.0
        while True:
            ready, _, _ = select.select([self._connection], [], [], BEAT / 2)
            now = time.monotonic()
            if ready:
                messages, heard = lines.read(), now
                if messages is None:
                    self._stop({"end": self._lost("its connection has ended"), "by": None})
                    return
                for message in messages:
                    self._take(message)
            if now - heard > self.timing.silence:
                self._stop({"end": self._lost(f"nothing has come for {self.timing.silence:g} s"), "by": None})
            if now - beat > BEAT:
                beat = now
                send(self._connection, None)

    def _lost(self, why: str) -> str:
        host = self.hosts[0] if self.hosts else self.place.host
        return f"process 0 (host {host}) is missing: {why}"

    def _take(self, message: Mapping[str, Any]) -> None:
        if "say" in message:
            print(f"process {self.place.index}: {message['say']}", file=sys.stderr, flush=True)
        elif "end" in message:
            self._stop(message)
        with self._changed:
            if "hosts" in message:
                self.hosts = tuple(message["hosts"])
            elif "go" in message:
                self._gone[message["go"]] = message["values"]
            self._changed.notify_all()

    def _stop(self, end: Mapping[str, Any]) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()
        if not self._failing and not self._left:
            leave_at_once(f"process {self.place.index} ends: {end['end']}", ENDED)


def leave_at_once(text: str, code: int) -> None:
    """End this process without what Python and JAX do at the end, which waits for processes that are no more."""
    try:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _listen(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", place.port - 1), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", place.port - 1))
    except OSError as error:
        text = f"port {place.port - 1}, before the coordinator's {place.port}, cannot be had: {error}; choose another"
        raise ProcessesError(text) from error


def _reach(place: Place, timing: Timing) -> socket.socket:
    """A connection to the hub, which may not be there yet. Process 0 need not know its own name."""
    where = "127.0.0.1" if place.index == 0 else place.host, place.port - 1
    until = time.monotonic() + timing.join
    while True:
        try:
            connection = socket.create_connection(where, timeout=TOLD)
        except OSError as error:
            if time.monotonic() > until:
                text = f"process 0 is missing: {where[0]}:{where[1]} not reached in {timing.join:g} s: {error}"
                raise ProcessesError(text) from None
            time.sleep(RETRY)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
