"""The actions of a schedule, and schedules drawn from a seed.

An action is plain data without references to engine objects: its numbers pick among the objects of that moment.  So any
part of a schedule can be played, and a failing one can be made smaller.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollout.core.messages.io_struct import MemoryTag, PauseMode
from tests.mixed.zoo import NUM_CONTENTS, PLAIN, Form, Format, Shape
from weight_sync.staging import StagingMode

Dtype = Literal["float32", "bfloat16"]
NO_MASK_LIMIT = 4096


class Action(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base class.  As JSON an action is `["Name", ...]`."""


class Replay(msgspec.Struct, frozen=True):
    """Random routes that `seed` draws, for `rows` tokens from `start` on."""

    seed: int
    start: int
    rows: int


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """Samples of one prompt, one for each of `seeds`.  `params`: fields of `SamplingParams` other than the seed."""

    prompt: list[int]
    params: dict[str, Any]
    seeds: list[int]
    key: str | None = None
    session: str | None = None
    priority: int = 0
    stream: bool = False
    logprobs: bool = True
    scored: int = -1  # the first prompt token whose log-probability is wanted
    top: int = 0
    chosen: list[int] = []
    routes: bool = False
    routes_start: int = 0
    replay: Replay | None = None
    mask: Literal["selected", "support"] | None = None
    mask_ids: int | None = None  # maximum number of ids in all masks of a sample
    lag: int | None = None

    @property
    def new_tokens(self) -> int:
        return int(self.params["max_new_tokens"])

    @property
    def edits_logits(self) -> bool:
        """True if log-probabilities are of other logits than the model's."""
        edits = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens")
        return any(name in self.params for name in edits)


class Submit(Action, frozen=True):
    """`after`: the number of an ended request whose prompt and output the prompt continues; -1: none."""

    ask: Ask
    after: int = -1


class Steps(Action, frozen=True):
    count: int


class Abort(Action, frozen=True):
    """Abort the requests in flight that `picks` number, and one that does not exist; empty: all."""

    picks: list[int]


class Pause(Action, frozen=True):
    """`wait_s`: the limit of the mode `wait`; the schedule goes on before its answer."""

    mode: PauseMode
    wait_s: float = 5.0


class GiveUp(Action, frozen=True):
    """Let the caller of the last pause that waits go away."""


class Continue(Action, frozen=True):
    """`below`: abort requests that began before one of the labels so far; -1: none."""

    below: int = -1


class Commit(Action, frozen=True):
    """Other weights.  `whole`: every tensor is sent; `steps`: the number of turns before each of its calls."""

    content: int
    whole: bool = False
    steps: int = 0


class Rename(Action, frozen=True):
    abort: bool


class Release(Action, frozen=True):
    tags: list[MemoryTag]


class Resume(Action, frozen=True):
    tags: list[MemoryTag]


class Flush(Action, frozen=True):
    retract: bool


class FinishSession(Action, frozen=True):
    session: str


class Lapse(Action, frozen=True):
    seconds: float


class Look(Action, frozen=True):
    """Read the scheduler's state and its sessions."""


AnyAction = (
    Submit
    | Steps
    | Abort
    | Pause
    | GiveUp
    | Continue
    | Commit
    | Rename
    | Release
    | Resume
    | Flush
    | FinishSession
    | Lapse
    | Look
)


Loop = Literal["sequential", "late", "captured"]


class Settings(msgspec.Struct, frozen=True):
    """The settings of the engine.

    `loop`: "late" launches a step before the previous one is finished; so does "captured", which also replays steps
    that only decode.
    """

    family: str
    dtype: Dtype
    loop: Loop
    pool: int
    chunk: int
    running: int
    radix: bool
    lag: int
    mask_limit: int
    pins: float
    events: bool
    memory: Literal["kept", "released", "copied"]
    snapshots: int
    staging: StagingMode
    form: Form = PLAIN


class Schedule(msgspec.Struct, frozen=True):
    seed: int
    settings: Settings
    actions: list[AnyAction]

    def text(self) -> str:
        """Return the schedule for people to read: one action a line."""
        lines = [f"{number:3} {msgspec.json.encode(action).decode()}" for number, action in enumerate(self.actions)]
        return "\n".join([f"seed {self.seed}: {msgspec.json.encode(self.settings).decode()}", *lines])


def encode(schedule: Schedule) -> str:
    return msgspec.json.encode(schedule).decode()


