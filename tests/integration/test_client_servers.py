"""Client and fleet against real servers: cancellation, interrupted samples, pauses, refreshes, a killed engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from rollout.client import (
    AsyncRolloutClient,
    AsyncRolloutFleet,
    FleetPolicy,
    GenerationOutput,
    RolloutClient,
    RolloutFleet,
    ServerUnreachable,
)
from tests.model_zoo import stored_tensors, tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

PROMPT = "What is 12 + 30? Answer:"
GREEDY = {"max_new_tokens": 3000, "temperature": 0.0, "ignore_eos": True}
RECORDS: dict[str, Any] = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "return_routed_experts": True,
    "return_prompt_token_ids": True,
}
ENDLESS = {"max_new_tokens": 12_000, "temperature": 1.0, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"enable_return_routed_experts": True, "max_total_tokens": 70_000, "num_threads": 1}
QUICK = FleetPolicy(check_every_s=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, context_length=16_384, vocab_size=384
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def second(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, **SETTINGS) as running:
        yield running


def until(is_so: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def num_running(server: ServerProcess) -> int:
    load = server.client.loads()
    text = str(load)
    (one,) = load["loads"]
    assert "num_running_reqs" in one, text
    return one["num_running_reqs"] + one["num_waiting_reqs"]


def one(output: GenerationOutput | list[GenerationOutput]) -> GenerationOutput:
    assert isinstance(output, GenerationOutput)
    return output


# --- cancellation ------------------------------------------------------------------------------------------------


def test_cancelling_a_task_aborts_on_the_server(server: ServerProcess) -> None:
    async def use() -> None:
        async with AsyncRolloutClient(server.url) as client:
            single = asyncio.create_task(client.generate(PROMPT, sampling_params=ENDLESS))
            many = client.generate_many([PROMPT] * 30, concurrency=7, sampling_params=ENDLESS)
            first = asyncio.ensure_future(anext(many))
            await asyncio.to_thread(until, lambda: num_running(server) == 8)
            single.cancel()
            await asyncio.to_thread(until, lambda: num_running(server) == 7)
            first.cancel()
            await asyncio.gather(single, first, return_exceptions=True)
            await many.aclose()
            await asyncio.to_thread(until, lambda: num_running(server) == 0)

    asyncio.run(use())


def test_leaving_a_stream_or_an_iterator_aborts_on_the_server(server: ServerProcess) -> None:
    with RolloutClient(server.url) as client:
        with contextlib.closing(client.stream(PROMPT, sampling_params=ENDLESS)) as stream:
            next(stream)
            assert num_running(server) == 1
        until(lambda: num_running(server) == 0)
        requests = [{"prompt": PROMPT, "sampling_params": {"max_new_tokens": 1}}] + [PROMPT] * 20
        for index, _ in client.generate_many(requests, concurrency=5, sampling_params=ENDLESS):
            assert index == 0
            break
        until(lambda: num_running(server) == 0)


CTRL_C = """
import sys
from rollout.client import RolloutClient
params = {"max_new_tokens": 12000, "ignore_eos": True}
with RolloutClient(sys.argv[1]) as client:
    print("begun", flush=True)
    try:
        if sys.argv[2] == "many":
            list(client.generate_many(["a"] * 50, concurrency=6, sampling_params=params))
        else:
            client.generate("a", sampling_params=params)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()  # the process lives on: the server must not learn it from our end
