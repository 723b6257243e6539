"""The actions of a history.

An action is plain data without references to engine objects: its numbers pick among the objects of that moment.  So any
list of actions can be played, a failing one shrinks well, and its JSON can be played again.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec
from hypothesis import strategies as st

from weight_sync.staging import StagingMode

Dtype = Literal["float64", "float32"]
PauseMode = Literal["abort", "retract", "in_place"]

# The faults of a sender or a rank in one refresh.
Fault = Literal[
    "nan",  # one value is not a number
    "flipped",  # one value does not fit the fingerprint in the manifest
    "renamed",  # a tensor under a name that the model does not have
    "reshaped",
    "retyped",
    "halved",  # as float16, which is widened: a fault only where a fingerprint was stated
    "repeated",  # a tensor that came before
    "missing",  # a tensor never comes
    "died",  # the transport fails before the content
    "cut",  # the transport delivers a part of the content
    "wrong_base",  # the sender does not start from the version in force
    "no_end",  # the sender goes away before the last call
    "vote_verify",  # another rank cannot verify
    "vote_commit",  # another rank cannot write
    "write",  # writing fails half-way; the old content can be put back
    "restore",  # writing fails half-way, and putting back fails, too
]
DTYPES: tuple[Dtype, ...] = Dtype.__args__  # type: ignore[attr-defined]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]


class Action(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base class.  As JSON an action is `["Name", ...]`."""


class Submit(Action, frozen=True):
    """`samples` requests of one prompt at once.  `scored`: first prompt token whose log-probability is wanted."""

    prompt: list[int]
    new: int
    samples: int = 1
    temperature: float = 0.0
    key: str | None = None
    scored: int = -1
    stream: bool = False
    lag: int | None = None  # max_kv_version_lag


class Steps(Action, frozen=True):
    count: int


class Pause(Action, frozen=True):
    mode: PauseMode


class Continue(Action, frozen=True):
    """`below`: abort requests that began before one of the labels so far; -1: none."""

    below: int = -1


class Abort(Action, frozen=True):
    """Abort one request; -1: all."""

    index: int


class Flush(Action, frozen=True):
    pass


class Relabel(Action, frozen=True):
    """Another name for the weights in force, or for those under way."""

    abort: bool = False


class Begin(Action, frozen=True):
    """A second trainer's begin, out of the blue."""


class End(Action, frozen=True):
    pass


class AbortUpdate(Action, frozen=True):
    pass


Small = Submit | Steps | Pause | Continue | Abort | Flush | Relabel | Begin | End | AbortUpdate


class Lapse(Action, frozen=True):
    """More time passes than a lease lasts."""


class Refresh(Action, frozen=True):
    """New weights: pause, begin, calls, end, continue, with other actions wherever the engine waits for something.

    `content` picks new values; `part` > 1 takes each `part`-th tensor only.  `bracket`: with begin and end.
    """

    transport: str
    content: int
    pause: PauseMode | None = None
    bracket: bool = True
    part: int = 1
    calls: int = 2
    order: int = 0  # seed of the order of tensors
    labelled: bool = True
    manifest: bool = False  # with begin
    phased: bool = False  # verify and commit by two calls of end
    named: bool = False  # every call carries the id of the update
    fault: Fault | None = None
    at: int = 0  # which call the fault hits
    meanwhile: list[Small] = []


AnyAction = Small | Lapse | Refresh


class History(msgspec.Struct, frozen=True):
    """Settings of the engine and the actions that it meets.

    float64 runs on plain torch and leaves no room for doubt; float32 on the compiled operators, whose weights are
    packed, where there is a compiler.
    """

    actions: list[AnyAction]
    pool: int = 56  # KV slots
    chunk: int = 6  # prompt tokens a step
    radix: bool = True
    staging: StagingMode = "host"
    dtype: Dtype = "float64"

    def text(self) -> str:
        """Return the history for people to read: one action a line."""
        lines = [f"{number:3} {msgspec.json.encode(action).decode()}" for number, action in enumerate(self.actions)]
        return (
            f"pool={self.pool} chunk={self.chunk} radix={self.radix} staging={self.staging} dtype={self.dtype}\n"
            + "\n".join(lines)
        )


