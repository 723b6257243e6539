"""`Harness` for an engine of several ranks: a thread a rank over real gloo groups, all taking their turns together.

Replicas are several engines, here of one rank each: each has an inbox of its own, and takes its turns when it can, for
one may wait within its turn for what another does in a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollout.control.weight_control import WeightControl
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    TokenizedGenerateReqInput,
)
from rollout.distributed.layout import layout_of
from rollout.distributed.parallel import MakeTransport, join
from rollout.engine.build import build_scheduler
from rollout.scheduler.channel import LocalChannel
from rollout.scheduler.scheduler import Scheduler
from rollout.tokenizer_manager.communicator import merge_answers
from tests.scheduler_harness import Harness, Result, check_decodes, plain

T = TypeVar("T")
COLLECTIVE_S = 30.0


class ParallelHarness(Harness):
    """A harness of several ranks: `channel` and `scheduler` are rank 0's, `schedulers` all by rank.  Close it.

    `device_transport`: see `join`.
    """

    def __init__(self, model_path: Path | str, device_transport: MakeTransport | None = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float64",
            "max_total_tokens": 4096,
            "random_seed": 1,
            "enable_return_routed_experts": True,
            "num_threads": 1,
        }
        self.args = ServerArgs(model_path=str(model_path), **defaults | settings)
        check_settings(self.args)
        layout, store = layout_of(self.args), dist.HashStore()
        self._replicas = layout.num_replicas
        assert self._replicas in (1, layout.world_size), "replicas are of one rank here"
        self.channels = [LocalChannel() for _ in range(layout.world_size)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank{r}") for r in range(layout.world_size)]
        self.num_dp_ranks = self.args.dp_size

        def build(rank: int) -> Any:
            parallel = join(
                layout,
                rank,
                store,
                timeout_s=COLLECTIVE_S,
                weight_timeout_s=COLLECTIVE_S,
                device_transport=device_transport,
            )
            return build_scheduler(self.args, self.channels[rank], None, parallel)

        built = self._on_all(build)
        self.schedulers: list[Scheduler] = [scheduler for scheduler, _ in built]
        self.scheduler, self.ready = built[0]
        self.channel = self.channels[0]
        config = self.scheduler.runner.state.model.config
        self._route_shape = (len(config.moe_layer_ids), config.num_experts_per_tok)
        self.results, self.answers, self._count = {}, {}, 0
        self._partial: dict[str, list[ControlReqOutput]] = {}

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> ParallelHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, input_ids: list[int], *args: Any, **fields: Any) -> str:
        """Send a request to `dp_rank`, by default to the data-parallel ranks in turn."""
        return super().submit(input_ids, *args, **{"dp_rank": self._count % self.num_dp_ranks} | fields)

    def generate(self, prompts: list[list[int]], params: dict | None = None, **fields: Any) -> list[Result]:
        """Send prompt i to data-parallel rank i modulo their number, so that the same call makes the same steps."""
        rids = [
            self.submit(prompt, params=params, **{"dp_rank": index % self.num_dp_ranks} | fields)
            for index, prompt in enumerate(prompts)
        ]
        self.run()
        return [self.results[rid] for rid in rids]

    def tick(self) -> bool:
        """Run one turn on every rank."""

        def turn(rank: int) -> bool:
            with torch.inference_mode():
                ran = self.schedulers[rank].tick(0)
            check_decodes(self.schedulers[rank])
            return ran

        if self._replicas > 1:
            self._deal()
            ran = self._on_all_until_all_rest(turn)
        else:
            ran = self._on_all(turn)
            assert len(set(ran)) == 1, f"ranks disagree on whether there was a step: {ran}"
        for rank, channel in enumerate(self.channels):
            messages = list(channel.outbox)
            channel.outbox.clear()
            for message in messages:
                self._take(rank, message)
        return any(ran)

    def _deal(self) -> None:
        """Send a request to its replica and any other message to all replicas, as the main process does."""
        inboxes = [channel.inbox for channel in self.channels]
        messages = list(self.channel.inbox)
        self.channel.inbox.clear()
        for message in messages:
            to = [inboxes[message.dp_rank]] if isinstance(message, TokenizedGenerateReqInput) else inboxes
            for inbox in to:
                inbox.append(message)

    def run(self, max_ticks: int = 100_000) -> None:
        for _ in range(max_ticks):
            self.tick()
            if not any(scheduler.has_work for scheduler in self.schedulers) and not self.channel.inbox:
                return
        raise AssertionError(f"still working after {max_ticks} steps")

    def on_each(self, look: Callable[[Scheduler], T]) -> list[T]:
        """Call `look(scheduler)` on every rank's own thread, at once; return the results by rank."""
        return self._on_all(lambda rank: look(self.schedulers[rank]))

    def shorten_deadlines(self, seconds: float) -> None:
        """Shorten the deadlines of collectives, from now on."""
        for scheduler in self.schedulers:
            for communicator in scheduler.parallel.communicators:
                communicator.timeout_s = seconds

    def check_idle(self) -> None:
        for scheduler in self.schedulers:
            assert not scheduler.queues.all() and not scheduler._by_rid
            assert scheduler.cache.num_private == 0
            assert scheduler.cache.prefix_cache.num_locked == 0
            scheduler.cache.check()

    def _take(self, rank: int, message: Any) -> None:
        assert self.schedulers[rank].parallel.position.is_dp_leader, f"rank {rank} sent a result"
        if not isinstance(message, ControlReqOutput):
            self.channel.outbox.append(message)
            self._collect()
            return
        answers = self._partial.setdefault(message.request_id, [])
        answers.append(message)
        if len(answers) == self.num_dp_ranks:
            self.answers[message.request_id] = plain(merge_answers(self._partial.pop(message.request_id)))

    def _on_all_until_all_rest(self, turn: Callable[[int], bool]) -> list[bool]:
        """Run a turn on every rank, and further ones on ranks that are done while another is not."""
        ran = [False] * len(self._threads)
        turns = {rank: thread.submit(turn, rank) for rank, thread in enumerate(self._threads)}
        while True:
            wait(turns.values(), 120, FIRST_COMPLETED)
            for rank in [rank for rank, future in turns.items() if future.done()]:
                ran[rank] |= turns[rank].result()
            if all(future.done() for future in turns.values()):
                return ran
            turns |= {r: self._threads[r].submit(turn, r) for r, future in turns.items() if future.done()}

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        errors = [error for future in futures if (error := future.exception(120)) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def control_of(scheduler: Scheduler) -> WeightControl:
    """Return the object that answers the weight verbs of one rank."""
    control = getattr(scheduler._verbs[ContinueGenerationReqInput], "__self__", None)
    assert isinstance(control, WeightControl)
    return control
