"""Peers that take the connection and say nothing, or nonsense."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from tests.abuse.registry import KEYED, OPEN, RANKS, attack
from tests.abuse.server import Victim

MARGIN_S = 6.0
"""Seconds that an answer may take beyond `--weight-update-timeout`."""
TOLD_S = 10.0
"""Further seconds in which the server may notify its peer that the call is over."""
ANSWERS = (b"", b"\x00" * 4096, None)
"""Answers of a rendezvous master to each connection; None: it closes the connection."""


@attack(OPEN, KEYED, RANKS, seconds=90.0, quick=True)
def a_rendezvous_master_that_says_nothing(victim: Victim) -> str:
    """Send the server to a silent rendezvous master: the verb ends at its deadline, and other verbs do not wait."""
    limit = victim.setup.settings["weight_update_timeout"]
    for answer in ANSWERS:
        with _listener(answer) as port:
            body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            started = time.monotonic()
            thread = threading.Thread(target=victim.call, args=("POST", "/init_weights_update_group", body))
            thread.start()
            time.sleep(0.3)
            _prompt(victim, "/abort_request", rid="nobody")
            _prompt(victim, "/pause_generation", mode="in_place")
            thread.join(limit + MARGIN_S)
            if thread.is_alive():
                victim.complain(f"the group: no answer {time.monotonic() - started:.1f} s after a silent master's call")
                thread.join()
        victim.right("POST", "/continue_generation", {})
        victim.right("POST", "/weights_checker", {"action": "checksum"})
    return "silent, senseless, closing"


@attack(OPEN, RANKS, seconds=90.0)
def a_parameter_server_that_says_nothing(victim: Victim) -> str:
    """Send the server to silent or senseless ZMQ peers: the call ends by itself, and others do not wait."""
    limit = victim.setup.settings["weight_update_timeout"] + TOLD_S
    for said in (None, b"\xff" * 1000, b'{"shm_name": "nowhere", "nbytes": 1e300}'):
        with _zmq_peer(victim.folder / "peer", said) as address, _call_for(victim, address) as thread:
            _prompt(victim, "/abort_request", rid="nobody")
            thread.join(limit + MARGIN_S)
            if thread.is_alive():
                victim.complain(f"a peer that says {said and said[:10]!r}: no answer {limit + MARGIN_S:g} s later")
    victim.right("POST", "/weights_checker", {"action": "checksum"})
    return "silent, senseless, absurd"


@attack(OPEN, RANKS, seconds=60.0)
def an_abort_ends_the_wait_for_a_silent_peer(victim: Victim) -> str:
    """Abort an update whose peer is silent: its call ends long before its deadline."""
    with _zmq_peer(victim.folder / "peer", None) as address, _call_for(victim, address) as thread:
        started = time.monotonic()
        victim.post("/abort_weight_update")
        thread.join()
        seconds = time.monotonic() - started
        if seconds > 1.0:
            victim.complain(f"the call ended {seconds:.1f} s after the abort")
    return f"{seconds:.2f} s"


@contextlib.contextmanager
def _call_for(victim: Victim, address: str) -> Iterator[threading.Thread]:
    """Start a call of /update_weights_from_ipc in a thread, and join the thread at the end."""
    body = {"zmq_handles": dict.fromkeys(("cpu", "CPU-0"), address)}
    thread = threading.Thread(target=victim.call, args=("POST", "/update_weights_from_ipc", body))
    thread.start()
    time.sleep(0.3)
    try:
        yield thread
    finally:
        thread.join()


def _prompt(victim: Victim, path: str, **body: str) -> None:
    """Call a verb, and complain if it waits for the one that is under way."""
    started = time.monotonic()
    victim.post(path, **body)
    seconds = time.monotonic() - started
    if seconds > 1.0:
        victim.complain(f"{path} took {seconds:.1f} s while another verb waited for its peer")


@contextlib.contextmanager
def _listener(answer: bytes | None) -> Iterator[int]:
    """Open a port and send `answer` to each connection, or close it at once if `answer` is None."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    one, _ = listener.accept()
                    accepted.append(one)
                    if answer is None:
                        one.close()
                    else:
                        one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()
            for one in accepted:
                one.close()


@contextlib.contextmanager
def _zmq_peer(path: Path, said: bytes | None) -> Iterator[str]:
    """Bind a peer to an address of its own.  It sends the given bytes once the server has connected, or nothing."""
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDTIMEO, 100)
        address = f"ipc://{path}-{time.monotonic_ns()}"
        peer.bind(address)
        if said is not None:
            threading.Thread(target=_say, args=(peer, said), daemon=True).start()
        yield address
        time.sleep(0.2)


def _say(peer: zmq.Socket, said: bytes) -> None:
    for _ in range(10):
        with contextlib.suppress(zmq.ZMQError):
            peer.send(said)
            return
        time.sleep(0.05)
