"""Histories in which the base and two adapters change while requests run: every token is explained by its contents.

The judge computes each position with the weights that were in force when its KV was made, with the product of the
request's adapter added, in float64 (`tests.history.reference`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.adapters.peft_folder import read_adapter
from rollout.model.adapters import AdapterTable, PlannedVersion, ServedAdapter
from tests.adapter_updates import Content, abort, begin, bring, end, random_content, with_value
from tests.faults.contents import HISTORY_SHAPE, Contents
from tests.faults.harness import RefreshHarness
from tests.faults.wrong_engines import wrong_engines
from tests.history.checker import CLOSEST, TOLERANCE
from tests.history.reference import MixedReference

NAMES = (None, "a", "b")
NUM_BASES, NUM_ADAPTERS = 3, 6
PROMPTS = ([7, 3, 9, 11], [7, 3, 9, 11, 40, 2, 8], [5, 6])
Key = tuple[int, int]
"""A content of the base, and one of an adapter; -1: none."""


@dataclass
class Followed:
    """A request for adapter `name`: `bases[p]` is the content of the base that computed the KV of position p."""

    name: str | None
    bases: list[int] = field(default_factory=list)


class Merged(Mapping[int, Mapping[str, torch.Tensor]]):
    """The weights of a base with the product of an adapter added, by number of a key."""

    def __init__(self, bases: list[dict[str, torch.Tensor]], adapters: list[Content]) -> None:
        self._bases, self._adapters = bases, [read_adapter(each.folder) for each in adapters]

    def number(self, key: Key) -> int:
        return key[0] * (NUM_ADAPTERS + 1) + key[1] + 1

    def __getitem__(self, number: int) -> Mapping[str, torch.Tensor]:
        base, adapter = divmod(number, NUM_ADAPTERS + 1)
        weights = {name: tensor.double() for name, tensor in self._bases[base].items()}
        for module, (a_RD, b_OR, scale) in self._adapters[adapter - 1].modules.items() if adapter else ():
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b_OR.double() @ a_RD.double())
        return weights

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_BASES * (NUM_ADAPTERS + 1)))

    def __len__(self) -> int:
        return NUM_BASES * (NUM_ADAPTERS + 1)


class World(RefreshHarness):
    """An engine, what has been committed to it, and what each request was computed with."""

    def __init__(self, zoo: Contents, adapters: list[Content], scratch: Path) -> None:
        self.base_of_epoch = [0]
        self.in_force = [(0, {"a": 0, "b": 1})]  # the contents of base and adapters after each commit
        self.given: list[tuple[int, str, int, int]] = []  # commits so far, name, base and adapter of a new request
        self.number_of_digest = {content.digest: number for number, content in enumerate(adapters)}
        self.followed: dict[str, Followed] = {}
        self.claimed: dict[str, Any] = {}
        paths = f"a={adapters[0].folder},b={adapters[1].folder}"
        settings: dict[str, Any] = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 6}
        settings |= {"max_running_requests": 5, "chunked_prefill_size": 4, "max_total_tokens": 96}
        settings |= {"skip_tokenizer_init": True, "context_length": 64, "enable_return_routed_experts": False}
        super().__init__(zoo.checkpoints[0], "host", scratch, **settings)
        self._table = self.scheduler.runner.state.adapters
        self._find, self._table.find = self._table.find, self._noted_find  # type: ignore[method-assign]

    def start(self, name: str | None, prompt: list[int], new: int) -> None:
        rid = self.submit(prompt, params={"max_new_tokens": new, "temperature": 1.0}, lora_name=name)
        self.followed[rid] = Followed(name)

    def tick(self) -> bool:
        before = {req.rid: req.num_retractions for req in self.scheduler.queues.all()}
        ran = super().tick()
        for req in self.scheduler.queues.all():
            bases = self.followed[req.rid].bases
            if req.num_retractions != before.get(req.rid, 0):
                bases.clear()
            bases += [self.base] * (req.device_len - len(bases))
        for rid, result in self.results.items():
            one = self.followed[rid]
            if result.finished is not None:  # in this turn: its last positions are no longer in a queue
                one.bases += [self.base] * (len(result.prompt_ids) + len(result.token_ids) - 1 - len(one.bases))
        return ran

    def commit(self, base: int | None = None, **adapters: int) -> bool:
        """End the open update; return whether it was committed, for want of slots if not."""
        self.base_of_epoch += [] if base is None else [base]
        ended = end(self)
        assert ended.success or "slots are taken" in ended.message, ended.message
        now, names = self.in_force[-1]
        if ended.success:
            self.in_force.append((now if base is None else base, names | adapters))
        elif base is not None:
            self.base_of_epoch.pop()
        return bool(ended.success)

    def _noted_find(self, name: str) -> Any:
        served = self._find(name)
        self.given.append((len(self.in_force), name, self.base, self.number_of_digest[served.label.content_digest]))
        return served

    @property
    def base(self) -> int:
        return self.base_of_epoch[self.scheduler.runner.state.epoch.weight_epoch]

    def _append(self, output: Any) -> None:
        self.claimed.setdefault(output.rid, output.adapter)
        assert self.claimed[output.rid] == output.adapter, "a request keeps its version to its end"
        super()._append(output)


EVENTS = ("submit",) * 4 + ("steps",) * 2 + ("base", "adapter", "adapter", "both", "both", "wrong")
WITHIN_AN_EPOCH = ("submit",) * 4 + ("steps",) * 2 + ("adapter",) * 2


def play(
    world: World, zoo: Contents, adapters: list[Content], seed: int, events: Sequence[str] = EVENTS
) -> dict[str, int]:
    """Play a random history until each of `events` was drawn, for at least 30 turns; return how often what happened."""
    chance, counts = random.Random(seed), dict.fromkeys(("requests", "bases", "adapters", "both", "refused"), 0)
    drawn: list[str] = []
    while len(drawn) < 30 or set(drawn) != set(events):
        drawn.append(what := chance.choice(events))
        if what == "submit":
            world.start(chance.choice(NAMES), chance.choice(PROMPTS), chance.randint(2, 10))
            counts["requests"] += 1
        elif what == "steps":
            for _ in range(chance.randint(1, 4)):
                world.tick()
        elif what == "base":
            number = chance.randrange(NUM_BASES)
            assert begin(world, None).success
            world.tick()
            assert bring(world, list(zoo.contents[number].items())).success and world.commit(number)
            counts["bases"] += 1
        elif what == "both":
            counts["both"] += play_both(world, zoo, adapters, chance)
        else:
            content, name = chance.choice(adapters), chance.choice(NAMES[1:])
            assert begin(world, content.target(name), content.named if chance.random() < 0.5 else None).success
            if what == "wrong":
                named = with_value(content.named, content.named[0][0], float("nan"))
                assert not bring(world, named).success and abort(world).success
                counts["refused"] += 1
                continue
            for part in (content.named[::2], content.named[1::2]):
                assert bring(world, part).success
                world.tick()
            counts["adapters"] += world.commit(**{name: adapters.index(content)})
    world.run()
    return counts


def play_both(world: World, zoo: Contents, adapters: list[Content], chance: random.Random) -> bool:
    """Send a base and an adapter in one update, in mixed buckets; return whether both are in force."""
    base, adapter, name = chance.randrange(NUM_BASES), chance.randrange(NUM_ADAPTERS), chance.choice(NAMES[1:])
    assert name is not None
    named = [*zoo.contents[base].items(), *adapters[adapter].named]
    chance.shuffle(named)
    begun = begin(world, None, named if chance.random() < 0.5 else None, adapters=[adapters[adapter].target(name)])
    assert begun.success, begun.message
    for part in (named[::2], named[1::2]):
        assert bring(world, part).success
        world.tick()
    return world.commit(base, **{name: adapter})


def check_pairs(world: World) -> None:
    """Compare base and adapter of each new request with a commit: the last one, or the one that was under way."""
    for count, name, base, adapter in world.given:
        pairs = [(each, names[name]) for each, names in world.in_force[count - 1 : count + 1]]
        assert (base, adapter) in pairs, f"a request for {name} began with {base, adapter}, in force were {pairs}"


def check(world: World, judge: MixedReference, number: Any) -> int:
    """Compare every token with the judge; return how many were compared."""
    check_pairs(world)
    compared = 0
    for rid, result in world.results.items():
        one, label = world.followed[rid], world.claimed[rid]
        assert (label is None) == (one.name is None) and result.finished is not None
        assert result.finished.reason.status_code is None, result.finished.reason
        adapter = -1 if label is None else world.number_of_digest[label.content_digest]
        sequence = result.prompt_ids + result.token_ids
        output = judge.forward(sequence[:-1], [number((base, adapter)) for base in one.bases])
        if output.margin < CLOSEST["float32"]:
            continue  # the precision leaves open which expert it was
        logprobs_TV, first = output.logits.log_softmax(-1), len(result.prompt_ids) - 1
        for place, (token, claimed) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            near = abs(claimed - float(logprobs_TV[first + place, token]))
            assert near < TOLERANCE["float32"], f"{rid} of {one.name}: token {place} is off by {near}"
        compared += len(result.token_ids)
    return compared


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return Contents(tmp_path_factory.mktemp("zoo"), HISTORY_SHAPE, "float32", NUM_BASES)


@pytest.fixture(scope="module")
def adapters(zoo: Contents, tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [
        random_content(tmp_path_factory.mktemp(f"adapter{seed}") / "a", zoo.contents[0], seed)
        for seed in range(NUM_ADAPTERS)
    ]


def explained(
    zoo: Contents, adapters: list[Content], scratch: Path, seed: int, events: Sequence[str] = EVENTS
) -> tuple[int, dict[str, int]]:
    world = World(zoo, adapters, scratch)
    counts = play(world, zoo, adapters, seed, events)
    world.check_idle()
    merged = Merged(zoo.contents, adapters)
    judge = MixedReference(world.scheduler.runner.state.model.config, merged)
    return check(world, judge, merged.number), counts


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_every_token_is_of_its_base_and_its_adapter(
    zoo: Contents, adapters: list[Content], tmp_path: Path, seed: int
) -> None:
    compared, counts = explained(zoo, adapters, tmp_path, seed)
    assert compared > 20 and min(counts.values()) > 0, (compared, counts)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["labels_an_adapter_that_it_did_not_apply", "shares_kv_between_versions_of_a_name"])
def test_wrong_engines_are_found(zoo: Contents, adapters: list[Content], tmp_path: Path, wrong: str) -> None:
    with wrong_engines("adapters")[wrong](), pytest.raises(AssertionError, match="is off by"):
        for seed in range(1, 4):
            explained(zoo, adapters, tmp_path / str(seed), seed, WITHIN_AN_EPOCH)


@pytest.mark.mutant
def test_an_adapter_that_follows_its_base_a_turn_later_is_noticed(
    zoo: Contents, adapters: list[Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives between the two gets the new base and the old adapter."""
    publish, tick, late = AdapterTable.publish, World.tick, list[Callable[[], object]]()

    def publish_later(table: AdapterTable, planned: PlannedVersion) -> ServedAdapter:
        late.append(lambda: publish(table, planned))
        return ServedAdapter(planned.label, planned.slot)

    def tick_and_publish(world: World) -> bool:
        due = list(late)
        late.clear()
        ran = tick(world)
        for one in due:
            one()
        return ran

    world = World(zoo, adapters, tmp_path)
    monkeypatch.setattr(AdapterTable, "publish", publish_later)
    monkeypatch.setattr(World, "tick", tick_and_publish)
    for number in range(1, NUM_BASES):
        named = [*zoo.contents[number].items(), *adapters[number + 1].named]
        assert begin(world, None, adapters=[adapters[number + 1].target("a")]).success and bring(world, named).success
        assert world.commit(number, a=number + 1)
        world.start("a", PROMPTS[0], 2)
        world.run()
    with pytest.raises(AssertionError, match="in force were"):
        check_pairs(world)
