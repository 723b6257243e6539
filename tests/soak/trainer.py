"""The trainer: refreshes the server by every transport and in every form, rightly and wrongly, and checks the outcome.

Every refresh brings other values in every tensor, so that a token of one version is not explained by another.  After
each of its calls the trainer looks at the content in force: it must be the old one or one that the trainer sent.  A
right refresh must come into force, unless it has no id and a stranger interfered.  A wrong one never may.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from rollout.client import RolloutClient
from tests.announcements import bucket_fields, manifest_of
from tests.soak.calls import RECEIVE_FAILED, Calls, Ended, Noted
from tests.soak.in_force import InForce, Possible, Tensors, exactly
from tests.soak.samples import Violation
from tests.soak.strangers import PAUSE_MODES, Strangers, resume
from tests.soak.traffic import Traffic
from tests.soak.transports import Folders, Named, Transports
from tests.trainer_process import TrainerProcess
from weight_sync.engine_control import EngineError
from weight_sync.errors import TransportError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender import WeightSender

Content = dict[str, torch.Tensor]

NOISE = 0.15
"""The noise of a new content, relative to each element of the first one."""
SENDER_TIMEOUT_S = 20.0
LEASE_S = 0.2
QUIET_SHARE, QUIET_S = 0.1, 2.0
"""The share of episodes after which one version stays in force, and the seconds of it: requests are repeated then."""
OUTCOMES = ("committed", "aborted", "lost")
FAULTS = ("not a number", "a tensor missing", "wrong fingerprint", "lease runs out", "given up", "wrong base")


@dataclass(frozen=True)
class Refresh:
    """A refresh that was tried.  `right`: it may come into force; `came`: it did; `when`: monotonic time."""

    when: float
    seconds: float
    transport: str
    form: str
    right: bool
    came: bool


class Trainer:
    """Plays one episode at a time, each of which leaves nothing open.  `refreshes`: their results."""

    def __init__(
        self,
        calls: Calls,
        in_force: InForce,
        traffic: Traffic,
        strangers: Strangers,
        *,
        model: Path,
        scratch: Path,
        ranks: int,
        seed: int,
    ) -> None:
        self._calls, self._in_force, self._traffic, self._strangers = calls, in_force, traffic, strangers
        self._scratch, self._ranks = scratch, ranks
        self._rng = random.Random(f"{seed}/trainer")
        self._generator = torch.Generator().manual_seed(seed)
        self._first = dict(in_force.tensors)
        self._number = self._ids = 0
        self._transports = Transports(calls, ranks, lambda: in_force.tensors)
        self._folders = Folders(calls, model, scratch, self._first)
        self._episodes = dict(self._all_episodes())
        self._due: list[str] = []
        self.refreshes: list[Refresh] = []

    def episode(self) -> None:
        """Play the next episode: all by turns, in another order each time.  Raises `Violation`."""
        if not self._due:
            self._due = self._rng.sample(list(self._episodes), len(self._episodes))
        name = self._due.pop()
        try:
            self._episodes[name]()
            if self._rng.random() < QUIET_SHARE:
                time.sleep(QUIET_S)
        except Ended:
            time.sleep(0.5)  # the complaint is noted
        except TransportError as error:
            self._calls.complain(f"{name}: {error}")
        except Violation as violation:
            raise Violation(f"{name}: {violation}") from violation

    def rest(self) -> None:
        """Require that with no other client a good refresh comes into force, with the right tensors in memory.

        Raises `Violation`.
        """
        self._begun("broadcast, flattened")
        self._transports.group.leave()
        self._in_force.look()
        self._in_force.check()

    # --- the list of episodes ----------------------------------------------------------------------------------------

    def _all_episodes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for name in self._transports.sends:
            yield f"{name}, begun", lambda name=name: self._begun(name)
            yield f"{name}, paused", lambda name=name: self._paused(name)
            yield f"{name}, one call", lambda name=name: self.not_paused(name, calls=1)
        for fault in FAULTS:
            yield fault, lambda fault=fault: self._begun(self._any_transport(), fault=fault)
        yield "paused, a tensor missing", lambda: self._paused(self._any_transport(), missing=True)
        yield "calls, not paused", lambda: self.not_paused(self._any_transport(), calls=3)
        yield "some tensors", lambda: self._begun(self._any_transport(), part=True)
        yield "the same name", lambda: self._begun(self._any_transport(), label=self._in_force.label)
        yield "another name", self._rename
        yield "trainer killed", self._killed
        for time_ in ("", ", again"):
            yield f"our sender{time_}", self._sender
            yield f"disk{time_}", lambda: self._folder("disk")
            yield f"xor{time_}", lambda: self._folder("xor")
            yield f"overwrite{time_}", lambda: self._folder("overwrite")
            yield f"ulp-gap{time_}", lambda: self._folder("ulp-gap")
        yield "disk, damaged", lambda: self._folder("disk", damaged=True)
        yield "xor, damaged", lambda: self._folder("xor", damaged=True)

    # --- episodes ----------------------------------------------------------------------------------------------------

    def _begun(self, transport: str, fault: str | None = None, part: bool = False, label: str | None = None) -> None:
        """Play begin, calls, end.  Without an id, another client can meddle with the update once it is begun."""
        rng, label = self._rng, label or self._label()
        new = self._new_content(part)
        bound = fault is not None or part or rng.random() < 0.6
        identity = self._identity() if bound else {}
        begin: dict[str, Any] = {"weight_version": label, "coverage": "partial" if part else "full", **identity}
        if fault == "wrong fingerprint" or (bound and rng.random() < 0.7):
            begin["manifest"] = _manifest(new, wrong=fault == "wrong fingerprint")
        if fault == "wrong base":
            begin["base_version"] = "nobody's"
        if fault == "lease runs out":
            begin["lease_s"] = LEASE_S
        mode = None if rng.random() < 0.4 else rng.choice(PAUSE_MODES)
        right = fault is None
        with self._refresh(transport, fault or "begun", label, new, right=right) as attempt, self._pause(mode):
            begun = self._calls.post("/begin_weight_update", begin)
            if not attempt.note(begun):
                return
            attempt.safe = bound
            for number, bucket in enumerate(self._split(_damaged(new, fault, rng), rng.randint(1, 3))):
                attempt.note(self._transports.sends[transport](bucket, {"weight_version": label, **identity}))
                self._in_force.look(attempt.possible(() if bound else bucket))
                if fault == "lease runs out":
                    time.sleep(3 * LEASE_S)
                if fault == "given up" and number == 0:
                    self._calls.post("/abort_weight_update", identity)
            for phase in ("verify", "commit") if rng.random() < 0.4 else (None,):
                attempt.note(self._calls.post("/end_weight_update", {"phase": phase, **identity}))
            self._in_force.look(attempt.possible())
            if fault is not None:
                self._calls.post("/abort_weight_update", identity)
        if bound:
            self._ask_after(identity, label, came=fault is None)

    def _paused(self, transport: str, missing: bool = False) -> None:
        """Play pause, calls, continue, as a trainer that knows neither begin nor ids."""
        label, new = self._label(), self._new_content()
        sent = _damaged(new, "a tensor missing" if missing else None, self._rng)
        mode = self._rng.choice(PAUSE_MODES)
        with self._refresh(transport, "paused", label, new, right=not missing) as attempt, self._pause(mode):
            for bucket in self._split(sent, self._rng.randint(1, 3)):
                attempt.note(self._transports.sends[transport](bucket, {"weight_version": label}))
                self._in_force.look(attempt.possible(bucket))

    def not_paused(self, transport: str, calls: int) -> None:
        """Play calls outside a pause: each is an update of its own."""
        label, new = self._label(), self._new_content()
        self._calls.post("/abort_weight_update")  # so that the loss of an earlier update is reported
        with self._refresh(transport, "not paused", label, new, right=True) as attempt:
            for bucket in self._split(new, calls):
                attempt.note(self._transports.sends[transport](bucket, {"weight_version": label}))
                self._in_force.look(attempt.possible(bucket))
            if self._in_force.tensors is not attempt.new:
                resume(self._calls)  # a stranger's pause holds it

    def _sender(self) -> None:
        label, new = self._label(), self._new_content()
        client = RolloutClient(self._calls.url, transport=Noted(self._calls, RECEIVE_FAILED))
        sender = WeightSender(client, timeout_s=SENDER_TIMEOUT_S)
        with client, self._refresh("our sender", "begun", label, new, right=True) as attempt:
            try:
                sender.connect()
                with self._pause(self._rng.choice((None, *PAUSE_MODES))):
                    manifest = self._rng.random() < 0.5
                    sender.refresh(
                        new, label, bucket_bytes=self._rng.choice((1 << 16, 1 << 24)), with_manifest=manifest
                    )
            except EngineError as error:
                attempt.refusals.append(str(error))
            finally:
                with contextlib.suppress(EngineError):
                    sender.close()

    def _folder(self, how: str, damaged: bool = False) -> None:
        """Refresh from a checkpoint folder, or by a delta that was published."""
        label = self._label()
        if how == "disk":
            new = self._new_content()
        else:
            new = {**self._folders.published, **self._new_content(part=self._rng.random() < 0.5)}
        mode, form = self._rng.choice((None, None, *PAUSE_MODES)), "damaged" if damaged else "folder"
        with self._refresh(how, form, label, new, right=not damaged) as attempt, self._pause(mode):
            if how == "disk":
                attempt.note(self._folders.load(new, label, damaged=damaged))
            else:
                attempt.note(self._folders.pull(new, label, how, damaged=damaged))
            self._in_force.look(attempt.possible())

    def _killed(self) -> None:
        """Play a trainer whose process ends in the middle of a broadcast."""
        label, new = self._label(), self._new_content()
        first, second = self._split(new, 2)
        identity = self._identity()
        trainer = TrainerProcess(new, self._scratch, engine_ranks=self._ranks)
        try:
            with self._refresh("trainer killed", "killed", label, new, right=False) as attempt:
                trainer.wait_ready()
                joined = self._calls.post("/init_weights_update_group", trainer.join_fields(), may=RECEIVE_FAILED)
                begin = {"weight_version": label, **identity}
                if attempt.note(joined) and attempt.note(self._calls.post("/begin_weight_update", begin)):
                    body = trainer.send([name for name, _ in first]) | identity
                    attempt.note(self._calls.post("/update_weights_from_distributed", body))
                    body |= {name: bucket_fields(second, "", None)[name] for name in ("names", "dtypes", "shapes")}
                    timer = threading.Timer(0.1, trainer.kill)
                    timer.start()
                    answer = self._calls.post("/update_weights_from_distributed", body, may=RECEIVE_FAILED)
                    if attempt.note(answer):
                        self._calls.complain("a bucket of a trainer that was killed was taken")
                    attempt.note(self._calls.post("/end_weight_update", identity))
                    self._calls.post("/abort_weight_update", identity)
                self._calls.post("/destroy_weights_update_group", {"group_name": trainer.group_name})
        finally:
            trainer.close()

    def _rename(self) -> None:
        """Give the weights in force a new name, and abort all requests that began before them."""
        label = self._label()
        body = {"new_version": label, "abort_all_requests": False}
        self._in_force.look()
        if self._calls.post("/update_weight_version", body).status_code == 200:
            self._in_force.renamed()
        self._calls.post("/pause_generation", {"mode": "in_place"})
        with self._traffic.aborting_all():
            self._calls.post("/continue_generation", {"abort_below_weight_version": self._in_force.label})
        resume(self._calls)

    # --- parts of episodes -------------------------------------------------------------------------------------------

    def _ask_after(self, identity: dict[str, Any], label: str, came: bool) -> None:
        """Ask for the outcome of an update by its id.  Raises `Violation` if the answer is not the truth."""
        said = self._calls.get("/weight_update", **identity).json()
        right = (said["outcome"] == "committed") == came and said["outcome"] in OUTCOMES
        if not right or (came and said["weight_version"] != label):
            raise Violation(
                f"{identity} of {label} {'came' if came else 'did not come'} into force, and is said to be {said}"
            )

    @contextmanager
    def _refresh(self, transport: str, form: str, label: str, new: Content, *, right: bool) -> Iterator[_Attempt]:
        """Record one refresh; if it is right it must come into force.  Raises `Violation`."""
        began = time.monotonic()
        attempt = _Attempt(self._in_force, label, new, right)
        yield attempt
        self._in_force.look(attempt.possible())
        self._calls.post("/abort_weight_update")  # nothing is left open
        self._in_force.look(attempt.possible())
        came = self._in_force.tensors is attempt.new
        self.refreshes.append(Refresh(began, time.monotonic() - began, transport, form, right, came))
        excused = not attempt.safe and self._strangers.meddled(began)
        if right and not came and not excused:
            raise Violation(f"{label} is right, and did not come into force: {attempt.refusals}")

    @contextmanager
    def _pause(self, mode: str | None) -> Iterator[None]:
        if mode is None:
            yield
            return
        body = {"mode": mode}
        if mode == "abort":
            with self._traffic.aborting_all():
                self._calls.post("/pause_generation", body)
        else:
            self._calls.post("/pause_generation", body)
        try:
            yield
        finally:
            resume(self._calls)

    def _label(self) -> str:
        self._number += 1
        return f"v{self._number}"

    def _identity(self) -> dict[str, Any]:
        self._ids += 1
        return {"update_id": f"update-{self._ids}"}

    def _any_transport(self) -> str:
        return self._rng.choice(list(self._transports.sends))

    def _new_content(self, part: bool = False) -> Content:
        """Return new values for all tensors, or with `part` for a third of them."""
        new = {}
        for name, tensor in self._first.items():
            noise = torch.randn(tensor.shape, generator=self._generator)
            new[name] = tensor * (1 + NOISE * noise)
        return {name: new[name] for name in self._rng.sample(sorted(new), len(new) // 3)} if part else new

    def _split(self, content: Content, parts: int) -> list[Named]:
        named = self._rng.sample(list(content.items()), len(content))
        return [named[number::parts] for number in range(parts)]


class _Attempt:
    """An attempt at a refresh.  `safe`: no other client can end it any more; `refusals`: the server's refusals."""

    def __init__(self, in_force: InForce, label: str, new: Content, right: bool) -> None:
        self._in_force = in_force
        self._label = label
        self._right = right
        self.new: Tensors = {**in_force.tensors, **new}
        self.safe = False
        self.refusals: list[str] = []

    def note(self, answer: httpx.Response) -> bool:
        """Return whether the call was taken, and keep a refusal."""
        if answer.status_code != 200:
            self.refusals.append(f"{answer.request.url.path}: {answer.status_code} {answer.text[:200]}")
        return answer.status_code == 200

    def possible(self, bucket: Named = ()) -> list[Possible]:
        """Return the contents that may be in force now: the whole, or one bucket that may count on its own."""
        found = [exactly(self.new, self._label)] if self._right else []
        if bucket:
            label = re.escape(self._label) + r"~\d+of\d+"
            found.append(Possible({**self._in_force.tensors, **dict(bucket)}, label))
        return found


def _damaged(content: Content, fault: str | None, rng: random.Random) -> Content:
    name = rng.choice(sorted(content))
    if fault == "a tensor missing":
        return {other: tensor for other, tensor in content.items() if other != name}
    if fault == "not a number":
        spoiled = content[name].clone()
        spoiled.view(-1)[rng.randrange(spoiled.numel())] = torch.nan
        return content | {name: spoiled}
    return content


def _manifest(content: Content, wrong: bool) -> list[dict[str, Any]]:
    """Return the manifest of a content; with `wrong`, one fingerprint does not fit its tensor."""
    entries = manifest_of(content.items())
    if wrong:
        entries[0]["fingerprint"] = fingerprint_hex(fingerprint(next(iter(content.values()))) ^ 1)
    return entries
