"""The judge: takes answers and the contents that were in force, explains every sample, and keeps the score.

Answers to repeated requests are compared bit by bit.  Some samples are also offered weights that they do not name,
which must not explain them.  `JudgeProcess` runs the judge in a process apart from the servers and the clients.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rollout.families.registry import load_model_config
from tests.soak.explain import Explainer
from tests.soak.known import Known
from tests.soak.reading import Explanation
from tests.soak.samples import Epoch, Sample, Violation, samples_of

MAX_COMPLAINTS = 20
MAX_BEHIND = 32  # answers
SAY_EVERY_S = 2.0
OTHERS_EVERY = 16  # one sample in this many is offered other weights
OTHERS_TOKENS = 4  # fewer may fit by chance


@dataclass
class Tally:
    """The numbers of things judged.  `complaints` are the first few things that were wrong."""

    samples: int = 0
    tokens: int = 0
    rows: int = 0
    mixed: int = 0  # samples that used more than one epoch
    lives: int = 0  # recomputations of KV under other weights, seen in retracted samples
    retracted: int = 0
    aborted: int = 0
    cached: int = 0  # samples that began in the prefix cache
    scored: int = 0  # prompt log-probabilities
    repeated: int = 0  # samples compared with an earlier one, bit by bit
    undecided: int = 0
    offered: int = 0  # samples offered weights that they do not name
    deceived: int = 0  # and explained by them
    wrong: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, why: object) -> None:
        self.wrong += 1
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(str(why))


class Judge:
    """The judge of answers: it learns of weights in force by `content`, `label` and `forget`; `answer` judges.

    `keep`: a folder for samples found wrong: question, answer, and the weights that the answer names.
    """

    def __init__(self, model: Path, keep: Path | None = None) -> None:
        self._config = load_model_config(model)
        self._keep = keep
        self.known = Known()
        self._explainer = Explainer(self._config, self.known)
        self._firsts: dict[tuple[bytes, Epoch], Sample] = {}
        self.tally = Tally()

    def content(self, epoch: Epoch, label: str, path: Path) -> None:
        """Take the content in force as `epoch` from a safetensors file, and remove the file."""
        self.known.contents[epoch] = load_file(path)
        path.unlink()
        self.known.labels[epoch] = {label}

    def label(self, epoch: Epoch, label: str) -> None:
        """Add one more name of an epoch."""
        self.known.labels[epoch].add(label)

    def forget(self, before: Epoch) -> None:
        """Forget the epochs before this one: no answer will come that used them."""
        for epoch in [epoch for epoch in self.known.contents if epoch < before]:
            del self.known.contents[epoch], self.known.labels[epoch]
        self._firsts = {key: first for key, first in self._firsts.items() if key[1] >= before}
        self._explainer = Explainer(self._config, self.known)

    def answer(self, body: dict[str, Any], answer: bytes, may_abort: Collection[str] | None) -> None:
        """Judge an answer of /generate.  `may_abort`: samples that were aborted by name; None: all were aborted."""
        try:
            samples = samples_of(body, answer)
        except Violation as violation:
            self.tally.complain(violation)
            return
        for sample, explanation in zip(samples, self._explainer.explain(samples)):
            try:
                self._count(sample)
                if sample.finish == "abort" and may_abort is not None and sample.rid not in may_abort:
                    raise Violation("it was aborted, and nobody had asked for it")
                if isinstance(explanation, Violation):
                    raise explanation
                self._take(sample, explanation)
            except Violation as violation:
                self.tally.complain(f"request {sample.rid}: {violation}{self._kept(sample, body, answer)}")

    def _kept(self, sample: Sample, body: dict[str, Any], answer: bytes) -> str:
        """Keep the files for another judgement of the first few wrong samples; return a note of the folder."""
        if self._keep is None or self.tally.wrong >= MAX_COMPLAINTS:
            return ""
        folder = self._keep / sample.rid
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("body.json").write_text(json.dumps(body))
        folder.joinpath("answer.json").write_bytes(answer)
        spans = {*sample.token_spans, *sample.prompt_spans, *sample.row_spans}
        for epoch, labels in self.known.labels.items():
            if any(span.label in labels for span in spans):
                save_file(dict(self.known.contents[epoch]), folder / f"epoch_{epoch}.safetensors")
        return f"; see {folder}"

    def _count(self, sample: Sample) -> None:
        tally = self.tally
        tally.samples += 1
        tally.tokens += len(sample.output_ids)
        tally.rows += len(sample.rows)
        tally.aborted += sample.finish == "abort"
        tally.cached += sample.cached > 0
        tally.retracted += sample.retractions > 0
        tally.scored += len(sample.prompt_logprobs)

    def _take(self, sample: Sample, explanation: Explanation) -> None:
        """Count an explanation, compare the sample with an earlier one, offer it other weights.  Raises `Violation`."""
        tally = self.tally
        tally.mixed += len(explanation.epochs) > 1
        tally.lives += explanation.lives - 1
        tally.undecided += not explanation.decided
        if len(explanation.epochs) == 1 and sample.output_ids:
            (epoch,) = explanation.epochs
            self._compare(sample, epoch)
            self._offer_others(sample, epoch)

    def _compare(self, sample: Sample, epoch: Epoch) -> None:
        """Compare with the first answer to the same question under the same weights, as far as both came."""
        key = sample.question(), epoch
        first = self._firsts.setdefault(key, sample)
        if first is sample:
            return
        self.tally.repeated += 1
        tokens = min(len(first.output_ids), len(sample.output_ids))
        rows = min(len(first.rows), len(sample.rows))
        same = (
            first.output_ids[:tokens] == sample.output_ids[:tokens]
            and first.logprobs[:tokens] == sample.logprobs[:tokens]
            and np.array_equal(first.rows[:rows], sample.rows[:rows])
        )
        if not same:
            raise Violation(f"it is not what {first.rid} was under the same weights, {epoch}")
        if len(sample.output_ids) > len(first.output_ids):
            self._firsts[key] = sample

    def _offer_others(self, sample: Sample, epoch: Epoch) -> None:
        mine = self.known.contents[epoch]
        others = [other for other in self.known.contents if not _same(mine, self.known.contents[other])]
        if not others or len(sample.output_ids) < OTHERS_TOKENS or self.tally.samples % OTHERS_EVERY:
            return
        self.tally.offered += 1
        try:
            self._explainer.explain_as(sample, others[self.tally.offered % len(others)])
        except Violation:
            return
        self.tally.deceived += 1


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class JudgeProcess:
    """A `Judge` in another process, which may be a little behind.  `tally`: its last known score."""

    def __init__(self, model: Path, keep: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._tasks = context.Queue()
        self._tallies = context.Queue()
        self.tally = Tally()
        self._process = context.Process(target=_judge_all, args=(model, keep, self._tasks, self._tallies), daemon=True)
        self._process.start()

    @property
    def behind(self) -> bool:
        """True while too many answers wait for the judge, so that clients should pause."""
        return self._tasks.qsize() > MAX_BEHIND

    def tell(self, what: str, *args: Any) -> None:
        """Call the judge's method of this name, in its process."""
        self._tasks.put((what, args))

    def look(self) -> Tally:
        """Return the judge's score at present."""
        while not self._tallies.empty():
            _, self.tally = self._tallies.get()
        return self.tally

    def finish(self, timeout_s: float) -> Tally:
        """Wait until all is judged, and return the score.  Raises `RuntimeError` if the judge is gone or slow."""
        self._tasks.put(("", ()))
        deadline = time.monotonic() + timeout_s
        is_all = False
        while not is_all:
            if not self._process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the judge does not answer")
            while not self._tallies.empty():
                is_all, self.tally = self._tallies.get()
            time.sleep(0.01)
        return self.tally

    def close(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._tasks.cancel_join_thread()  # closes without waiting for unread tasks


def _judge_all(model: Path, keep: Path | None, tasks: Any, tallies: Any) -> None:
    torch.set_num_threads(1)
    judge, said = Judge(model, keep), time.monotonic()
    for what, args in _until_parent_is_gone(tasks):
        if what:
            getattr(judge, what)(*args)
        if not what or time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            tallies.put((not what, judge.tally))


def _until_parent_is_gone(tasks: Any) -> Iterator[tuple[str, tuple]]:
    parent = multiprocessing.parent_process()
    while True:
        if not tasks.empty():
            yield tasks.get()
        elif parent is not None and not parent.is_alive():
            return
        else:
            time.sleep(0.005)
