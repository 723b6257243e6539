"""The benchmark of the front: its engine's answers are whole, and its client counts no answer that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.front import MODES, Mode, Sizes
from benchmarks.front_client import Load, drive
from benchmarks.front_engine import NullEngine
from rollout.client import RolloutClient
from rollout.core.args.server_args import ServerArgs
from rollout.families.registry import load_model_config
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

NEW_TOKENS = 4


class Engine(NullEngine):
    """The engine with the end that the harness expects."""

    def __init__(self, args: ServerArgs, input_addr: str, output_addr: str) -> None:
        super().__init__(load_model_config(Path(args.model_path)), input_addr, output_addr, 0.001)

    @property
    def stopped(self) -> Engine:
        return self

    def set(self) -> None:
        self._is_over = True


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, engine=Engine, enable_return_routed_experts=True) as server:
        yield server


def test_the_engine_gives_whole_records(live: Live) -> None:
    options: Any = {"sampling_params": {"max_new_tokens": NEW_TOKENS, "n": 2}, "input_ids": [65, 66, 67]}
    with RolloutClient(live.url) as client:
        assert client.health()
        outputs = client.generate(None, **options, return_logprob=True, return_routed_experts=True)
        assert isinstance(outputs, list) and len(outputs) == 2
        for output in outputs:
            assert output.routed_experts is not None and len(output.routed_experts) == 3 + NEW_TOKENS - 1
            assert output.logprobs is not None and len(output.logprobs) == len(output.output_ids) == NEW_TOKENS
        *_, last = client.stream(None, **options | {"sampling_params": {"max_new_tokens": NEW_TOKENS}})
        assert last.output_ids == outputs[0].output_ids


def load(live: Live, *, mark: str, stream: bool = False) -> Load:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": [65, 66], "stream": stream, "sampling_params": sampling})
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    port = int(live.url.rpartition(":")[2])
    end = "[DONE]\n\n\r\n0\r\n\r\n" if stream else None
    return Load(port=port, in_flight=3, seconds=0.2, request=head + body, mark=mark, end=end, pids=[])


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_counts_whole_answers(live: Live, stream: bool) -> None:
    found = drive(load(live, mark=f'"completion_tokens":{NEW_TOKENS},', stream=stream))
    assert found.answers > 3 and found.latency_p99 >= found.latency_p50 > 0.002


def test_the_client_refuses_an_answer_with_another_number_of_tokens(live: Live) -> None:
    with pytest.raises(RuntimeError, match="an answer is wrong"):
        drive(load(live, mark=f'"completion_tokens":{NEW_TOKENS + 1},'))


def test_sizes_are_read_from_a_word() -> None:
    assert Sizes.parse("8+1") == Sizes(prompt=8, new=1)
    with pytest.raises(ValueError, match="unpack"):
        Sizes.parse("8")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.name in ("records", "records, msgpack")])
def test_each_answer_of_a_mode_has_its_mark(live: Live, mode: Mode) -> None:
    usual = load(live, mark=mode.mark(NEW_TOKENS))
    request = usual.request.replace("host: localhost\r\n", f"host: localhost\r\n{mode.headers}")
    assert drive(msgspec.structs.replace(usual, request=request)).answers > 0
    with pytest.raises(RuntimeError, match="an answer is wrong"):
        drive(msgspec.structs.replace(usual, request=request, mark=mode.mark(NEW_TOKENS + 1)))
