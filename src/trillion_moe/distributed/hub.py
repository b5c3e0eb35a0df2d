"""What process 0 keeps for all: who is there, who waits for whom, and what ends them all.

Every process, 0 too, holds one connection to the hub. JSON by lines:

    to the hub      {"hello": index, "count": processes, "host": name}, first
                    {"at": what, "value": v}   waits until all are there
                    {"failed": text}           all shall end, with this
                    {"left": true}             ends as it should
    from the hub    {"hosts": [...]}           all have come
                    {"go": what, "values": {index: v}}   all are there; v of process 0, and those that differ from it
                    {"say": text}              who is waited for, to the first that waits
                    {"end": text, "by": index or null}

An empty line says that its sender runs. A connection that ends without "left" is a process that has died; one on which
nothing comes is a process that is stopped, or a host that is gone.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BEAT = 1.0  # seconds between two empty lines
TOLD = 5.0  # seconds that the others have to end before process 0, which tells them, does


@dataclass(frozen=True)
class Timing:
    """Seconds. silence: after which a process from which nothing comes counts as stopped. join: for all to come.
    wait: for all to reach one point. say: from which on, and how often, it is said who is waited for."""

    silence: float = 60.0
    join: float = 300.0
    wait: float = 3600.0
    say: float = 20.0


def send(connection: socket.socket, message: Mapping[str, Any] | None) -> None:
    """One line; None is the empty one. A connection that is gone is found where it is read."""
    try:
        connection.sendall((b"" if message is None else json.dumps(message).encode()) + b"\n")
    except OSError:
        return


class Lines:
    """What comes over a connection, by lines."""

    def __init__(self, connection: socket.socket):
        self.connection, self._rest = connection, b""

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come, without empty ones; None once the connection has ended. Waits for some bytes."""
        try:
            new = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not new:
            return None
        *lines, self._rest = (self._rest + new).split(b"\n")
        try:
            found = [json.loads(line) for line in lines if line]
        except ValueError:  # some other program's
            return None
        return found if all(isinstance(message, dict) for message in found) else None


@dataclass
class _Member:
    host: str
    lines: Lines
    seen: float
    at: str | None = None
    value: Any = None
    left: bool = False
    told: bool = False


