"""`RowsSoFar`: versions and rows of routes that come with the tokens of a stream, and parts of such records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from rollout.core.errors import LockstepError
from rollout.core.messages.req_output import RoutedExpertsPayload, StreamedRows, VersionSpan


@dataclass(slots=True)
class RowsSoFar:
    """The contents of the `StreamedRows` of a sample, one after the other.

    `head`: the first payload, without its rows.
    """

    versions: list[VersionSpan] = field(default_factory=list)
    route_data: bytearray = field(default_factory=bytearray)
    route_versions: list[VersionSpan] = field(default_factory=list)
    head: RoutedExpertsPayload | None = None
    num_rows: int = 0

    def append(self, rows: StreamedRows) -> None:
        """Take in the rows of one message.  Raises `LockstepError` if rows before them were lost."""
        _extend(self.versions, rows.versions, 0)
        routes = rows.routes
        if routes is None:
            return
        if self.head is None:
            self.head = msgspec.structs.replace(routes, data=b"", num_rows=0, versions=[])
        if routes.num_rows and routes.start != self.head.start + self.num_rows:
            raise LockstepError(
                f"rows of routed experts came from token {routes.start}, not {self.head.start + self.num_rows}"
            )
        _extend(self.route_versions, routes.versions, self.num_rows)
        self.route_data += routes.data
        self.num_rows += routes.num_rows

    @property
    def routes(self) -> RoutedExpertsPayload | None:
        """The rows so far, with data that grows; None if none were asked for."""
        if self.head is None:
            return None
        return msgspec.structs.replace(
            self.head, data=self.route_data, num_rows=self.num_rows, versions=self.route_versions
        )

    def since(self, first: int, position: int) -> RowsSoFar:
        """Return the versions of the output tokens from `first` on, and the rows of the tokens from `position` on."""
        part = RowsSoFar(spans_from(self.versions, first))
        routes = routes_from(self.routes, position)
        if routes is not None:
            part.append(StreamedRows(versions=[], routes=routes))
        return part


def spans_from(spans: Sequence[VersionSpan], first: int) -> list[VersionSpan]:
    """Return the spans of the entries from `first` on."""
    return [msgspec.structs.replace(span, start=max(span.start, first)) for span in spans if span.end > first]


def routes_from(routes: RoutedExpertsPayload | None, position: int) -> RoutedExpertsPayload | None:
    """Return the rows of the tokens from `position` on; there may be none."""
    if routes is None:
        return None
    skipped = min(max(position - routes.start, 0), routes.num_rows)
    row_bytes = len(routes.data) // routes.num_rows if routes.num_rows else 0
    spans = spans_from(routes.versions, skipped)
    return msgspec.structs.replace(
        routes,
        data=bytes(routes.data[skipped * row_bytes :]),  # a copy: the record grows
        num_rows=routes.num_rows - skipped,
        start=routes.start + skipped,
        versions=[msgspec.structs.replace(span, start=span.start - skipped, end=span.end - skipped) for span in spans],
    )


def _extend(spans: list[VersionSpan], more: Sequence[VersionSpan], shift: int) -> None:
    """Append spans, moved by `shift`; a span that goes on with the same weights is joined to the one before."""
    for span in more:
        start, end = span.start + shift, span.end + shift
        last = spans[-1] if spans else None
        weights = (span.version, span.weight_epoch)
        if last is not None and (last.version, last.weight_epoch) == weights and last.end == start:
            spans[-1] = msgspec.structs.replace(last, end=end)
        else:
            spans.append(msgspec.structs.replace(span, start=start, end=end))
