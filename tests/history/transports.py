"""The transports of histories: `tests.faults.transports`, in each of their forms by turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.core.messages.weights import PullWeightsReqInput
from tests.faults import transports
from tests.faults.pulls import ENCODINGS
from tests.faults.transports import Call, Damage, Verb
from tests.history.driver import Driver

Make = Callable[[Driver, Call], Verb | None]


@dataclass(frozen=True)
class Transport:
    """`make` returns the verb that brings a call's tensors, without `weight_version`.

    `died`: the damage to the bytes when the transport fails before the content.
    """

    make: Make
    died: Damage = "killed"
    is_refresh: bool = False  # a call outside begin and end is a full refresh of its own, paused or not
    is_pull: bool = False  # brings a whole published version, never into an open refresh
    is_delta: bool = False  # needs the base in the model


def _by_turns(*forms: Make) -> Make:
    return lambda driver, call: forms[call.number % len(forms)](driver, call)


_broadcast = _by_turns(transports.flattened, transports.distributed, transports.memory)
_any_form = _by_turns(
    transports.tensor_pickle, transports.tensor_flattened, transports.tensor_inline, transports.tensor_safetensors
)


def _is_plain(call: Call) -> bool:
    """Return whether a file or a delta can hold the call: some tensors, each name once."""
    return 0 < len(call.named) == len(dict(call.named))


def _delta(driver: Driver, call: Call) -> Verb | None:
    """Make a delta, or a broadcast where no version is known to be in force."""
    return (transports.delta if call.base and _is_plain(call) else _broadcast)(driver, call)


def _tensor(driver: Driver, call: Call) -> Verb | None:
    if call.damage == "killed":
        return transports.tensor_safetensors(driver, call)  # names memory that does not exist any more
    return (_any_form if _is_plain(call) else transports.tensor_pickle)(driver, call)


def _pull(driver: Driver, call: Call) -> Verb:
    """Publish one more version, with each encoding by turns, and damaged versions again; return the verb."""
    publisher = driver.publisher
    publisher.repair()
    tensors = {**publisher.tensors, **dict(call.named)}
    folder = publisher.publish(tensors, ENCODINGS[(call.number - 1) % len(ENCODINGS)])
    if call.damage is not None:
        publisher.damage(folder, call.damage, part=0.5)
    return PullWeightsReqInput, publisher.fields


TRANSPORTS: dict[str, Transport] = {
    "distributed": Transport(_broadcast),
    "delta": Transport(_delta, is_delta=True),
    "tensor": Transport(_tensor),
    "ipc": Transport(transports.ipc, died="failed"),
    "disk": Transport(transports.disk, died="vanished", is_refresh=True),
    "pull": Transport(_pull, is_refresh=True, is_pull=True),
}
