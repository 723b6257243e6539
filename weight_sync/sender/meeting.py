"""`MeetingPlace`: how engines join groups with this process.

a group for each engine    one that dies or hangs breaks no other one's
one group for all          a broadcast reaches all; one that fails ends it for all, and the others join a new one
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field, replace
from typing import Any

from weight_sync.engine_control import refusal, refusals_of, to_blame
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.process_group import GroupHandle, free_port, init_process_group, leave_late
from weight_sync.sender.carriers import IN_MEMORY, MemoryOffer, Transport, carrier_of
from weight_sync.sender.link import GRACE_S, EngineLink, SenderGroup
from weight_sync.sender.rank_groups import RankGroups, free_ports
from weight_sync.waiting import Patience, in_thread

_ANSWER_S = 5.0
"""For engines to answer that a rendezvous has failed: who is silent then has held it up."""


@dataclass(frozen=True)
class MeetingPlace:
    """The place at which engines join this process.

    `port`: of the first group; None: free ones.  `backend`: a resolved one.  `num_ranks`: how many each engine must
    have; None: any number.  `shared`: all engines join one group.  `transport`: "auto" is shared memory with a group
    in which every engine can read it, and else broadcasts; what is asked for by name is used, or engines do not join.
    """

    address: str
    port: int | None
    group_name: str
    backend: str
    num_ranks: int | None
    shared: bool
    transport: Transport
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def join(self, links: Mapping[str, EngineLink], names: Collection[str]) -> dict[str, BaseException]:
        """Join with the engines of these names, asked all at once; return the errors of the ones that did not come."""
        wait([left for name in names if (left := links[name].leaving) is not None])  # some seconds, after an interrupt
        asked = {name: in_thread(links[name].num_ranks, self.num_ranks) for name in links if name in names}
        wait(asked.values())  # each has a deadline
        failed = refusals_of(asked)
        sizes = {name: call.result() for name, call in asked.items() if name not in failed}
        if self.shared:
            return failed | self._join_together(links, sizes)
        ports = free_ports(len(sizes))
        joining = []
        for position, name in enumerate(links):
            if name in sizes:
                port = ports.pop() if self.port is None else self.port + position
                group_name = self.group_name if len(links) == 1 else f"{self.group_name}-{name}"
                place = replace(self, port=port, group_name=group_name)
                joining.append(({links[name]: sizes[name]}, place))
        return failed | _join_all(joining)

    def _join_together(self, links: Mapping[str, EngineLink], sizes: Mapping[str, int]) -> dict[str, BaseException]:
        """Join one group; again without engines by which an attempt failed.  Each attempt's group has another name."""
        failed: dict[str, BaseException] = {}
        while coming := {links[name]: size for name, size in sizes.items() if name not in failed}:
            attempt = next(self._attempts)
            port = free_port() if self.port is None else self.port
            name = self.group_name if attempt == 1 else f"{self.group_name}#{attempt}"
            if not (lost := _join_all([(coming, replace(self, port=port, group_name=name))])):
                break
            failed |= lost
        return failed


def _join_all(groups: Sequence[tuple[Mapping[EngineLink, int], MeetingPlace]]) -> dict[str, BaseException]:
    """Join groups at the same time, each as `_join`.  An interrupt gives up the ones that are not joined yet."""
    patiences = [Patience() for _ in groups]
    joining = [in_thread(_join, *group, patience) for group, patience in zip(groups, patiences)]
    try:
        wait(joining)  # each has a deadline
    except BaseException:
        for call, patience in zip(joining, patiences):
            if not call.done():  # else it is the patience of a group that works
                patience.give_up("the sender was interrupted")
        wait(joining, timeout=GRACE_S)
        raise
    return {name: error for call in joining for name, error in call.result().items()}


