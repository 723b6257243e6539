"""The messages of the trainer process to its parent: one JSON line each, on its standard output."""

from __future__ import annotations

import msgspec

from examples.demo.mismatch import BitAgreement, LogprobMismatch, RouteMismatch


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`done` of `total` parts of a phase."""

    phase: str
    done: int
    total: int


class RolloutReport(msgspec.Struct, frozen=True):
    """One round of samples under one weight version, seen from the trainer's weights of that version.

    `version_problems`: the first few samples whose reported versions are wrong; `num_version_problems` counts all.
    `forced` follows the engine's routes.  It and `routes` are None for a dense model.  `stale`: the mismatch, routes
    forced if there are any, of the weights before the last step; None in the first round.  `exact`: the trainer under
    engine numerics; None where no operators are compiled.
    """

    version: str
    num_samples: int
    num_tokens: int
    reward_mean: float
    num_groups_with_signal: int
    num_groups: int
    num_version_problems: int
    version_problems: list[str]
    own: LogprobMismatch
    routes: RouteMismatch | None
    forced: LogprobMismatch | None
    stale: LogprobMismatch | None
    exact: BitAgreement | None


class StepReport(msgspec.Struct, frozen=True):
    """One policy-gradient step and the refresh after it.

    Losses are of the same samples before and after the step.  Fingerprints (16 hex digits by tensor name):
    `engine_before` and `engine_after` as the server reports them, `trainer_after` as computed here.
    """

    version: str
    loss_before: float
    loss_after: float
    gradient_norm: float
    refresh_bytes: int
    refresh_seconds: float
    engine_before: dict[str, str]
    engine_after: dict[str, str]
    trainer_after: dict[str, str]


class TrainerReport(msgspec.Struct, frozen=True, tag="report"):
    """Rounds under versions 0, 1, .. and the steps between them.  `trainer_start`: fingerprints before any step."""

    rollouts: list[RolloutReport]
    steps: list[StepReport]
    trainer_start: dict[str, str]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The trainer cannot go on."""

    message: str


Message = Progress | TrainerReport | Failure


def encode(message: Message) -> bytes:
    """Encode a message as one line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """Decode one line.  Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    message: Message = msgspec.json.decode(line, type=Message)
    return message
