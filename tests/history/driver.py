"""A real engine of which the script decides everything that is left to chance elsewhere.

The scheduler's loop is turned by the caller.  What the engine does on its I/O thread runs in the caller's thread too,
when the script says so; between the parts of a call the script may turn the loop.  Ranks' votes and writes of weights
fail when they are told to.  So a history always runs the same way.
"""

from __future__ import annotations

import functools
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from rollout.control import weight_queue
from rollout.core.io_struct import ControlReqOutput
from rollout.core.message import ControlReqInput
from rollout.engine import build_control
from tests.history.actions import History, Submit
from tests.history.checker import Checker, Tally, Trace
from tests.history.expected import Expected, Sent, SentContinue, Tensors, Violation
from tests.scheduler_harness import Harness
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.updater import WeightUpdater

Failure = Literal["vote_verify", "vote_commit", "write", "restore"]
FAILURES: tuple[Failure, ...] = Failure.__args__  # type: ignore[attr-defined]
_MAX_TURNS = 2000
LEASE_S = 600.0


class ScriptedExecutor:
    """Stands in for the engine's I/O thread: a call waits until `run`, and runs in the caller's thread."""

    def __init__(self, on_submit: Callable[[], None]) -> None:
        self.running = False
        self._on_submit = on_submit
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()

    @property
    def waits(self) -> bool:
        return bool(self._calls)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        self._on_submit()
        future: Future = Future()
        self._calls.append((future, functools.partial(call, *arguments)))
        return future

    def run(self) -> None:
        future, call = self._calls.popleft()
        self.running = True
        try:
            result = call()
        except AssertionError:
            raise  # the checker's, or a broken invariant of the engine: never an answer to a verb
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            self.running = False

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing runs here."""


class Failures:
    """Makes one step of a commit fail, once.  `fired`: what has failed since it was last asked."""

    def __init__(self) -> None:
        self._armed: Failure | None = None
        self._fired: Failure | None = None
        self._writes = 0

    def arm(self, failure: Failure | None) -> None:
        self._armed, self._writes = failure, 0

    def take_fired(self) -> Failure | None:
        fired, self._fired = self._fired, None
        return fired

    def vote(self, mine: bool, verifying: bool) -> bool:
        return mine and not self._fires("vote_verify" if verifying else "vote_commit")

    def before_write(self) -> None:
        self._writes += 1
        if self._fired == "restore" or (self._writes == 2 and (self._fires("write") or self._fires("restore"))):
            raise RuntimeError("a write that was made to fail")

    def _fires(self, failure: Failure) -> bool:
        if self._armed != failure:
            return False
        self._armed, self._fired = None, failure
        return True


class FailingWeights:
    """The model's logical weights, with writes that can fail."""

    def __init__(self, weights: LogicalWeights, failures: Failures) -> None:
        self._weights = weights
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def write(self, name: str, source: torch.Tensor) -> None:
        self._failures.before_write()
        self._weights.write(name, source)