def decode(text: str) -> Schedule:
    """Decode a schedule from its JSON.  Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(text, type=Schedule)


# --- drawing -------------------------------------------------------------------------------------------------------


def schedule_of(seed: int, shapes: Sequence[Shape]) -> Schedule:
    """Draw the schedule of a seed, for one of the models `shapes`."""
    return _Drawn(seed, shapes).schedule()


class _Drawn:
    """One schedule in the making.

    Each schedule leaves some features out, so that others meet more often; numbers are small where limits are small.
    """

    def __init__(self, seed: int, shapes: Sequence[Shape]) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.shape = shape = rng.choice(shapes)
        self.usual = rng.choice(_USUAL) if rng.random() < 0.5 else None
        self.is_long = shape.prefixes != "tokens" and rng.random() < 0.7
        self.settings = self._settings()
        longest = min(self.settings.pool, shape.context_length) - 1
        self.longest_prompt = min(longest - 4, _LONGEST[shape.prefixes] if self.is_long else 44)
        self.bases = [self._tokens(self.longest_prompt) for _ in range(rng.choice([1, 2, 3]))]
        self.replays = [rng.randrange(1 << 16) for _ in range(2)]
        self.uses = {name: rng.random() < 0.6 for name in _FEATURES}

    def schedule(self) -> Schedule:
        rng = self.rng
        actions: list[AnyAction] = [Submit(self._ask()), Submit(self._ask())]
        kinds = self._kinds()
        for _ in range(rng.randint(16, 40)):
            (draw,) = rng.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])
            actions += draw()
        return Schedule(self.seed, self.settings, actions)

    def _settings(self) -> Settings:
        rng, shape = self.rng, self.shape
        sizes = [28, 40, 56, 80, 120, 200]
        if self.is_long:
            sizes = [200, 260, 400] if shape.prefixes == "snapshots" else [200, 420, 700]
        return Settings(
            family=shape.family,
            dtype=shape.dtype,  # type: ignore[arg-type]
            loop=rng.choice(["sequential", "sequential", "late", "late", "captured"]),
            pool=rng.choice(sizes),
            chunk=rng.choice([16, 64, -1] if self.is_long else [1, 3, 5, 16, 64, -1]),
            running=rng.choice([1, 2, 4, 6, 12]),
            radix=rng.random() < 0.9,
            lag=rng.choice([-1, -1, 0, 1]),
            mask_limit=self.usual.mask_limit if self.usual is not None else rng.choice([3, 20, 60, 120, NO_MASK_LIMIT]),
            pins=rng.choice([0.0, 0.3, 0.6]),
            events=rng.random() < 0.6,
            memory=rng.choice(["kept", "kept", "released", "copied"]),
            snapshots=rng.choice([4, 8, 32, 64]),
            staging=rng.choice(["host", "host", "device", "journal"]),
            form=self._form(),
        )

    def _form(self) -> Form:
        """Draw formats, with numbers of their own: other draws of a seed are as they were without them."""
        rng, shape = random.Random(f"formats of {self.seed}"), self.shape
        held, place, kv = rng.choice(_FORMATS), rng.choice(["both", "both", "experts", "linears"]), rng.random()
        is_held = shape.can_be_held and rng.random() < 0.5
        return Form(
            experts=held if is_held and shape.is_moe and place != "linears" else "plain",
            linears=held if is_held and (place != "experts" or not shape.is_moe) else "plain",
            kv="fp8_e4m3" if kv < 0.25 and not shape.has_latents else "auto",
        )

    def _kinds(self) -> list[tuple[Callable[[], list[AnyAction]], int]]:
        """Return the kinds of next actions, with their weights."""
        rng, uses = self.rng, self.uses
        kinds: list[tuple[Callable[[], list[AnyAction]], int]] = [
            (lambda: [self._submit()], 20),
            (lambda: [Steps(rng.choice([1, 2, 3, 5, 8, 12]))], 28),
            (lambda: [Look()], 2),
        ]
        if uses["aborts"]:
            kinds.append((lambda: [Abort(rng.choice([[0], [1], [2, 3], [5], [0, 4, 7]]))], 4))
            kinds.append((lambda: [Abort([])], 1))
        if uses["pauses"]:
            kinds.append((self._pause, 12))
        if uses["commits"]:
            kinds.append((lambda: [self._commit()], 7))
            kinds.append((lambda: [Rename(rng.random() < 0.1)], 2))
        if uses["flushes"]:
            kinds.append((lambda: [Flush(rng.random() < 0.6)], 4))
        if uses["sessions"] and self.settings.pins:
            kinds.append((lambda: [FinishSession(rng.choice(_SESSIONS))], 2))
            kinds.append((lambda: [Lapse(rng.choice([1.0, 30.0, 100.0]))], 2))
        if self.settings.memory != "kept":
            kinds.append((self._hand_over, 4))
        return kinds

    def _pause(self) -> list[AnyAction]:
        """Draw a pause, a trainer's actions in it, and most often its end."""
        rng = self.rng
        mode = rng.choice(_PAUSES)
        found: list[AnyAction] = [Pause(mode, rng.choice([0.01, 5.0]))]
        if mode == "wait":
            found.append(Steps(rng.choice([2, 6, 20])))
            found += [GiveUp()] if rng.random() < 0.2 else []
        inside: list[Callable[[], AnyAction]] = [lambda: Submit(self._ask()), lambda: Steps(1)]
        inside += [self._commit] if self.uses["commits"] else []
        inside += [lambda: Flush(False)] if self.uses["flushes"] else []
        inside += [lambda: Abort([rng.randrange(8)])] if self.uses["aborts"] else []
        found += [rng.choice(inside)() for _ in range(rng.choice([0, 0, 1, 2]))]
        if self.settings.memory != "kept" and rng.random() < 0.3:
            found += self._hand_over()
        if rng.random() < 0.85:
            below = rng.randrange(4) if self.uses["commits"] and rng.random() < 0.3 else -1
            found.append(Continue(below))
        return found

    def _hand_over(self) -> list[AnyAction]:
        """Draw a release of memory, and most often its resumption."""
        rng = self.rng
        tags: list[MemoryTag] = rng.choice([[], ["kv_cache"], ["weights"], ["kv_cache", "weights"], ["cuda_graph"]])
        found: list[AnyAction] = [Release(tags)]
        if rng.random() < 0.4:
            found.append(Submit(self._ask()))
        if rng.random() < 0.9:
            found.append(Resume(rng.choice([tags, []])))
        if rng.random() < 0.6:
            found.append(Commit(rng.randrange(NUM_CONTENTS), whole=True))
        return found

    def _commit(self) -> Commit:
        rng = self.rng
        return Commit(rng.randrange(NUM_CONTENTS), rng.random() < 0.15, rng.choice([0, 0, 1, 2]))

    # --- requests -------------------------------------------------------------------------------------------------

    def _submit(self) -> Submit:
        """Draw a request, often the next turn of a conversation."""
        rng = self.rng
        return Submit(self._ask(), rng.randrange(64) if self.uses["turns"] and rng.random() < 0.4 else -1)

    def _ask(self) -> Ask:
        rng, uses, shape = self.rng, self.uses, self.shape
        prompt = self._prompt()
        room = min(self.settings.pool, shape.context_length) - len(prompt)
        new = min(rng.choice([0, 1, 2, 5, 8, 12, 16, 20, 30]), room)
        fields: dict[str, Any] = {}
        if uses["keys"]:
            fields["key"] = rng.choice([None, None, "a", "b", "salt\x1f", "salt\x1fa"])
        if uses["sessions"]:
            fields["session"] = rng.choice([None, *_SESSIONS])
        if uses["priorities"]:
            fields["priority"] = rng.choice([0, 0, -1, 2, 5])
        if uses["lags"]:
            fields["lag"] = rng.choice([None, None, -1, 0, 1, 2])
        if shape.is_moe:
            fields["routes"] = rng.random() < 0.7
            fields["routes_start"] = rng.choice([0, 0, rng.randint(0, len(prompt))]) if fields["routes"] else 0
            if uses["replays"] and rng.random() < 0.5:
                fields["replay"] = self._replay(len(prompt) + max(new - 1, 0))
        params = {"max_new_tokens": new, "ignore_eos": rng.random() < 0.6} | self._sampling(new)
        if uses["masks"] and _filters(params) and rng.random() < 0.8:
            fields["mask"] = rng.choice(["selected", "support"])
            fields["mask_ids"] = rng.choice([None, None, None, 8, 100, 600])
        fields |= self._scores(len(prompt))
        count = rng.choice([1, 1, 1, 2, 3, 5])
        first = rng.randrange(1 << 40)
        seeds = [first + index for index in range(count)]
        return Ask(prompt, params, seeds, stream=rng.random() < 0.3, **fields)

    def _prompt(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.bases)
        length = rng.choice([1, 4, 9, 17, 30, 43, rng.randint(1, len(base))])
        if self.is_long:
            length = rng.choice([length, 100, 122, 126, 129, 140, 250, 258, rng.randint(1, len(base))])
        tail = self._tokens(rng.choice([0, 0, 1, 2, 6]))
        return (base[:length] + tail)[: self.longest_prompt]

    def _replay(self, computed: int) -> Replay | None:
        """Return routes of some of the `computed` tokens of a request; they are often the same within a schedule."""
        rng = self.rng
        start = rng.choice([0, 0, 3, rng.randrange(computed)])
        rows = computed - start
        if rows <= 0:
            return None
        return Replay(rng.choice(self.replays), start, rng.choice([rows, rows, min(rows, 4), rng.randint(1, rows)]))

    def _sampling(self, new: int) -> dict[str, Any]:
        rng, uses = self.rng, self.uses
        if self.usual is not None and rng.random() < 0.8:
            params = {"temperature": self.usual.temperature, **self.usual.filters}
        else:
            params = {"temperature": rng.choice([0.0, 0.5, 1.0, 1.0, 1.5])}
            params |= rng.choice([{}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 5}, {"top_k": 40, "top_p": 0.95}])
            params |= rng.choice([{}, {}, {}, {"min_p": 0.02}, {"min_p": 0.2}])
        if uses["penalties"] and rng.random() < 0.5:
            params |= rng.choice(
                [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -1.0}, _ALL_PENALTIES]
            )
        if uses["bias"] and rng.random() < 0.4:
            params["logit_bias"] = {token: rng.choice([-10000.0, 2.0, 5.0]) for token in self._tokens(3)}
        if uses["stops"]:
            if rng.random() < 0.4:
                params["stop_token_ids"] = self._tokens(12)
            if rng.random() < 0.4:
                params["stop"] = ["".join(rng.choices(_LETTERS, k=k)) for k in (1, 1, 1, 1, 1, 1, 2)]
            if rng.random() < 0.3:
                params["min_new_tokens"] = rng.randint(1, new) if new else 0
        return params

    def _scores(self, prompt_len: int) -> dict[str, Any]:
        rng = self.rng
        fields: dict[str, Any] = {"logprobs": rng.random() < 0.8}
        if self.uses["scores"] and fields["logprobs"]:
            fields["scored"] = rng.choice([-1, -1, 0, rng.randint(0, prompt_len)])
            fields["top"] = rng.choice([0, 0, 1, 4])
            fields["chosen"] = self._tokens(rng.choice([0, 0, 3]))
        return fields

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.shape.vocab_size) for _ in range(count)]