"""


@pytest.mark.parametrize(("how", "count"), [("one", 1), ("many", 6)])
def test_ctrl_c_aborts_on_the_server(server: ServerProcess, how: str, count: int) -> None:
    command = [sys.executable, "-c", CTRL_C, server.url, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "begun\n"
            until(lambda: num_running(server) == count)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            until(lambda: num_running(server) == 0)
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


# --- interrupted samples -----------------------------------------------------------------------------------------


def same_record(joined: GenerationOutput, whole: GenerationOutput) -> None:
    assert joined.output_ids == whole.output_ids
    assert joined.text == whole.text
    assert joined.logprobs == whole.logprobs
    assert joined.token_logprobs == whole.token_logprobs
    assert joined.top_logprobs == whole.top_logprobs
    assert joined.weight_versions == whole.weight_versions
    assert joined.routed_experts == whole.routed_experts
    assert joined.finish_reason == whole.finish_reason
    assert (joined.prompt_tokens, joined.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(
    "sampling", [GREEDY, GREEDY | {"temperature": 1.0, "sampling_seed": -7, "min_new_tokens": 2990, "top_p": 0.95}]
)
def test_an_interrupted_sample_is_the_sample(server: ServerProcess, start: int, sampling: dict[str, Any]) -> None:
    """Pauses abort it again and again; resumed, it is token for token and row for row what it had been."""
    options: Any = {"sampling_params": sampling, **RECORDS, "routed_experts_start_len": start}
    with RolloutClient(server.url) as client:
        whole = one(client.generate(PROMPT, **options))
        interruptions = 0
        stop = threading.Event()

        def interrupt() -> None:
            while not stop.is_set():
                if num_running(server):
                    with server.client.paused("abort"):
                        pass
                time.sleep(0.05)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            output = one(client.generate(PROMPT, **options))
            while output.finish_reason is not None and output.finish_reason.type == "abort":
                interruptions += 1
                if interruptions == 6:
                    stop.set()
                output = client.resume(output, **options)
        finally:
            stop.set()
            thread.join(20)
    assert interruptions > 1
    same_record(output, whole)
    assert output.routed_experts is not None and output.prompt_tokens is not None
    assert len(output.routed_experts) == output.prompt_tokens + len(output.output_ids) - 1 - start


def test_a_pause_ends_with_its_block(server: ServerProcess) -> None:
    def is_paused() -> bool:
        return server.http.get("/is_paused").json()["is_paused"]

    with pytest.raises(ZeroDivisionError), server.client.paused():
        assert is_paused()
        raise ZeroDivisionError
    assert not is_paused()

    async def use() -> None:
        async with AsyncRolloutClient(server.url) as client:
            async with client.paused("in_place"):
                assert await asyncio.to_thread(is_paused)
            with pytest.raises(ZeroDivisionError):
                async with client.paused():
                    raise ZeroDivisionError

    asyncio.run(use())
    assert not is_paused()


# --- fleets ------------------------------------------------------------------------------------------------------


def payload(folder: Path, scale: float = 1.0) -> list[bytes]:
    return [safetensors.torch.save({name: tensor * scale for name, tensor in stored_tensors(folder).items()})]


def test_a_weight_update_is_on_all_engines_or_none(server: ServerProcess, second: ServerProcess, folder: Path) -> None:
    def versions() -> list[str]:
        return [each.client.weight_version() for each in (server, second)]

    with RolloutFleet([server.url, second.url], policy=QUICK) as fleet:
        with fleet.weight_transaction("7") as update:
            update.send("update_weights_from_tensor", serialized_named_tensors=payload(folder), format="safetensors")
            assert versions() == ["default", "default"]
        assert versions() == ["7", "7"] and fleet.weight_version == "7"
        with pytest.raises(ZeroDivisionError), fleet.weight_transaction("8") as update:
            update.send("update_weights_from_tensor", serialized_named_tensors=payload(folder), format="safetensors")
            raise ZeroDivisionError
        assert versions() == ["7", "7"]
        assert not any(each.client.weight_update()["open"] for each in (server, second))
        with fleet.paused("retract"):
            assert all(each.http.get("/is_paused").json()["is_paused"] for each in (server, second))
        assert not any(each.http.get("/is_paused").json()["is_paused"] for each in (server, second))

    async def use() -> None:
        async with AsyncRolloutClient(server.url) as client, AsyncRolloutClient(second.url) as other:
            for each in (client, other):
                async with each.weight_transaction("default") as update:
                    content = payload(folder)
                    await update.send(
                        "update_weights_from_tensor", serialized_named_tensors=content, format="safetensors"
                    )

    asyncio.run(use())
    assert versions() == ["default", "default"]


def test_an_engine_killed_amid_many_samples_loses_and_mixes_none(server: ServerProcess, folder: Path) -> None:
    """Greedy samples of one model: each must be what a single engine answers; and the engine comes back."""
    prompts = [f"{i} + {i} =" for i in range(60)]
    options: Any = {
        "sampling_params": GREEDY | {"max_new_tokens": 150},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    expected = {i: one(output) for i, output in server.client.generate_many(prompts, **options)}  # type: ignore[arg-type]
    brought: list[str] = []

    def bring_up_to_date(client: RolloutClient, weight_version: str) -> None:
        with client.weight_transaction(weight_version) as update:
            update.send("update_weights_from_tensor", serialized_named_tensors=payload(folder), format="safetensors")
        brought.append(client.base_url)

    victim = ServerProcess(folder, **SETTINGS)
    with contextlib.ExitStack() as stack:
        stack.callback(victim.close)
        victim.wait_ready()
        fleet = stack.enter_context(
            RolloutFleet([server.url, victim.url], policy=QUICK, bring_up_to_date=bring_up_to_date)
        )
        fleet.wait_until_ready()
        got: dict[int, GenerationOutput] = {}
        for index, output in fleet.generate_many(prompts, concurrency=16, **options):
            assert not isinstance(output, Exception), output
            assert index not in got
            got[index] = one(output)
            if len(got) == 3:
                assert fleet.engines[victim.url].outstanding > 0
                children = victim.rank_pids()
                victim.process.kill()
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        assert got.keys() == expected.keys()
        for index, output in got.items():
            (span,) = output.weight_versions  # commits are counted by each engine: two in a sample would be of two
            same_record(replace(output, weight_versions=expected[index].weight_versions), expected[index])
            assert span.weight_epoch in (0, expected[index].weight_versions[0].weight_epoch)
        assert fleet.engines[victim.url].left_out is not None
        again = stack.enter_context(ServerProcess(folder, port=victim.port, weight_version="old", **SETTINGS))
        fleet.wait_until_ready(timeout=30)
        assert brought == [again.url] and again.client.weight_version() == "default"


def test_a_stopped_engine_gives_its_samples_to_the_other(server: ServerProcess, second: ServerProcess) -> None:
    """SIGSTOP: nothing breaks, and only the checks notice.  A session moves, and stays where it went."""

    async def use() -> None:
        policy = FleetPolicy(check_every_s=0.1, check_timeout_s=0.5, max_failures=2)
        async with AsyncRolloutFleet([server.url, second.url], policy=policy) as fleet:
            await fleet.wait_until_ready()
            task = asyncio.create_task(
                fleet.generate(PROMPT, sampling_params=GREEDY | {"max_new_tokens": 3000}, session_id="s")
            )
            while not any(engine.outstanding for engine in fleet.engines.values()):
                await asyncio.sleep(0.01)
            (held,) = [each for each in (server, second) if fleet.engines[each.url].outstanding]
            pids = [held.process.pid, *held.rank_pids()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                output = one(await asyncio.wait_for(task, 60))
                assert len(output.output_ids) == 3000
                assert fleet.engines[held.url].left_out is not None
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            await fleet.wait_until_ready(timeout=30)

    asyncio.run(use())
    until(lambda: num_running(server) == num_running(second) == 0)


def test_a_server_that_ends_is_said(folder: Path) -> None:
    """A generation whose connection breaks is not made again by itself."""
    with ServerProcess(folder, **SETTINGS) as short_lived:
        failures: list[BaseException] = []

        def generate() -> None:
            try:
                short_lived.client.generate(PROMPT, sampling_params=ENDLESS)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        until(lambda: num_running(short_lived) == 1)
        short_lived.process.kill()
        thread.join(20)
        (failure,) = failures
        assert isinstance(failure, ServerUnreachable) and failure.was_sent


# --- documentation -----------------------------------------------------------------------------------------------


def test_the_examples_of_the_documentation_run(
    server: ServerProcess, second: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples run one after the other, unchanged but for the addresses of servers and the checkpoint's path."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 5
    names: dict[str, Any] = {}
    for example in examples:
        for written, real in (
            ("http://127.0.0.1:30000", server.url),
            ("http://127.0.0.1:30001", second.url),
            ('"checkpoint', f'"{folder}'),
        ):
            example = example.replace(written, real)
        second.client.update_weight_version(server.client.weight_version())  # the last example is of both
        exec(example, names)
    said = capsys.readouterr().out
    assert "failed:" not in said and "step-1" in said
    assert f"step-2 {{'{server.url}': None, '{second.url}': None}}" in said
    assert server.client.weight_version() == second.client.weight_version() == "step-2"
