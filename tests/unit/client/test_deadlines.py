import asyncio
import socket
import subprocess
import sys
import threading
import time

import pytest
from fastapi.responses import PlainTextResponse

from rollout.client import AsyncRolloutClient, RolloutClient, Timeouts
from rollout.client.errors import ServerError, ServerTimeout, ServerUnreachable
from rollout.core.errors import BadRequest
from tests.canned_server import CannedServer, serving


@pytest.fixture
def nobody():
    """The URL of a port on which nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture
def silent():
    """The URL of a server that accepts and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_nobody_there_is_said_clearly(nobody):
    at_once = Timeouts(retry=0)

    async def use(call):
        async with AsyncRolloutClient(nobody, timeouts=at_once) as client:
            return await call(client)

    with RolloutClient(nobody, timeouts=at_once) as client:
        for call in (lambda c: c.generate("hi"), lambda c: c.model_info()):
            with pytest.raises(ServerUnreachable, match=f"no server answers at {nobody}"):
                call(client)
            with pytest.raises(ServerUnreachable, match=f"no server answers at {nobody}"):
                asyncio.run(use(call))
        with pytest.raises(ServerUnreachable):
            next(client.stream("hi"))
        assert client.health() is False
    assert asyncio.run(use(lambda c: c.health())) is False


def test_every_wait_has_a_deadline(silent):
    timeouts = Timeouts(connect=0.3, control=0.3, generate=0.3, weights=0.3)
    with RolloutClient(silent, timeouts=timeouts) as client:
        started = time.monotonic()
        for call in (
            lambda c: c.model_info(),
            lambda c: c.pause(),
            lambda c: c.end_weight_update(),
            lambda c: c.generate("hi"),
            lambda c: next(c.stream("hi")),
        ):
            with pytest.raises(ServerTimeout, match=r"no answer within 0\.3 s"):
                call(client)
        assert client.health(0.2) is False
        with pytest.raises(ServerTimeout, match=r"within 0\.1 s"):
            client.generate("hi", timeout=0.1)
        assert time.monotonic() - started < 10


def test_a_connection_that_breaks_is_said_clearly():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)

        def hang_up():
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with (
            RolloutClient(f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
            pytest.raises(ServerUnreachable, match="the connection broke"),
        ):
            client.generate("hi")
        thread.join(10)


def test_waiting_for_a_server_that_starts():
    countdown = iter(range(5))
    canned = CannedServer({"/health": lambda body: PlainTextResponse("", 503 if next(countdown) < 3 else 200)})
    with serving(canned) as url, RolloutClient(url) as client:
        client.wait_until_ready(timeout=10, poll=0.01)
    assert len(canned.asked) == 4


def test_waiting_without_blocking_the_event_loop():
    countdown = iter(range(100))
    canned = CannedServer({"/health": lambda body: PlainTextResponse("", 503 if next(countdown) < 3 else 200)})

    async def use(url):
        async with AsyncRolloutClient(url) as client:
            await asyncio.gather(*(client.wait_until_ready(timeout=10, poll=0.05) for _ in range(3)))

    with serving(canned) as url:
        asyncio.run(asyncio.wait_for(use(url), 20))


def test_waiting_ends_at_the_deadline(nobody):
    started = time.monotonic()
    with RolloutClient(nobody) as client, pytest.raises(ServerTimeout, match="not ready within"):
        client.wait_until_ready(timeout=0.3, poll=0.05)

    async def use():
        async with AsyncRolloutClient(nobody) as client:
            await client.wait_until_ready(timeout=0.3, poll=0.05)

    with pytest.raises(ServerTimeout, match="not ready within"):
        asyncio.run(use())
    assert time.monotonic() - started < 5


def test_a_health_check_that_is_refused_is_not_mistaken_for_starting():
    canned = CannedServer({"/health": PlainTextResponse("", 404)})
    with serving(canned) as url, RolloutClient(url) as client, pytest.raises(ServerError):
        client.wait_until_ready(5)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://", "", "http://[::"])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(BadRequest):
        RolloutClient(url)


def test_arguments_that_json_cannot_hold_are_refused():
    with RolloutClient() as client:
        for params in ({"temperature": float("nan")}, {"stop": {1, 2}}):
            with pytest.raises(BadRequest, match="cannot be sent as JSON"):
                client.generate("hi", sampling_params=params)


HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "zmq", "pydantic")


@pytest.mark.parametrize(
    "module", ["rollout.client", "rollout.client.brackets", "capture.codec", "capture.routed_experts"]
)
def test_the_client_loads_neither_torch_nor_transformers(module):
    code = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")


def test_using_the_client_loads_no_torch_either():
    """This holds with routes in answers, and with routes in requests."""
    code = f"""
import sys, base64, numpy as np
from capture.codec import encode_compact
from capture.routed_experts import RoutedExperts
from rollout.client import RolloutClient, RolloutFleet
from rollout.client.generation import generate_body, parse_output
routes = RoutedExperts(np.zeros((2, 1, 1), np.uint8), 4, (0,), 1)
generate_body("x", {{"replay_routed_experts": routes}})
meta = {{"id": "r", "finish_reason": None, "routed_experts": base64.b64encode(encode_compact(routes)).decode(),
        "routed_experts_format": "compact"}}
parse_output({{"output_ids": [1], "meta_info": meta}}, {{}}, None).routed_experts.signed_ids()
RolloutClient().close()
print(*(m for m in {HEAVY} if m in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")