def encode(history: History) -> str:
    return msgspec.json.encode(history).decode()


def decode(text: str) -> History:
    """Decode a history from its JSON.  Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(text, type=History)


# --- generation ----------------------------------------------------------------------------------------------------


def _prompts() -> st.SearchStrategy[list[int]]:
    """Draw prompts from a few families that share prefixes."""
    return st.builds(
        lambda family, length, tail: [random.Random(family * 100 + i).randrange(256) for i in range(length)] + tail,
        st.integers(0, 2),
        st.sampled_from([6, 9, 12, 14, 3, 1]),
        st.lists(st.integers(0, 255), max_size=4),
    )


def submits() -> st.SearchStrategy[Submit]:
    return st.builds(
        Submit,
        prompt=_prompts(),
        new=st.sampled_from([12, 16, 8, 4, 1, 0]),
        samples=st.sampled_from([1, 1, 1, 3]),
        temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
        key=st.sampled_from([None, None, "a"]),
        scored=st.sampled_from([-1, -1, 0, 2]),
        stream=st.booleans(),
        lag=st.sampled_from([None, None, None, -1, 0, 1]),
    )


def _common() -> list[st.SearchStrategy]:
    return [
        submits(),
        st.builds(Steps, st.sampled_from([4, 8, 2, 1])),
        st.builds(Pause, st.sampled_from(PauseMode.__args__)),  # type: ignore[attr-defined]
        st.builds(Continue, st.sampled_from([-1, -1, 0, 1, 2])),
        st.builds(Abort, st.integers(-1, 8)),
        st.builds(Flush),
        st.builds(Relabel, st.booleans()),
    ]


def _meanwhile() -> st.SearchStrategy[list]:
    quiet = st.builds(Steps, st.sampled_from([2, 4, 1]))
    rare = st.sampled_from([Begin(), End(), AbortUpdate()])
    return st.lists(st.one_of(quiet, quiet, submits(), *_common(), rare), max_size=6)


def refreshes(transports: tuple[str, ...]) -> st.SearchStrategy[Refresh]:
    return st.builds(
        Refresh,
        transport=st.sampled_from(transports),
        content=st.integers(1, 3),
        pause=st.sampled_from([None, "abort", "retract", "in_place"]),
        bracket=st.booleans(),
        part=st.sampled_from([1, 1, 1, 2, 5]),
        calls=st.integers(1, 3),
        order=st.integers(0, 7),
        labelled=st.sampled_from([True, True, True, False]),
        manifest=st.booleans(),
        phased=st.sampled_from([False, False, True]),
        named=st.booleans(),
        fault=st.one_of(st.none(), st.none(), st.sampled_from(FAULTS)),
        at=st.integers(0, 2),
        meanwhile=_meanwhile(),
    )


def histories(transports: tuple[str, ...], max_actions: int = 20) -> st.SearchStrategy[History]:
    """Draw random histories that begin with a request, as nothing can go wrong before one."""
    often = [refreshes(transports)] * 6 + [submits()] * 4
    action = st.one_of(*often, *_common(), st.just(Lapse()))
    return st.builds(
        lambda first, rest, **settings: History([first, *rest], **settings),
        submits(),
        st.lists(action, min_size=8, max_size=max_actions),
        pool=st.sampled_from([40, 56, 200]),
        chunk=st.sampled_from([3, 6, 64]),
        radix=st.sampled_from([True, True, True, False]),
        staging=st.sampled_from(["host", "host", "journal", "in_place", "in_place"]),
        dtype=st.sampled_from(["float64", "float64", "float32"]),
    )
