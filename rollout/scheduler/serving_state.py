"""`ServingState`: whether steps may run and requests may be admitted or begin, and why not.  It owns every gate.

pause       a trainer paused: no step; or it pauses once the requests that have begun have ended: no other begins
withheld    memory is released, or the weights have no content: no step, requests are refused
writing     the model is being written to: no step, requests wait
poisoned    the weights are neither the old nor the new ones: no step, requests are refused
draining    the server shuts down: requests are refused
stopped     nothing runs any more

A step in flight is finished before the gate for steps closes, so that no step is in flight behind a closed gate.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.core.errors import Unavailable


class ServingState:
    """Changed by the verbs' handlers between steps, on the scheduler's thread.

    `finish_step()` finishes the step in flight, if there is one.
    """

    def __init__(self, finish_step: Callable[[], object] = lambda: None) -> None:
        self._finish_step = finish_step
        self._paused = False
        self._pausing = False
        self._was_paused = False
        self._withheld: str | None = None
        self._writing = False
        self._poisoned: str | None = None
        self._content_lost = False
        self._draining = False
        self._stopped = False

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def may_step(self) -> bool:
        return not (self._paused or self._withheld or self._writing or self._poisoned or self._stopped)

    @property
    def may_begin(self) -> bool:
        """True while requests that have not begun may begin; the others go on as long as steps may run."""
        return not self._pausing

    @property
    def stands_still(self) -> bool:
        """True while requests wait for another call (continue, resume, a refresh), not only for a write under way."""
        return self._paused or self._withheld is not None

    def require_weights(self) -> None:
        """Raise `Unavailable` while the weights are poisoned."""
        if self._poisoned is not None:
            raise Unavailable(f"the weights are poisoned: {self._poisoned}; send a complete refresh")

    def require_admission(self) -> None:
        """Raise `Unavailable`, with the reason, if a new request could not be served."""
        self.require_weights()
        if self._withheld is not None:
            raise Unavailable(self._withheld)
        if self._draining:
            raise Unavailable("the server is shutting down")

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def is_pausing(self) -> bool:
        return self._pausing

    @property
    def was_paused(self) -> bool:
        """True if generation was paused before the last pause that waited."""
        return self._was_paused

    @property
    def withheld(self) -> str | None:
        """The reason why nothing is served although generation is not paused; None if there is no such reason."""
        return self._withheld

    @property
    def is_writing(self) -> bool:
        return self._writing

    @property
    def poisoned(self) -> str | None:
        """The reason why the weights are neither the old nor the new ones."""
        return self._poisoned

    @property
    def content_lost(self) -> bool:
        """True if the weights' memory was released without a copy."""
        return self._content_lost

    @property
    def has_whole_weights(self) -> bool:
        """True while memory holds the weights of the published version."""
        return self._poisoned is None and not self._content_lost

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    # --- changes --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._finish_step()
        self._paused, self._pausing = True, False

    def pause_once_ended(self) -> None:
        """Let steps go on for the requests that have begun; `pause` follows when they have ended."""
        if not self._pausing:
            self._was_paused = self._paused
        self._paused, self._pausing = False, True

    def give_up_pause(self) -> None:
        """Restore the state before `pause_once_ended`."""
        self._paused, self._pausing = self._was_paused, False

    def resume(self) -> None:
        self._paused = self._pausing = False

    def withhold(self, reason: str | None) -> None:
        """Stop serving for `reason`; None: serve again."""
        if reason is not None:
            self._finish_step()
        self._withheld = reason

    def write(self, is_writing: bool) -> None:
        if is_writing:
            self._finish_step()
        self._writing = is_writing

    def poison(self, reason: str) -> None:
        self._finish_step()
        self._poisoned = reason

    def lose_content(self) -> None:
        self._content_lost = True

    def regain_content(self) -> None:
        """Note that the lost weights were restored, bit for bit."""
        self._content_lost = False

    def heal(self) -> None:
        """Note that a complete refresh was committed."""
        self._poisoned, self._content_lost = None, False

    def drain(self) -> None:
        self._draining = True

    def stop(self) -> None:
        self._finish_step()
        self._stopped = True
