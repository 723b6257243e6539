"""A real engine whose script decides everything that is left to chance elsewhere.

The caller turns the scheduler's loop.  The calls of the engine's I/O thread run in the caller's thread, too, when the
script starts them.  Between the parts of a call the script may turn the loop.  So a history always runs the same way.
"""

from __future__ import annotations

import functools
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from rollout.control import weight_queue
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.message import ControlReqInput
from rollout.engine import build_control
from tests.faults.harness import RefreshHarness
from tests.faults.pulls import Publisher
from tests.history.actions import History, Submit
from tests.history.checker import Checker, Tally, Trace
from tests.history.expected import Expected, Sent, SentContinue, Tensors, Violation

_MAX_TURNS = 2000


class ScriptedExecutor:
    """Stands in for the engine's I/O threads: a call waits until `run`, and runs in the caller's thread."""

    def __init__(self, on_submit: Callable[[], None]) -> None:
        self.running = False
        self._on_submit = on_submit
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()

    @property
    def waits(self) -> bool:
        return bool(self._calls)

    def submit(self, call: Callable[..., Any], *arguments: Any, gives_way: bool = True) -> Future:
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
            raise  # from the checker, or a broken invariant of the engine: never an answer to a verb
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            self.running = False

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing runs here."""


class Driver(RefreshHarness):
    """One engine through one history; its requests are traced, and checked when they finish.

    A context: the engine is under the script's control only inside it.
    """

    sender_timeout_ms = 2000

    def __init__(self, checkpoint: Path, content: Tensors, history: History) -> None:
        self.executor = ScriptedExecutor(self._take_up)
        self.expected = Expected(content, "v0", history.staging)
        self.traces: dict[str, Trace] = {}
        self._checked: set[str] = set()
        self._posted: deque[tuple[str, Sent]] = deque()  # weight verbs that the engine has not taken up
        self._taken: dict[str, Sent] = {}
        self._script = ExitStack()
        with self._script:
            scratch = Path(self._script.enter_context(tempfile.TemporaryDirectory()))
            for thread in ("ThreadPoolExecutor", "IoThread"):
                executor = mock.patch.object(weight_queue, thread, lambda *_, **__: self.executor)
                self._script.enter_context(executor)
            self._script.enter_context(mock.patch.object(build_control, "WeightPace", lambda *_: None))
            super().__init__(
                checkpoint,
                history.staging,
                scratch,
                dtype=history.dtype,
                skip_tokenizer_init=True,
                max_total_tokens=history.pool,
                chunked_prefill_size=history.chunk,
                disable_radix_cache=not history.radix,
                max_running_requests=6,
                context_length=64,
                weight_update_timeout=5.0,
            )
            self._script = self._script.pop_all()
        self.publisher = Publisher(scratch, content)
        self.checker = Checker(self.scheduler.runner.state.model.config, self.expected, history.dtype)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()
        self._script.close()

    def tally(self) -> Tally:
        """Return the tally of this history, now that it is over."""
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
        """Turn the loop once; note what it did, and check the requests that it finished."""
        ran = super().tick()
        for req in self.scheduler.queues.all():
            self.traces[req.rid].advance(self.expected, req.num_retractions, req.device_len, len(req.output_ids))
        for rid, result in self.results.items():
            if result.finished is not None and rid not in self._checked:
                self._checked.add(rid)
                self.traces[rid].end(self.expected, result)
                self.checker.check(result, self.traces[rid])
        return ran

    def lapse(self) -> None:
        self.expected.lapse()
        super().lapse()

    # --- weight verbs ---------------------------------------------------------------------------------------------

    @property
    def is_refreshing(self) -> bool:
        """True while a weight verb is not answered yet."""
        return bool(self._posted or self._taken)

    def post_weights(self, sent: Sent, verb: type[ControlReqInput], **fields: Any) -> None:
        """Send a weight verb; `sent` is what it really brings."""
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
        """Note that the engine starts on the next weight verb."""
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
            self.expected.finish(answer, self.take_failed(), poisoned)
            if isinstance(sent, SentContinue) and answer.success and sent.below is not None:
                for trace in self.traces.values():
                    trace.abort_below(self.expected.labels[sent.below])
        elif "mode" in answer.data:
            self.expected.pause()

    def _append(self, output: Any) -> None:
        super()._append(output)
        self.traces[output.rid].streamed.append((output.num_output_tokens, output.weight_version))
