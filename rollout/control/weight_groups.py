"""`init_weights_update_group` and `destroy_weights_update_group`: the process groups over which trainers broadcast.

Joining waits for all members on the I/O thread; a rank that joined leaves again where another one could not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import astuple

from rollout.control.weight_queue import Job
from rollout.core.errors import BadRequest
from rollout.core.messages.message import NoReply
from rollout.core.messages.sender_memory import SenderMemory
from rollout.core.messages.weights import DestroyWeightsUpdateGroupReqInput, InitWeightsUpdateGroupReqInput
from rollout.core.messages.whole_update import JoinedReply
from rollout.distributed.layout import RankPosition
from weight_sync.errors import WeightRequestError
from weight_sync.sealed_memory import MemoryAddress, read_token
from weight_sync.update_groups import pair_name
from weight_sync.updater import WeightUpdater


class WeightGroups:
    """Handlers of the two verbs."""

    def __init__(self, updater: WeightUpdater, position: RankPosition) -> None:
        self._updater = updater
        self._position = position

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {InitWeightsUpdateGroupReqInput: self._join, DestroyWeightsUpdateGroupReqInput: self._leave}

    def _join(self, verb: InitWeightsUpdateGroupReqInput) -> Job:
        rank, ports = self._position.world_rank, verb.rank_ports
        if ports is not None and len(ports) != self._updater.ranks:
            raise BadRequest(f"rank_ports has {len(ports)} ports, and the engine has {self._updater.ranks} ranks")

        def io() -> JoinedReply:
            self._updater.groups.init(
                master_address=verb.master_address,
                master_port=verb.master_port if ports is None else ports[rank],
                rank=verb.rank_offset + (rank if ports is None else 0),
                world_size=verb.world_size,
                group_name=verb.group_name,
                backend=verb.backend,
                meets_as=None if ports is None else pair_name(verb.group_name, rank),
            )
            try:
                return JoinedReply(whole_updates=True) if verb.memory is None else self._try_memory(verb.memory)
            except Exception:
                self._updater.groups.destroy(verb.group_name)  # another rank could not join
                raise

        def leave(_: str) -> None:
            self._updater.groups.destroy(verb.group_name)

        def step(reply: JoinedReply) -> tuple[str, JoinedReply]:
            return "Succeeded to initialize custom process group.", reply

        return Job(verb, io, step, roll_back=leave, waits=self._updater.patience, starts_threads=True)

    def _try_memory(self, memory: SenderMemory) -> JoinedReply:
        """Return the token in a sender's memory, or why a rank cannot read it.  Raises as an exchange of the ranks."""
        try:
            mine = f"={read_token(MemoryAddress(*astuple(memory)[:-1]))}"
        except WeightRequestError as error:
            mine = f"!{error}"
        found = [each.decode() for each in self._updater.exchange(mine.encode())]
        refused = [f"rank {rank}: {each[1:]}" for rank, each in enumerate(found) if each.startswith("!")]
        if not refused and len(set(found)) > 1:
            refused = ["the ranks read different memory there"]
        if refused:
            return JoinedReply(whole_updates=True, memory_refused=refused[0])
        return JoinedReply(whole_updates=True, memory_token=found[0][1:])

    def _leave(self, verb: DestroyWeightsUpdateGroupReqInput) -> Job:
        def step(_: None) -> tuple[str, NoReply]:
            return "Succeeded to destroy custom process group.", NoReply()

        return Job(verb, lambda: self._updater.groups.destroy(verb.group_name), step)
