"""Two trainers at one engine: whatever the second does, the first one's update holds what the first one sent."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from tests.abuse import aftermath
from tests.abuse.good import payload, tensors_of
from tests.abuse.registry import KEYED, OPEN, RANKS, attack
from tests.abuse.server import Harmed, Victim

TENSORS = "/update_weights_from_tensor"


@attack(OPEN, KEYED, RANKS, seconds=60.0, restores=True, quick=True)
def a_second_trainer(victim: Victim) -> str:
    """Send another trainer's calls into an update that has an id: all are refused, and the update stays intact."""
    first, second = f"a-{uuid.uuid4().hex[:8]}", f"b-{uuid.uuid4().hex[:8]}"
    parts, noise = _parts(victim), _noise(victim)
    digest = aftermath.checksum(victim)
    begun = victim.right("POST", "/begin_weight_update", {"weight_version": "a", "update_id": first}).json()
    if begun.get("update_id") != first:
        raise Harmed(f"begin answers the update id {begun.get('update_id')!r}")
    victim.right("POST", "/begin_weight_update", {"weight_version": "a", "update_id": first})  # asked again
    for number, part in enumerate(parts):
        _refused(victim, "/begin_weight_update", weight_version="b")
        _refused(victim, "/begin_weight_update", weight_version="b", update_id=second)
        for label in (None, "a", "b"):
            _refused(victim, TENSORS, **_bucket(noise[number]), weight_version=label, update_id=second)
            _refused(victim, TENSORS, **_bucket(noise[number]), weight_version=label)
        _refused(victim, "/end_weight_update", update_id=second)
        _refused(victim, "/end_weight_update")
        _refused(victim, "/abort_weight_update", update_id=second)
        _refused(victim, "/abort_weight_update")
        victim.right("POST", TENSORS, {**_bucket(part), "update_id": first})
    ended = victim.right("POST", "/end_weight_update", {"update_id": first}).json()
    again = victim.right("POST", "/end_weight_update", {"update_id": first}).json()
    if again != ended:
        victim.complain(f"the end, asked again: {again} after {ended}")
    if aftermath.checksum(victim) != digest:
        raise Harmed("what the second trainer sent is in force")
    return f"{len(parts)} buckets"


@attack(OPEN, RANKS, seconds=60.0, restores=True, quick=True)
def late_buckets_of_a_lost_update(victim: Victim) -> str:
    """Send buckets after the lease has expired, and abort others: none of them ever comes into force."""
    import time

    digest = aftermath.checksum(victim)
    noise = _noise(victim)
    for how in ("lease", "abort"):
        for label in ("late", None):
            begin: dict[str, Any] = {"weight_version": "late", "lease_s": 0.5}
            victim.right("POST", "/begin_weight_update", begin)
            victim.right("POST", TENSORS, {**_bucket(noise[0]), "weight_version": label})
            if how == "lease":
                time.sleep(0.8)
            else:
                victim.right("POST", "/abort_weight_update", {})
            for part in noise[1:] if how == "lease" else ():
                _refused(victim, TENSORS, **_bucket(part), weight_version=label)
            victim.post("/abort_weight_update")
    if aftermath.checksum(victim) != digest:
        raise Harmed("late buckets are in force")
    return ""


@attack(OPEN, seconds=60.0, restores=True, quick=True)
def a_stranger_continues_between_buckets(victim: Victim) -> str:
    """Continue twice between the buckets of a trainer without begin and end: no mixture gets the trainer's label."""
    victim.right("POST", "/pause_generation", {"mode": "in_place"})
    noise = _noise(victim)
    victim.right("POST", TENSORS, {**_bucket(noise[0]), "weight_version": "mixed"})
    for _ in range(2):
        victim.post("/continue_generation")
    answers = [victim.post(TENSORS, **_bucket(part), weight_version="mixed") for part in noise[1:]]
    taken = sum(answer is not None and answer.status_code == 200 for answer in answers)
    version = victim.right("GET", "/weight_version").json()["weight_version"]
    if version == "mixed":
        raise Harmed(f"{taken} of {len(noise)} buckets are in force as the whole version")
    return f"{taken} late buckets taken, served as {version}"


def _parts(victim: Victim, number: int = 4) -> list[dict[str, torch.Tensor]]:
    tensors = sorted(tensors_of(victim.model).items())
    return [dict(tensors[start::number]) for start in range(number)]


def _noise(victim: Victim) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.randn_like(tensor) for name, tensor in part.items()} for part in _parts(victim)]


def _bucket(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"serialized_named_tensors": [payload(tensors)], "format": "safetensors"}


def _refused(victim: Victim, path: str, **body: Any) -> None:
    response = victim.post(path, **body)
    if response is not None and response.status_code != 409:
        said = {name: value for name, value in body.items() if name not in ("serialized_named_tensors", "format")}
        victim.complain(f"{path} {said}: {response.status_code} {response.text[:100]}, where 409 is promised")
