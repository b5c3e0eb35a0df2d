"""The hub, spoken to over sockets: who is waited for, what ends a run and whom it names. Limits are short here."""

import contextlib
import json
import socket
import threading
import time

import pytest

from trillion_moe.distributed import Place, Processes, ProcessesError, Timing
from trillion_moe.distributed.hub import Hub
from trillion_moe.distributed.link import Link

QUICK = Timing(60.0, 60.0, 60.0, 60.0)


class Peer:
    """A process as the hub sees it: what it says, and the next message it is told. It says nothing by itself."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.file = self.socket.makefile("r")

    def say(self, **message) -> "Peer":
        self.socket.sendall(json.dumps(message).encode() + b"\n")
        return self

    def told(self) -> dict:
        while (line := self.file.readline()) == "\n":
            pass
        return json.loads(line)

    def ended(self) -> bool:
        return not any(line.strip() for line in self.file)

    def beat(self) -> None:
        self.socket.sendall(b"\n")


@pytest.fixture
def hub():
    """Starts the hub of so many processes -> what makes a peer; all are closed behind the test."""
    with contextlib.ExitStack() as stack:

        def hub(count: int, timing: Timing = QUICK):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            Hub(listener, count, timing).start()

            def peer(index: int | None = None, host: str = "", count: int = count) -> Peer:
                peer = Peer(listener.getsockname()[1])
                stack.callback(peer.socket.close)
                return peer if index is None else peer.say(hello=index, count=count, host=host or f"h{index}")

            return peer

        yield hub


@pytest.fixture
def three(hub) -> list[Peer]:
    return together(hub(3))


def together(peer, count: int = 3) -> list[Peer]:
    peers = [peer(i) for i in range(count)]
    assert [one.told() for one in peers] == [{"hosts": [f"h{i}" for i in range(count)]}] * count
    return peers


def test_all_go_on_together(three) -> None:
    """With the value of process 0 and those that differ from it; a point may be used again."""
    for values, seen in (((5, 5, 5), {"0": 5}), ((None, 7, None), {"0": None, "1": 7})):
        three[2].say(at="here", value=values[2])
        three[0].say(at="here", value=values[0])
        three[1].say(at="here", value=values[1])
        assert [peer.told() for peer in three] == [{"go": "here", "values": seen}] * 3


def test_who_dies_is_named(three) -> None:
    three[0].say(at="here", value=None)
    three[2].socket.close()
    three[2].file.close()
    end = {"end": "process 2 (host h2) is missing: its connection has ended", "by": None}
    assert three[1].told() == end
    three[1].socket.shutdown(socket.SHUT_RDWR)  # process 0, whose end is the hub's, is told when the others have ended
    assert three[0].told() == end


def test_who_leaves_is_not_missed(three) -> None:
    for peer in (three[1], three[2]):
        peer.say(left=True).socket.shutdown(socket.SHUT_RDWR)
    time.sleep(0.7)
    three[0].say(left=True).socket.shutdown(socket.SHUT_WR)
    assert three[0].ended()


def test_who_is_silent_is_named(hub) -> None:
    three = together(hub(3, Timing(silence=2.0)))
    began = time.monotonic()
    for _ in range(12):
        for i in (0, 1):
            three[i].beat()
        time.sleep(0.25)
    end = {"end": "process 2 (host h2) is missing: nothing has come for 2 s", "by": None}
    assert three[1].told() == end
    assert time.monotonic() - began < 5


def test_who_fails_says_why(three) -> None:
    three[1].say(failed="process 1 (host h1): bad row 3")
    end = {"end": "process 1 (host h1): bad row 3", "by": 1}
    assert [three[1].told(), three[2].told()] == [end] * 2
    for peer in three[1:]:
        peer.socket.shutdown(socket.SHUT_RDWR)
    assert three[0].told() == end


def test_a_failure_before_all_have_come(hub) -> None:
    """Who comes later is told at once."""
    peer = hub(3)
    zero = peer(0).say(failed="no such flag")
    late = [peer(1), peer(2)]
    assert [one.told() for one in late] == [{"end": "no such flag", "by": 0}] * 2
    for one in late:
        one.socket.shutdown(socket.SHUT_RDWR)
    assert zero.told() == {"end": "no such flag", "by": 0}


def test_who_is_waited_for(hub) -> None:
    """The first that waits is told, again and again, and in the end all are."""
    three = together(hub(3, Timing(wait=3.2, say=0.6)))
    three[1].say(at="compile", value=None)
    said = three[1].told()["say"]
    assert said.startswith("waiting on compile of processes 0, 2 (hosts h0, h2) for ")
    three[0].say(at="compile", value=None)
    said = three[0].told()["say"]
    assert said.startswith("waiting on compile of process 2 (host h2) for ")
    assert three[1].told()["end"] == "process 2 (host h2) is missing: compile not reached in 3.2 s"


def test_who_does_not_come(hub) -> None:
    peer = hub(3, Timing(join=1.6, say=0.6))
    one = peer(1)
    assert one.told()["say"].startswith("waiting on start of processes 0, 2 for ")
    assert one.told()["end"] == "processes 0, 2 are missing: start not reached in 1.6 s"


def test_out_of_step(three) -> None:
    for i, at in enumerate(("update 3", "update 3", "end")):
        three[i].say(at=at, value=None)
    said = "the processes are out of step: process 0 (host h0) is at update 3; process 1 (host h1) is at update 3; "
    assert three[1].told()["end"].startswith(said)


@pytest.mark.parametrize(
    ("index", "count", "said"),
    [
        (1, 3, "process 1 of 3 on other has come, but process 1 (host h1) is there already"),
        (2, 4, "process 2 of 4 on other has come, but process 0 of 3"),
    ],
)
def test_who_is_no_process_of_this_run(hub, index: int, count: int, said: str) -> None:
    peer = hub(3)
    one = peer(1)
    time.sleep(0.2)
    assert peer(index, "other", count).told() == {"end": said, "by": None}
    assert one.told()["end"] == said


def test_strangers(hub) -> None:
    """What is not of ours is shut out and changes nothing, nor does a process that comes in pieces."""
    peer = hub(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": 1}\n', b"\xff\xfe\n"):
        stranger = peer()
        stranger.socket.sendall(text)
        assert stranger.ended()
    one = peer()
    for part in (b'{"hello": 1, "cou', b'nt": 2, "host": "h1"}\n{"at": "x", "value": 1}\n'):
        one.socket.sendall(part)
        time.sleep(0.1)
    zero = peer(0).say(at="x", value=1)
    assert [one.told(), one.told()] == [{"hosts": ["h0", "h1"]}, {"go": "x", "values": {"0": 1}}]
    assert zero.told() == {"hosts": ["h0", "h1"]}


def test_links_and_processes() -> None:
    """Three processes as threads: values gathered, and what must be the same named by name and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = {}

    def one(index: int) -> None:
        place = Place(index, 3, f"127.0.0.1:{port + 1}")
        link = Link(place, QUICK)
        link.come()
        processes = Processes(place, link)
        for step in range(3):
            found[index, step] = processes.gather(f"update {step}", 15 if (index, step) == (2, 1) else None)
        processes.same("data", {"data": "a", "held out": "b"})
        try:
            processes.same("data", {"data": "a", "held out": "b" if index != 1 else "c"})
        except ProcessesError as error:
            found[index] = str(error)
        try:
            processes.same("configuration", {"lora": None} if index == 0 else {"lora.rank": None})
        except ProcessesError as error:
            found[index, "names"] = str(error)
        processes.wait("end")
        link.leave()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for i in range(3):
        assert [found[i, step] for step in range(3)] == [{0: None}, {0: None, 2: 15}, {0: None}]
        host = socket.gethostname()
        assert found[i] == (
            f"the data of all processes must be the same: held out is 'c' in process 1 (host {host}), 'b' in process 0"
        )
        assert (
            f"lora is not there in process 1 (host {host}), None in process 0; "
            f"lora.rank is None in process 1 (host {host}), not there in process 0;"
        ) in found[i, "names"]
