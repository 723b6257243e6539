"""The reports of a refresh, while it runs and when it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

from weight_sync.errors import listed
from weight_sync.joint_update import EngineReport

_WIDTH = 30
_REDRAW_S = 0.1


@dataclass(frozen=True)
class RefreshReport:
    """The content sent.  Compare `fingerprints` and `digest` with the engine's to prove what it loaded.

    `parts`: the seconds of this rank, by part.  `plan` (with the comparison of trainer ranks), `fingerprints` and
    `manifest` come before the engines hear of the refresh; then `begin`, `pack` (gathering and packing, while the
    bucket before is on its way), `send` (waiting for buckets to be taken) and `end` (verify and commit).
    On trainer ranks other than the sending one `engines` is empty.
    """

    weight_version: str | None
    num_bytes: int  # of one copy of the content
    seconds: float
    num_buckets: int
    fingerprints: dict[str, str]  # 16 hex digits by name; empty without a manifest
    digest: str | None  # None: not known, or adapters came with the model
    engines: dict[str, EngineReport] = field(default_factory=dict)  # by engine name
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_out(self) -> list[str]:
        """Engines that do not have this version, or did not answer whether they do."""
        return [name for name, engine in self.engines.items() if not engine.committed]

    def __repr__(self) -> str:
        """Return counts in place of the fingerprints, of which a model has thousands."""
        left_out = self.left_out
        engines = f", committed on {len(self.engines) - len(left_out)} of {len(self.engines)} engines"
        return (
            f"<RefreshReport {self.weight_version!r}: {self.num_bytes:,} bytes in {self.num_buckets} buckets, "
            f"{self.seconds:.3f} s, {len(self.fingerprints)} fingerprints, digest {self.digest}"
            f"{engines if self.engines else ''}{f', left out: {listed(left_out)}' if left_out else ''}>"
        )


class ProgressBar:
    """A progress callback that draws a bar on a terminal, and nothing where the stream is not one."""

    def __init__(self, label: str = "refresh", stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar: `done` of `total` bytes are sent."""
        if not self._stream.isatty():
            return
        now = time.monotonic()
        if done < total and now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        share = done / total if total else 1.0
        filled = round(share * _WIDTH)
        rate = done / max(now - self._start, 1e-9) / 1e6
        bar = "█" * filled + "·" * (_WIDTH - filled)
        end = "\n" if done >= total else ""
        self._stream.write(f"\r{self._label} {bar} {share:4.0%} {done / 1e6:,.1f} MB {rate:,.0f} MB/s{end}")
        self._stream.flush()
