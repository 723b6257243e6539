"""`release_memory_occupation`, `resume_memory_occupation`: the state of each memory tag, and whether to serve.

    in use --release--> released --resume--> in use                        (weights: only where a copy was kept)
                           |
                           |------resume---> awaiting refresh --complete refresh--> in use
                           `-----------------complete refresh--> in use; a resume after it has nothing left to do

On CUDA released memory is not there, so a refresh comes after the resume of the weights.

The weights of a draft go and come with the tag `weights`.  Its content is kept in a file and put back, as often no
refresh brings it: a refresh that does so outdates the file.

A verb checks everything before it changes anything.  While memory of a tag is released or the weights have no content,
no step runs and new requests are refused.  A tag that holds no memory stops nothing.  Requests that wait hold no KV,
and go on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollout.control.weight_queue import Job
from rollout.core.console import say
from rollout.core.errors import BadRequest, Conflict, LockstepError, UnsupportedFeature
from rollout.core.messages.io_struct import (
    MemoryTag,
    ReleaseMemoryOccupationReqInput,
    ReleaseReply,
    ResumeMemoryOccupationReqInput,
    ResumeReply,
)
from rollout.memory.memory_saver import TAGS, Group, KeptCopyError, MemorySaver
from rollout.scheduler.scheduler import Scheduler
from weight_sync.content import Digests
from weight_sync.held_memory import HeldMemory
from weight_sync.updater import WeightUpdater

GIVE_BACK_S = 60.0


class MemoryControl:
    """Owner of the tags' state.  `saver` None: the server was started without `--enable-memory-saver`.

    `held`: memory that updates keep for the next one, which is released with the weights.  `keeps_copy`: released
    weights go to a file from which a resume restores them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        updater: WeightUpdater,
        held: HeldMemory,
        saver: MemorySaver | None,
        *,
        keeps_copy: bool,
    ) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._held = held
        self._saver = saver
        self._keeps_copy = keeps_copy
        self._released: set[MemoryTag] = set()
        self._epoch_released: int | None = None  # of the weights without content; None while they have theirs
        self._refreshed_unasked = False  # a refresh filled released weights, and no resume has come since
        self._draft_kept: Digests | None = None  # of the draft whose content is in a file

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {ReleaseMemoryOccupationReqInput: self._release, ResumeMemoryOccupationReqInput: self._resume}

    def status(self) -> dict[str, str]:
        """Return `in_use`, `released` or `awaiting_refresh` for each tag."""
        states: dict[str, str] = {tag: "released" if tag in self._released else "in_use" for tag in TAGS}
        if self._epoch_released is not None and "weights" not in self._released:
            states["weights"] = "awaiting_refresh"
        return states

    # --- verbs ----------------------------------------------------------------------------------------------------

    def _release(self, verb: ReleaseMemoryOccupationReqInput) -> Job:
        self.notice_refresh()
        tags = self._releasable(verb)
        keeps = self._keeps_copy and self._epoch_released is None

        def io() -> None:
            if "weights" in tags:
                self._held.release(GIVE_BACK_S)
                self._keep_copies(also_weights=keeps)

        def keep_none(_: str) -> None:
            if "weights" in tags:
                self._drop_copies()

        def step(_: None) -> tuple[str, ReleaseReply]:
            try:
                self._require_idle()
            except Conflict as error:  # a request came while the copy was being made
                keep_none(str(error))
                raise
            return self._discard(tags)

        return Job(verb, io, step, roll_back=keep_none)

    def _discard(self, tags: list[MemoryTag]) -> tuple[str, ReleaseReply]:
        scheduler, saver = self._scheduler, self._require_saver()
        state = scheduler.runner.state
        with state.mutate("memory release"):
            if "kv_cache" in tags:
                scheduler.cache.flush()
            if "weights" in tags:
                scheduler.serving.lose_content()
                state.drop_digests()
                self._epoch_released = state.epoch.weight_epoch
                self._refreshed_unasked = False
            saver.discard(*_groups(tags))
        self._released.update(tags)
        self._updater.book.clear_loss()
        self._withhold()
        num_bytes = sum(saver.nbytes(group) for group in _groups(tags))
        return f"Released {', '.join(tags)}.", ReleaseReply(released=tags, num_bytes=num_bytes, memory=self.status())

    def _resume(self, verb: ResumeMemoryOccupationReqInput) -> Job:
        self.notice_refresh()
        tags, saver = self._resumable(verb), self._require_saver()

        def give_back(_: str) -> None:
            saver.discard(*_groups(self._released.intersection(tags)))

        def io() -> bool:
            saver.provide(_groups(tags))
            try:
                return "weights" in tags and self._restore()
            except LockstepError as error:  # this rank's, or another one's
                give_back(str(error))
                raise

        def step(restores: bool) -> tuple[str, ResumeReply]:
            if restores:
                saver.drop_copy("weights")  # all ranks have their content
                self._scheduler.serving.regain_content()
                self._epoch_released = None
            if "weights" in tags:
                self._refreshed_unasked = False
                self._drop_draft()
            self._released.difference_update(tags)
            if "kv_cache" in tags:
                self._scheduler.cache.pool.enter_padding()
            self._updater.book.clear_loss()
            withheld = self._withhold()
            message = f"Resumed {', '.join(tags)}." + (f" Not serving yet: {withheld}." if withheld else "")
            return message, ResumeReply(resumed=tags, memory=self.status())

        return Job(verb, io, step, roll_back=give_back)

    def _keep_copies(self, *, also_weights: bool) -> None:
        """Copy the weights of the draft to a file, if a model drafts, and the model's.

        Raises `KeptCopyError`; no copy is there then.
        """
        draft, saver = self._scheduler.runner.state.draft, self._require_saver()
        try:
            if draft is not None and saver.nbytes("draft"):
                saver.keep_copy("draft")
                self._draft_kept = draft.digests
            if also_weights:
                saver.keep_copy("weights")
        except KeptCopyError:
            self._drop_copies()
            raise

    def _restore(self) -> bool:
        """Put the kept weights back, and the draft's; return whether all ranks have a copy of the model's.

        Else none puts it back: one that could not be read is gone, and the ranks serve one content.  Raises
        `KeptCopyError`, and what an exchange raises.
        """
        saver = self._require_saver()
        restores = all(self._updater.exchange(b"kept" if saver.has_copy("weights") else b""))
        if restores:
            saver.restore("weights")
        else:
            saver.drop_copy("weights")
        self._restore_draft()
        return restores

    def _restore_draft(self) -> None:
        """Put the kept weights of the draft back, unless a refresh has brought others.  Raises `KeptCopyError`."""
        draft, saver = self._scheduler.runner.state.draft, self._require_saver()
        if draft is None or draft.digests is not self._draft_kept:
            return
        if saver.has_copy("draft"):
            saver.restore("draft")
        else:
            say("the copy of the draft's weights is lost: until a refresh fewer of its tokens are kept", "WARNING")

    def _drop_copies(self) -> None:
        self._require_saver().drop_copy("weights")
        self._drop_draft()

    def _drop_draft(self) -> None:
        self._require_saver().drop_copy("draft")
        self._draft_kept = None

    # --- what may be done -----------------------------------------------------------------------------------------

    def _releasable(self, verb: ReleaseMemoryOccupationReqInput) -> list[MemoryTag]:
        self._require_saver()
        wanted = _named(verb.tags, [tag for tag in TAGS if tag not in self._released])
        again = [tag for tag in wanted if tag in self._released]
        if again or not wanted:
            raise Conflict(f"already released: {', '.join(again or TAGS)}")
        if "weights" in wanted:
            self._updater.require_none_open("the weights cannot be released")
        self._require_idle()
        return wanted

    def _resumable(self, verb: ResumeMemoryOccupationReqInput) -> list[MemoryTag]:
        saver = self._require_saver()
        known = self._released | ({"weights"} if self._refreshed_unasked else set())
        wanted = _named(verb.tags, [tag for tag in TAGS if tag in known])
        not_released = [tag for tag in wanted if tag not in known]
        if not_released or not wanted:
            raise Conflict(f"not currently released: {', '.join(not_released or TAGS)}")
        if "weights" in wanted and saver.has_copy("weights"):
            self._updater.require_none_open("the kept copy of the weights cannot be put back")
        return wanted

    def _require_saver(self) -> MemorySaver:
        if self._saver is None:
            raise UnsupportedFeature("memory cannot be released: start the server with --enable-memory-saver")
        return self._saver

    def _require_idle(self) -> None:
        scheduler = self._scheduler
        serving = scheduler.serving
        running, waiting = scheduler.num_active(waiting=not (serving.stands_still or serving.is_writing))
        if running or waiting:
            raise Conflict(
                f"memory cannot be released: {running} requests running, {waiting} waiting; let them end, abort them, "
                "or pause generation with mode abort or retract"
            )

    # --- serving --------------------------------------------------------------------------------------------------

    def notice_refresh(self) -> None:
        """Notice a commit into weights without content.

        A complete commit has restored them; any commit outdates the copy.
        """
        if self._epoch_released is None:
            return
        state = self._scheduler.runner.state
        if state.epoch.weight_epoch != self._epoch_released:
            self._epoch_released = state.epoch.weight_epoch
            self._require_saver().drop_copy("weights")
        if not self._scheduler.serving.content_lost:
            self._epoch_released = None
            self._refreshed_unasked = "weights" in self._released
            if self._refreshed_unasked:
                self._restore_unasked()
            self._released.discard("weights")
            self._withhold()

    def _restore_unasked(self) -> None:
        """Put the draft's weights back, as the model serves again before a resume.  On a CPU alone, where it may."""
        try:
            self._restore_draft()
        except KeptCopyError as error:
            say(f"until a refresh fewer tokens of the draft are kept: {error}", "WARNING")
        self._drop_draft()

    def _withhold(self) -> str | None:
        """Withhold service while memory or content is missing.  Returns the reason, None if nothing is missing."""
        reason = None
        without = [tag for tag in TAGS if tag in self._released and self._require_saver().nbytes(tag)]
        if without:
            reason = f"memory is released ({', '.join(without)}); POST /resume_memory_occupation"
        elif self._epoch_released is not None:
            reason = "the weights were released and have no content; send a complete refresh"
        self._scheduler.serving.withhold(reason)
        return reason


def _named(tags: list[MemoryTag] | None, all_tags: list[MemoryTag]) -> list[MemoryTag]:
    """Return the tags that a verb means: the tags that it names, or without a list all that apply.

    Raises `BadRequest` for an empty list, as a computed one may mean nothing or, as in SGLang, all.
    """
    if tags is None:
        return all_tags
    if not tags:
        raise BadRequest("tags is an empty list, which names nothing; leave it out for all")
    return [tag for tag in TAGS if tag in tags]


def _groups(tags: Iterable[MemoryTag]) -> list[Group]:
    """Return the groups of tensors that are released with these tags."""
    return [group for tag in tags for group in (tag, *(("draft",) if tag == "weights" else ()))]
