"""Refusals of several ranks, at the command line and over HTTP: one clear line each, and nothing left running."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import StartupError
from rollout.server import serve
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.server_process import ServerProcess, alive
from weight_sync.process_group import free_port

pytestmark = pytest.mark.full

EXPERTS = list(range(8))
TP2 = ["--tp-size", "2", "--ep-size", "2"]
MEET = ["--dist-init-addr", "127.0.0.1:6555"]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`six`: six query heads and three KV heads; `pairs`: three query heads to a KV head."""
    base = tmp_path_factory.mktemp("models")
    return {
        "moe": str(tiny_checkpoint(base / "moe", "moe_dense_first", seed=5)),
        "dense": str(tiny_checkpoint(base / "dense", "dense")),
        "six": str(tiny_checkpoint(base / "six", "moe", heads=6, kv_heads=3)),
        "pairs": str(tiny_checkpoint(base / "pairs", "moe", heads=6, kv_heads=2, moe_intermediate_size=48)),
        "dump": _file(base / "dump.json", {"model": {"num_experts": 16}, "logical_count": [[1] * 16] * 2}),
    }


def _file(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def located(*rows: list[int]) -> list[str]:
    return ["--init-expert-location", json.dumps({"physical_to_logical_map": rows})]


# --- refused before a process starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp-size", "0"], "--tp-size must be at least 1, got 0"),
        (["--tp-size", "65"], "--tp-size 65 --dp-size 1 need 65 ranks; a server has at most 64"),
        (["--dp-size", "0"], "--dp-size must be at least 1, got 0"),
        (["--ep-size", "2"], "--ep-size 2 does not divide --tp-size 1"),
        (["--tp-size", "2", "--ep-size", "4"], "--ep-size 4 does not divide --tp-size 2"),
        (["--tp-size", "2", "--dp-size", "4", "--enable-dp-attention"], "--dp-size 4 does not divide --tp-size 2"),
        (["--tp-size", "2", "--moe-a2a-backend", "all_to_all"], "it needs --ep-size equal to --tp-size, got 1 and 2"),
        (["--ep-num-redundant-experts", "-1"], "--ep-num-redundant-experts must not be negative"),
        (["--enable-eplb"], "--enable-eplb balances experts over ranks: give --ep-size of at least 2"),
        ([*TP2, "--eplb-rebalance-num-iterations", "0"], "--eplb-rebalance-num-iterations must be at least 1"),
        (
            [*TP2, "--eplb-min-rebalancing-utilization-threshold", "2"],
            "--eplb-min-rebalancing-utilization-threshold must be in 0..1",
        ),
        (["--pp-size", "2"], "--pp-size must be 1 in this version"),
        (["--dp-size", "200"], "--dp-size 200 need 200 ranks; a server has at most 64"),
        ([*TP2, "--nnodes", "0"], "--nnodes must be at least 1"),
        ([*TP2, "--nnodes", "2"], "--nnodes needs --dist-init-addr HOST:PORT"),
        ([*TP2, "--nnodes", "2", "--dist-init-addr", "6555"], "--nnodes needs --dist-init-addr HOST:PORT"),
        ([*TP2, "--nnodes", "2", "--dist-init-addr", "here:0"], "--nnodes needs --dist-init-addr HOST:PORT"),
        ([*TP2, "--nnodes", "2", "--node-rank", "2", *MEET], "--node-rank must be in 0..1"),
        (["--node-rank", "1"], "--node-rank must be in 0..0"),
        ([*TP2, "--nnodes", "3", *MEET], "--nnodes 3 does not divide the 2 ranks"),
        (["--dp-size", "2", "--nnodes", "2", *MEET], "start a server on each machine instead of --nnodes"),
        ([*TP2, "--nnodes", "2", "--dist-init-addr", "no.such.invalid:1"], "--dist-init-addr no.such.invalid:1: "),
        (
            [*TP2, "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "no.such.invalid:1"],
            "--dist-init-addr no.such.invalid:1: ",
        ),
        ([*TP2, "--nnodes", "2", "--dist-init-addr", "a" * 70 + ":1"], "--dist-init-addr aaa"),
    ],
)
def test_sizes_that_cannot_be(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert serve.main(["--model-path", folders["moe"], "--port", str(free_port()), *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: error: ") and message in line, line


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (["--moe-a2a-backend", "pplx"], ("none", "all_to_all", "deepep")),
        (["--eplb-algorithm", "best"], ("auto", "min_move", "balanced", "deepseek")),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], words: list[str], choices: tuple[str, ...]
) -> None:
    """The answer is the reason, and where to read more."""
    with pytest.raises(SystemExit) as caught:
        serve.main(["--model-path", folders["moe"], *words])
    assert caught.value.code == 2
    *_, said, _ = capsys.readouterr().err.splitlines()
    assert f"error: {words[0]}: {words[1]} is not one of " in said and all(name in said for name in choices)


# --- refused by the ranks ---------------------------------------------------------------------------------------------

BY_RANKS = {
    "KV heads": (["pairs", "--tp-size", "3"], "key-value heads: 2 and 3 ranks must divide each other"),
    "query heads": (["six", "--tp-size", "4"], "attention heads: 6 does not divide over 4 ranks"),
    "inner features": (
        ["six", "--tp-size", "3"],
        "--tp-size 3 --ep-size 1: intermediate size of the experts: 32 does not divide over 3 ranks",
    ),
    "slots": (["six", "--tp-size", "3", "--ep-size", "3"], "do not fit: 8 slots cannot be divided evenly over 3 ranks"),
    "redundant": (
        ["moe", *TP2, "--ep-num-redundant-experts", "3"],
        "do not fit: 11 slots cannot be divided evenly over 2 ranks",
    ),
    "too many redundant": (["moe", *TP2, "--ep-num-redundant-experts", "16"], "rank 0 of 2 holds expert 0 twice"),
    "a map that misses one": (["moe", *TP2, *located(EXPERTS, [*EXPERTS[:7], 0])], "layer 1: no slot holds expert 7"),
    "a map that repeats one": (
        ["moe", *TP2, "--ep-num-redundant-experts", "2", *located(*[[0, 0, *EXPERTS[1:], 1]] * 2)],
        "MoE layer 0: rank 0 of 2 holds expert 0 twice",
    ),
    "a map of another size": (["moe", *TP2, *located(EXPERTS)], "the map has the shape [1, 8], but 2 MoE layers of 8"),
    "another model's dump": (
        ["moe", *TP2, "--init-expert-location", "dump"],
        "the dump belongs to another model: its num_experts is 16, expected 8",
    ),
    "EPLB on a dense model": (["dense", *TP2, "--enable-eplb"], "has no experts: start without --enable-eplb"),
    "redundant experts of a dense model": (
        ["dense", *TP2, "--ep-num-redundant-experts", "2"],
        "has no experts: start without --ep-num-redundant-experts",
    ),
    "a map for a dense model": (
        ["dense", *TP2, *located(EXPERTS)],
        "has no experts: start without --init-expert-location",
    ),
    "deepep": (
        ["moe", *TP2, "--moe-a2a-backend", "deepep"],
        "--moe-a2a-backend deepep needs the deep_ep package and a GPU; all_to_all does the same on this machine",
    ),
    "one device for two ranks": (
        ["moe", *TP2, "--device", "cuda:1"],
        "--device cuda:1 is one device for 2 ranks: give --device cuda --base-gpu-id 1",
    ),
}


AS_PROCESSES = [
    "KV heads",
    "a map that misses one",
    "another model's dump",
    "EPLB on a dense model",
    "deepep",
    "one device for two ranks",
]


def settings_of(words: list[str]) -> dict[str, Any]:
    """Parse flags: `["--tp-size", "2", "--enable-eplb"]` gives `{"tp_size": "2", "enable_eplb": True}`."""
    settings: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, word = word.removeprefix("--").replace("-", "_"), True  # type: ignore[assignment]
        settings[name] = word
    return settings


def case(folders: dict[str, str], name: str) -> tuple[Path, dict[str, Any], str]:
    (model, *words), message = BY_RANKS[name]
    return Path(folders[model]), settings_of([folders["dump"] if word == "dump" else word for word in words]), message


@pytest.mark.parametrize("name", [name for name in BY_RANKS if name not in AS_PROCESSES])
def test_ranks_refuse_wrong_settings_in_one_line(folders: dict[str, str], name: str) -> None:
    folder, settings, message = case(folders, name)
    numbers = {key: int(value) if str(value).isdigit() else value for key, value in settings.items()}
    with pytest.raises(StartupError) as caught:
        ParallelHarness(folder, **numbers | {"enable_return_routed_experts": False})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", AS_PROCESSES)
def test_what_ranks_refuse_is_one_line_and_leaves_nothing(folders: dict[str, str], name: str) -> None:
    """The ranks together leave status 1, no traceback, no process, no file."""
    folder, given, message = case(folders, name)
    server = ServerProcess(folder, **given | {"max_total_tokens": 512, "num_threads": 1})
    try:
        ranks: set[int] = set()
        deadline = time.monotonic() + 60
        while server.process.poll() is None and time.monotonic() < deadline:
            ranks.update(server.rank_pids())
            time.sleep(0.02)
        assert server.wait_exit() == 1
        said = server.stderr()
        lines = [line for line in said.splitlines() if " INFO lockstep: " not in line]
        assert len(lines) == 1 and lines[0].startswith("lockstep: error: ") and message in lines[0], said
        assert ranks and not any(alive(pid) for pid in ranks) and server.leftovers() == []
    finally:
        server.close()


# --- machines that do not fit together --------------------------------------------------------------------------------


def machines(folder: str, *settings: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """Exit status and last lines of a server for each of the settings, all meeting at one address."""
    address = f"127.0.0.1:{free_port()}"
    common = {"tp_size": 2, "ep_size": 2, "nnodes": 2, "dist_init_addr": address, "max_total_tokens": 512}
    servers = [ServerProcess(Path(folder), **common | own) for own in settings]
    try:
        return [(server.wait_exit(60), _without_progress(server.stderr().splitlines()[1:])) for server in servers]
    finally:
        for server in servers:
            server.close()


def _without_progress(lines: list[str]) -> list[str]:
    """Drop the lines that a server on a slow machine writes while it loads."""
    return [line for line in lines if "still loading" not in line]


def test_machines_with_other_settings_both_say_so(folders: dict[str, str]) -> None:
    first, second = machines(folders["moe"], {"node_rank": 0}, {"node_rank": 1, "chunked_prefill_size": 64})
    assert first[0] == second[0] == 1
    said = "--chunked-prefill-size is {} on machine {} and {} on machine {}: start all machines of an engine alike"
    assert first[1] == ["lockstep: error: " + said.format("not given", 0, 64, 1)]
    assert len(second[1]) == 2
    assert second[1][0].endswith(" ERROR lockstep: rank 1: " + said.format(64, 1, "not given", 0))
    assert second[1][1] == "lockstep: error: the scheduler process ended: exit status 1"


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[ServerProcess]:
    """Two data-parallel ranks, two redundant experts."""
    settings: dict[str, Any] = {
        "tp_size": 2,
        "dp_size": 2,
        "ep_size": 2,
        "enable_dp_attention": True,
        "moe_a2a_backend": "all_to_all",
        "ep_num_redundant_experts": 2,
        "enable_eplb": True,
        "enable_return_routed_experts": True,
        "dtype": "float64",
        "max_total_tokens": 1024,
        "num_threads": 1,
    }
    with ServerProcess(Path(folders["moe"]), **settings) as running:
        yield running


def refused(server: ServerProcess, path: str, **body: Any) -> tuple[int, str]:
    """Return the status and the message of an answer, which must have the one error shape."""
    response = server.http.post(path, json=body)
    reply = response.json()
    message = reply["error"]["message"]
    assert set(reply["error"]) == {"type", "message"} and "\n" not in message and "Traceback" not in message, reply
    return response.status_code, message


def ids_of(server: ServerProcess) -> list[list[int]]:
    body = {"input_ids": [[7, 3, 9], [5] * 9], "sampling_params": PARAMS}
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return [reply["output_ids"] for reply in response.json()]


@pytest.mark.parametrize("rank", [2, -1, 10**12, "one"])
def test_data_parallel_ranks_that_do_not_exist(server: ServerProcess, rank: Any) -> None:
    before = ids_of(server)
    status, message = refused(server, "/generate", input_ids=[1], sampling_params=PARAMS, routed_dp_rank=rank)
    assert status == 400 and "routed_dp_rank" in message
    assert ids_of(server) == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"algorithm": "best"}, "unknown algorithm 'best'; choose from auto, min_move"),
        ({"physical_to_logical_map": [[*EXPERTS[:7], 0, 1, 2]] * 2}, "no slot holds expert 7"),
        ({"physical_to_logical_map": [[0, 0, *EXPERTS[1:], 1]] * 2}, "holds expert 0 twice"),
        ({"physical_to_logical_map": [EXPERTS] * 2}, "the map has the shape [2, 8]"),
        ({"physical_to_logical_map": "trivial"}, "physical_to_logical_map"),
        ({"layers_per_chunk": 0}, "layers_per_chunk"),
        ({"max_stall_s": -1}, "max_stall_s"),
    ],
)
def test_rebalances_that_cannot_be(server: ServerProcess, body: dict[str, Any], message: str) -> None:
    before = server.http.get("/expert_location").json()
    status, said = refused(server, "/eplb_rebalance", **body)
    assert status == 400 and message in said
    assert server.http.get("/expert_location").json() == before


def test_a_rebalance_during_a_refresh_is_a_conflict_and_says_why(server: ServerProcess) -> None:
    wanted = {"physical_to_logical_map": [[*EXPERTS[:4], 4, *EXPERTS[4:], 0]] * 2}
    before = server.http.get("/expert_location").json(), ids_of(server)
    assert server.http.post("/begin_weight_update", json={"weight_version": "v1"}).status_code == 200
    status, message = refused(server, "/eplb_rebalance", **wanted)
    assert status == 409 and message.startswith("experts cannot be moved now: a weight update is open (")
    assert "abort_weight_update" in message
    assert server.http.post("/abort_weight_update", json={}).status_code == 200
    assert (server.http.get("/expert_location").json(), ids_of(server)) == before
    moved = server.http.post("/eplb_rebalance", json=wanted)
    assert moved.status_code == 200 and moved.json()["rebalanced"], moved.text
    assert server.http.get("/expert_location").json()["physical_to_logical_map"] == wanted["physical_to_logical_map"]
    assert ids_of(server) == before[1]