def _join(coming: Mapping[EngineLink, int], place: MeetingPlace, patience: Patience) -> dict[str, BaseException]:
    """Join one group with engines, given with their numbers of ranks, and choose how pieces reach them.

    Returns the errors of the engines that prevented it: then none has joined.  `patience`: cancels it.
    """
    assert place.port is not None
    timeout_s, world_size = max(link.timeout_s for link in coming), 1 + sum(coming.values())
    ends_at = time.monotonic() + timeout_s
    fields: dict[str, Any] = {"master_port": place.port, "world_size": world_size}
    joins: Callable[..., GroupHandle | RankGroups] = init_process_group
    where: tuple[Any, ...] = place.port, 0, world_size
    if any(link.per_rank is not None for link in coming):
        ports = free_ports(world_size - 1)
        fields, joins, where = (
            {"master_port": ports[0], "world_size": 2, "rank_ports": ports},
            RankGroups.join,
            (ports,),
        )
    offer = _offer(coming, place)
    calls = {
        link.name: link.call(
            "init_weights_update_group",
            master_address=place.address,
            rank_offset=offset,
            group_name=place.group_name,
            backend=place.backend,
            **fields,
            **offer.fields,
        )
        for link, offset in zip(coming, itertools.accumulate(coming.values(), initial=1))
    }
    joining = in_thread(joins, place.address, *where, place.group_name, place.backend, timeout_s, patience)
    everything = [*calls.values(), joining]
    wait(everything, timeout=timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
    if all(call.done() and refusal(call) is None for call in everything):
        refused = {link: offer.refused(calls[link.name]) for link in coming}
        is_able = all(link.takes_whole_updates(calls[link.name].result()) for link in coming)
        return _settle(joining.result(), refused, place, takes_whole_updates=is_able)
    own = refusal(joining) if time.monotonic() < ends_at else None
    joining.add_done_callback(leave_late)
    early = refusals_of(calls)
    patience.give_up("an engine did not join")  # the others fail at once
    for link in coming:
        if link.name not in early:  # one that has not come yet would wait for us
            link.call("destroy_weights_update_group", group_name=place.group_name)
    wait(calls.values(), timeout=_ANSWER_S if len(calls) > 1 else 0.0)
    did_not = own or TransportError(f"the engine did not join within {timeout_s:g} s")
    silent = {name: did_not for name, call in calls.items() if not call.done()}
    late = refusals_of(calls)
    return to_blame(late) or silent or early or late or dict.fromkeys(calls, did_not)


def _offer(coming: Collection[EngineLink], place: MeetingPlace) -> MemoryOffer:
    """Return the offer to engines that are asked to join to read memory of this process."""
    lacks = None
    if place.backend != "gloo":
        lacks = "the tensors are on a device"
    elif any(link.per_rank is not None for link in coming):
        lacks = "per_rank has a group for each rank"
    elif old := [link.name for link in coming if not link.takes("init_weights_update_group", "memory")]:
        lacks = f"the control of {old[0]} has no field for it"
    return MemoryOffer(place.transport, lacks)


def _settle(
    handle: GroupHandle | RankGroups,
    refused: Mapping[EngineLink, str | None],
    place: MeetingPlace,
    *,
    takes_whole_updates: bool,
) -> dict[str, BaseException]:
    """Put engines into a group that they have joined; return the errors of engines that cannot do as they must."""
    reason = next(filter(None, refused.values()), None)
    carrier = carrier_of(handle, reads_memory=reason is None)
    group = SenderGroup(handle, list(refused), carrier, takes_whole_updates=takes_whole_updates)
    for link in refused:
        link.group, link.rejoins = group, False
        link.transport = IN_MEMORY if reason is None else f"broadcast ({reason})"
    if reason is None or place.transport != "shared_memory":
        return {}
    group.leave()
    for link in refused:
        link.rejoins = False
    return {
        link.name: WeightRequestError(f"it cannot read this process's memory: {why}; use another transport")
        for link, why in refused.items()
        if why is not None
    }