_FEATURES = (
    "aborts", "bias", "commits", "flushes", "keys", "lags", "masks", "pauses", "penalties", "priorities", "replays",
    "scores", "sessions", "stops", "turns",
)  # fmt: skip


class _Usual(NamedTuple):
    """The sampling of most requests of a schedule, as of a trainer's, and a limit that few masks exceed."""

    temperature: float
    filters: dict[str, Any]
    mask_limit: int


_USUAL = [
    _Usual(0.5, {"top_p": 0.9}, 17),
    _Usual(1.0, {"top_p": 0.9}, 95),
    _Usual(1.5, {"top_p": 0.9}, 162),
    _Usual(1.0, {"top_p": 0.5}, 14),
    _Usual(1.5, {"top_p": 0.5}, 36),
    _Usual(1.0, {"top_k": 40, "top_p": 0.95}, 35),
    _Usual(1.5, {"min_p": 0.02}, 210),
    _Usual(1.0, {"min_p": 0.2}, 14),
]
_PAUSES: list[PauseMode] = [*["retract"] * 6, *["in_place"] * 3, "abort", "wait", "wait"]  # type: ignore[list-item]
_SESSIONS = ["s", "t"]
_FORMATS: list[Format] = ["w8", "fp8", "int4", "int4-128"]
_LONGEST = {"snapshots": 180, "pages": 400}
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ALL_PENALTIES = {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 1.5}


def _filters(params: dict[str, Any]) -> bool:
    """Return whether tokens are chosen from fewer than all, so that there can be a mask."""
    return params["temperature"] == 0.0 or "top_p" in params or "top_k" in params or "min_p" in params