class Driver(Harness):
    """One engine through one history; its requests are traced, and checked when they finish.

    A context: the script's hands are in the engine only inside it.
    """

    updater: WeightUpdater

    def __init__(self, checkpoint: Path, content: Tensors, history: History) -> None:
        self.failures = Failures()
        self.executor = ScriptedExecutor(self._take_up)
        self.expected = Expected(content, "v0", history.staging)
        self.traces: dict[str, Trace] = {}
        self.now = 0.0  # of the clock that leases go by
        self.published: list[Tensors] = [content]  # versions of a source folder, the first the checkpoint
        self.damaged: dict[Path, bytes] = {}  # files of it, and what they should be
        self._checked: set[str] = set()
        self._posted: deque[tuple[str, Sent]] = deque()  # weight verbs that the engine has not taken up
        self._taken: dict[str, Sent] = {}
        self._patches = ExitStack()
        with self._patches:
            self.scratch = Path(self._patches.enter_context(tempfile.TemporaryDirectory()))
            self._patch(build_control, "WeightUpdater", self._make_updater(build_control.WeightUpdater))
            self._patch(weight_queue, "ThreadPoolExecutor", lambda *_, **__: self.executor)
            self._patch(ShadowStaging, "exchange", staticmethod(self._make_exchange(ShadowStaging.exchange)))
            super().__init__(
                checkpoint,
                dtype=history.dtype,
                weight_version="v0",
                skip_tokenizer_init=True,
                max_total_tokens=history.pool,
                chunked_prefill_size=history.chunk,
                disable_radix_cache=not history.radix,
                max_running_requests=6,
                context_length=64,
                weight_staging=history.staging,
                weight_update_timeout=5.0,
            )
            self._patches = self._patches.pop_all()
        self.checker = Checker(self.scheduler.runner.state.model.config, self.expected, history.dtype)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def at_exit(self, call: Callable[[], object]) -> None:
        """Last registered, first called."""
        self._patches.callback(call)

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, replacement))

    def _make_exchange(self, exchange: Callable[..., None]) -> Callable[..., None]:
        def made(live: torch.Tensor, aside: torch.Tensor) -> None:
            self.failures.before_write()
            exchange(live, aside)

        return made

    def _make_updater(self, updater_class: type[WeightUpdater]) -> Callable[..., WeightUpdater]:
        def make(weights: LogicalWeights, **settings: Any) -> WeightUpdater:
            settings["clock"] = lambda: self.now
            settings["vote"] = lambda mine: self.failures.vote(mine, verifying=True)
            settings["commit_vote"] = lambda mine: self.failures.vote(mine, verifying=False)
            failing: Any = FailingWeights(weights, self.failures)
            settings["target"] = lambda _: failing
            self.updater = updater_class(failing, **settings)
            return self.updater

        return make

    def tally(self) -> Tally:
        """Of this history, now that it is over."""
        tally, expected = self.checker.tally, self.expected
        tally.histories, tally.commits = 1, expected.current
        tally.refusals, tally.poisonings = expected.num_refusals, expected.num_poisonings
        return tally

    # --- requests -------------------------------------------------------------------------------------------------

    def start(self, action: Submit) -> None:
        for _ in range(action.samples):
            params = {"max_new_tokens": action.new, "temperature": action.temperature}
            rid = self.submit(
                action.prompt,
                params=params,
                stream=action.stream,
                extra_key=action.key,
                logprob_start_len=action.scored,
                max_kv_version_lag=action.lag,
            )
            self.traces[rid] = Trace(action)

    def tick(self) -> bool:
        """One turn of the loop; then what it did is noted, and what it finished is checked."""
        ran = super().tick()
        for req in self.scheduler.queues.all():
            self.traces[req.rid].advance(self.expected, req.num_retractions, req.device_len, len(req.output.token_ids))
        for rid, result in self.results.items():
            if result.finished is not None and rid not in self._checked:
                self._checked.add(rid)
                self.traces[rid].end(self.expected, result)
                self.checker.check(result, self.traces[rid])
        return ran

    # --- weight verbs ---------------------------------------------------------------------------------------------

    @property
    def is_refreshing(self) -> bool:
        """Whether a weight verb is not answered yet."""
        return bool(self._posted or self._taken)

    def post_weights(self, sent: Sent, verb: type[ControlReqInput], **fields: Any) -> None:
        """Send a weight verb; `sent` says what it really is."""
        self._posted.append((self.post(verb, **fields), sent))

    def finish_weights(self, seam: Callable[[], None]) -> None:
        """Turn the loop until all weight verbs are answered; `seam` is called wherever the engine would wait."""
        for _ in range(_MAX_TURNS):
            self.tick()
            if not self.is_refreshing:
                return
            if self.executor.waits:
                seam()
                self.executor.run()
                seam()
        raise Violation("a weight verb is never answered")

    def _take_up(self) -> None:
        """The engine starts on the next weight verb."""
        self._collect()
        request_id, sent = self._posted.popleft()
        self._taken[request_id] = sent
        self.expected.start(sent, self.scheduler.serving.is_paused)

    def _collect(self) -> None:
        known = set(self.answers)
        super()._collect()
        for request_id in [answer for answer in self.answers if answer not in known]:
            self._answered(self.answers[request_id])

    def _answered(self, answer: ControlReqOutput) -> None:
        sent = self._taken.pop(answer.request_id, None)
        if sent is not None:
            poisoned = self.scheduler.serving.poisoned
            self.expected.finish(answer, self.failures.take_fired(), poisoned)
            if isinstance(sent, SentContinue) and answer.success and sent.below is not None:
                for trace in self.traces.values():
                    trace.abort_below(self.expected.labels[sent.below])
        elif "mode" in answer.data:
            self.expected.pause()

    def _append(self, output: Any) -> None:
        super()._append(output)
        self.traces[output.rid].streamed.append((output.num_output_tokens, output.weight_version))