@dataclass
class Hub:
    """Runs in a thread of process 0, on the given listening socket, until all have left or have been told to end."""

    listener: socket.socket
    count: int
    timing: Timing
    members: dict[int, _Member] = field(default_factory=dict)
    complete: bool = False
    end: Mapping[str, Any] | None = None

    def start(self) -> None:
        self._strangers: dict[socket.socket, Lines] = {}
        self._started = self._began = self._said = time.monotonic()  # began, said: of the wait at hand
        self._ended = 0.0
        self._beat = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="hub", daemon=True).start()

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # whatever has happened: the others see that there is no hub any more
            for connection in (self.listener, *self._strangers, *(m.lines.connection for m in self.members.values())):
                connection.close()
            self._selector.close()

    def _serve(self) -> None:
        while not self._over():
            for key, _ in self._selector.select(BEAT / 2):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.data is None:
                    self._greet(self._strangers[key.fileobj])  # type: ignore[index]
                else:
                    self._hear(key.data)
            self._beats()
            if self.end is None:
                self._look()

    def _over(self) -> bool:
        if self.end is None:
            return self.complete and all(member.left for member in self.members.values())
        if all(m.told for i, m in self.members.items() if i) and (self.complete or len(self.members) == self.count):
            self._tell(0)
            return True
        # Those that have not come yet are told when they come; who has been told, and does not end, is left.
        now = time.monotonic()
        late = now - self._ended > TOLD and (self.complete or now - self._started > self.timing.join)
        if late:
            self._tell(0)
        return late

    # --- what comes ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.settimeout(TOLD)
        # What waits for an acknowledgement is dropped where a connection is closed with a beat unread in it: the end.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._strangers[connection] = Lines(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _greet(self, lines: Lines) -> None:
        messages = lines.read()
        if messages == []:
            return
        del self._strangers[lines.connection]
        hello = messages[0] if messages else {}
        if hello.keys() != {"hello", "count", "host"}:  # whoever that is
            self._drop(lines.connection)
            return
        index, host = hello["hello"], hello["host"]
        if hello["count"] != self.count or index in self.members:
            wrong = f"{self.name(index)} is there already" if index in self.members else f"process 0 of {self.count}"
            text = f"process {index} of {hello['count']} on {host} has come, but {wrong}"
            send(lines.connection, {"end": text, "by": None})
            self._drop(lines.connection)
            self._finish(text)
            return
        self.members[index] = _Member(host, lines, time.monotonic())
        self._selector.modify(lines.connection, selectors.EVENT_READ, index)
        if self.end is not None:
            self._tell(index)
        elif len(self.members) == self.count:
            self.complete = True
            self._all({"hosts": [self.members[i].host for i in range(self.count)]})
        for message in messages[1:] if messages else ():
            self._take(index, message)

    def _hear(self, index: int) -> None:
        member = self.members[index]
        messages = member.lines.read()
        if messages is None:
            self._drop(member.lines.connection)
            if not member.left and self.end is None:
                self._missing([index], "its connection has ended")
            member.left = member.told = True  # its connection is closed
            return
        member.seen = time.monotonic()
        for message in messages:
            self._take(index, message)

    def _take(self, index: int, message: Mapping[str, Any]) -> None:
        member = self.members[index]
        if "failed" in message and self.end is None:
            self._finish(str(message["failed"]), by=index)
        elif "left" in message:
            member.left = True
        elif "at" in message and self.end is None:
            if not self._waiting():
                self._began = self._said = time.monotonic()
            member.at, member.value = message["at"], message["value"]
            self._go()

    # --- who waits for whom -------------------------------------------------------------------------------------------

    def _waiting(self) -> list[int]:
        return sorted(i for i, member in self.members.items() if member.at is not None)

    def _go(self) -> None:
        """All on, once all are there; an end where they are not at the same."""
        waiting = self._waiting()
        if len(waiting) < self.count:
            return
        points = {member.at for member in self.members.values()}
        if len(points) > 1:
            where = "; ".join(f"{self.name(i)} is at {self.members[i].at}" for i in waiting)
            self._finish(f"the processes are out of step: {where}")
            return
        first = self.members[0].value
        values = {i: self.members[i].value for i in waiting if not i or self.members[i].value != first}
        for member in self.members.values():
            member.at = None
        self._all({"go": points.pop(), "values": values})

    def _look(self) -> None:
        """Whose silence, or whose absence, has lasted too long; who waits for whom."""
        now = time.monotonic()
        silent = [i for i, m in self.members.items() if not m.left and now - m.seen > self.timing.silence]
        if silent:
            for index in silent:
                self.members[index].told = True  # it will not say that it has heard
            self._missing(silent, f"nothing has come for {self.timing.silence:g} s")
        elif not self.complete:
            self._patient(sorted({*range(self.count)} - self.members.keys()), "start", self.timing.join)
        elif waiting := self._waiting():
            point = self.members[waiting[0]].at
            self._patient([i for i in range(self.count) if i not in waiting], str(point), self.timing.wait)

    def _patient(self, absent: Sequence[int], point: str, limit: float) -> None:
        now = time.monotonic()
        if now - self._began > limit:
            self._missing(absent, f"{point} not reached in {limit:g} s")
        elif now - self._said > self.timing.say and (present := sorted(self.members.keys() - {*absent})):
            self._said = now
            text = f"waiting on {point} of {self.names(absent)} for {now - self._began:.0f} s"
            send(self.members[present[0]].lines.connection, {"say": text})

    # --- what goes out ------------------------------------------------------------------------------------------------

    def name(self, index: int) -> str:
        return f"process {index}" + (f" (host {self.members[index].host})" if index in self.members else "")

    def names(self, indices: Sequence[int]) -> str:
        if len(indices) == 1:
            return self.name(indices[0])
        hosts = [self.members[i].host for i in indices if i in self.members]
        return f"processes {', '.join(map(str, indices))}" + (f" (hosts {', '.join(hosts)})" if hosts else "")

    def _missing(self, indices: Sequence[int], why: str) -> None:
        self._finish(f"{self.names(indices)} {'is' if len(indices) == 1 else 'are'} missing: {why}")

    def _finish(self, text: str, by: int | None = None) -> None:
        """Tell all to end: process 0 last, whose end is the hub's."""
        self.end, self._ended = {"end": text, "by": by}, time.monotonic()
        for index in self.members:
            if index:
                self._tell(index)

    def _tell(self, index: int) -> None:
        if index in self.members:
            send(self.members[index].lines.connection, self.end)

    def _all(self, message: Mapping[str, Any] | None) -> None:
        for member in self.members.values():
            if not member.told:
                send(member.lines.connection, message)

    def _beats(self) -> None:
        if time.monotonic() - self._beat > BEAT:
            self._beat = time.monotonic()
            self._all(None)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
