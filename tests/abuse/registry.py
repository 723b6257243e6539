"""The list of attacks.  A file under `attacks` adds its own by the decorator; importing `attacks` fills the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.abuse.server import Setup, Victim

MODEL = {"layers": 4, "context_length": 4096}  # settings of the checkpoint, in addition to those in `tests.model_zoo`
BASE = {
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "max_total_tokens": 16384,
    "max_queued_requests": 10000,
    "weight_update_timeout": 1.5,
    "drain_timeout": 3,
    "receive_timeout": 5,
    "num_threads": 1,
    "log_level": "info",
}
OPEN = Setup(
    "open",
    BASE
    | {
        "enable_return_routed_experts": True,
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "session_pin_fraction": 0.5,
        "tool_call_parser": "qwen3_coder",
        "reasoning_parser": "deepseek-r1",
    },
)
KEYED = Setup("keyed", BASE | {"api_key": "user-key", "admin_api_key": "admin-key"}, descriptors=(128, 512))
RANKS = Setup("ranks", BASE | {"tp_size": 2, "ep_size": 2})
SETUPS = {setup.name: setup for setup in (OPEN, KEYED, RANKS)}


@dataclass(frozen=True)
class Attack:
    """One idea of how to harm a server.

    `play` returns a note on what was done, gives complaints to the victim, or raises `Harmed`.  It leaves no thread and
    no socket behind.  After `seconds` the server is killed under it.  The memory of all processes may have grown by
    `keeps_mb` at the end and by `peak_mb` at any time.  `log_kb` may be written to the log.
    `restores`: it may change the weights, which are then loaded anew.
    """

    name: str
    play: Callable[[Victim], str]
    on: tuple[str, ...]
    seconds: float
    keeps_mb: int
    peak_mb: int
    log_kb: int
    restores: bool
    quick: bool


ATTACKS: list[Attack] = []


def attack(
    *on: Setup,
    seconds: float = 60.0,
    keeps_mb: int = 48,
    peak_mb: int = 300,
    log_kb: int = 64,
    restores: bool = False,
    quick: bool = False,
) -> Callable[[Callable[[Victim], str]], Callable[[Victim], str]]:
    """Add an attack, named as its function.  `quick` ones are played by `make test-full` too."""

    def add(play: Callable[[Victim], str]) -> Callable[[Victim], str]:
        name = play.__name__.replace("_", " ")
        servers = tuple(setup.name for setup in on or (OPEN,))
        ATTACKS.append(Attack(name, play, servers, seconds, keeps_mb, peak_mb, log_kb, restores, quick))
        return play

    return add
