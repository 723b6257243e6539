"""The table of a soak: its load, the results, and everything that is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.core.messages.message import WEIGHT_MARGIN_S
from tests.abuse.usage import MB
from tests.soak.gauges import Growth, descriptor_growth, memory_growth
from tests.soak.play import SETTINGS, Played
from tests.soak.reading import TOLERANCE

WIDTH = 150
MAX_UNDECIDED = 0.01
MAX_DECEIVED = 0.01
LOG_BYTES_A_CALL = 100
DEADLINE_S = SETTINGS["weight_update_timeout"] + WEIGHT_MARGIN_S
FULL_S = 240.0
"""Seconds after which a layout has played everything at least once."""


@dataclass(frozen=True)
class Fact:
    """A row of the table; `ok` is None for a fact without a bound."""

    name: str
    value: str
    bound: str = ""
    ok: bool | None = None


def facts(played: Played) -> Iterator[Fact]:
    """Yield the facts in the order of the table; every layout has the same names."""
    yield Fact("minutes", f"{played.seconds / 60:.1f}")
    yield from _load(played)
    yield from _explained(played)
    yield from _refreshed(played)
    yield from _answers(played)
    yield from _at_rest(played)


def _load(played: Played) -> Iterator[Fact]:
    tally, requests = played.tally, played.requests
    kinds = (
        "groups",
        "conversations",
        "repeated",
        "long",
        "streams",
        "given up",
        "aborted by name",
        "keys of their own",
    )
    yield Fact("groups of samples, conversations, repeated, long", ", ".join(str(requests[each]) for each in kinds[:4]))
    yield Fact("streams, given up, aborted by name, keys of their own", ", ".join(str(requests[k]) for k in kinds[4:]))
    yield Fact("tokens generated", str(played.generated))
    yield Fact(
        "samples retracted, aborted, begun in the prefix cache", f"{tally.retracted}, {tally.aborted}, {tally.cached}"
    )


def _explained(played: Played) -> Iterator[Fact]:
    tally = played.tally
    right = tally.samples - tally.wrong
    yield Fact("samples explained", f"{right} of {tally.samples}", "all", tally.samples > 0 and tally.wrong == 0)
    yield Fact("their tokens, rows, prompt log-probabilities", f"{tally.tokens}, {tally.rows}, {tally.scored}")
    yield Fact("of several versions, with KV computed again", f"{tally.mixed}, {tally.lives}")
    share = tally.undecided / max(tally.samples, 1)
    yield Fact(
        "of them with a tie that nobody can decide", f"{share:.2%}", f"<= {MAX_UNDECIDED:.0%}", share <= MAX_UNDECIDED
    )
    yield Fact("repeated, equal to the bit", str(tally.repeated), "all", tally.wrong == 0)
    deceived = tally.deceived / max(tally.offered, 1)
    yield Fact(
        "explained by other weights, of those offered",
        f"{tally.deceived} of {tally.offered}",
        f"<= {MAX_DECEIVED:.0%}",
        deceived <= MAX_DECEIVED,
    )


def _refreshed(played: Played) -> Iterator[Fact]:
    came = [refresh for refresh in played.refreshes if refresh.came]
    yield Fact("refreshes tried, commits", f"{len(played.refreshes)}, {played.commits}")
    tried = {refresh.transport for refresh in played.refreshes if refresh.right}
    brought = {refresh.transport for refresh in came}
    full = played.seconds >= FULL_S
    yield Fact(
        "transports that brought weights",
        f"{len(brought)} of {len(tried)}",
        "all" if full else "",
        brought >= tried if full else None,
    )
    wrong = [refresh for refresh in played.refreshes if not refresh.right]
    forms = len({refresh.form for refresh in wrong})
    through = sum(refresh.came for refresh in wrong)
    yield Fact("made to fail, ways, in force all the same", f"{len(wrong)}, {forms}, {through}", "none", through == 0)
    yield Fact("deeds of strangers", str(sum(played.strangers.values())))
    yield Fact("seconds of a refresh, median, longest", _median_and_most([refresh.seconds for refresh in came], 2))
    steps = [step for step in played.curves.step_ms if step is not None]
    yield Fact("milliseconds of a step, median, longest second's", _median_and_most(steps, 1))


def _answers(played: Played) -> Iterator[Fact]:
    calls = played.calls
    statuses = calls.statuses if calls is not None else {}
    named = sum(count for (_, status), count in statuses.items() if status >= 500)
    yield Fact("calls answered", str(sum(statuses.values())))
    yield Fact("answers of 502: receives that were ended", str(named))
    verbs = (
        {path: seconds for path, seconds in calls.longest.items() if path != "/generate"} if calls is not None else {}
    )
    slowest = max(verbs, key=verbs.__getitem__, default="")
    seconds = verbs.get(slowest, 0.0)
    on_time = seconds <= DEADLINE_S
    late = "" if on_time else f" {slowest}"
    yield Fact("longest answer but of /generate, s", f"{seconds:.1f}{late}", f"<= {DEADLINE_S:g}", on_time)
    wrong = calls.num_wrong if calls is not None else 1
    yield Fact("wrong answers, broken connections", str(wrong), "none", wrong == 0)
    yield Fact("anything else that is wrong", str(len(played.wrong)), "nothing", not played.wrong)


def _at_rest(played: Played) -> Iterator[Fact]:
    rest = [usage for _, usage in played.curves.rest]
    yield Fact("rests with no request and no KV slot in use", str(len(rest)), "all", bool(rest))
    if rest:
        yield _grown("memory at rest, MB, early, late", memory_growth(rest), MB)
        yield _grown("descriptors at rest, early, late", descriptor_growth(rest, played.layout.ranks), 1)
    calls = sum(played.calls.statuses.values()) if played.calls is not None else 0
    most = 4096 + LOG_BYTES_A_CALL * calls
    yield Fact("log, bytes", str(played.log_bytes), f"<= {most}", played.log_bytes <= most)
    yield Fact("tracebacks in the log", str(played.tracebacks), "none", played.tracebacks == 0)
    yield Fact("files left behind", str(len(played.left_files)), "none", not played.left_files)
    yield Fact("exit status", str(played.exit_status), "0", played.exit_status == 0)


def _grown(name: str, growth: Growth, unit: int) -> Fact:
    return Fact(
        name, f"{growth.early / unit:.0f}, {growth.late / unit:.0f}", f"<= +{growth.most / unit:.0f}", growth.ok
    )


def _median_and_most(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}, {max(values):.{digits}f}" if values else "-"


def complaints(played: Played) -> list[str]:
    """Return the first few complaints of each kind, in words."""
    calls = played.calls.complaints if played.calls is not None else []
    return [f"{played.layout.name}: {each}" for each in [*played.wrong, *played.tally.complaints, *calls]]


def print_report(soaked: Sequence[Played], console: Console) -> bool:
    """Print the table and all complaints; return whether all is as it must be."""
    columns = [list(facts(played)) for played in soaked]
    table = Table(title=f"Soak: samples explained in float64 to {TOLERANCE:g} nats")
    table.add_column("fact", overflow="fold")
    for played in soaked:
        table.add_column(played.layout.name, justify="right")
        table.add_column("bound", justify="right")
        table.add_column("check")
    for row in zip(*columns):
        cells = [cell for fact in row for cell in (Text(fact.value), Text(fact.bound), _verdict(fact.ok))]
        table.add_row(Text(row[0].name), *cells)
    console.print(table)
    for played in soaked:
        for line in complaints(played):
            console.print(f"WRONG {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    return all(fact.ok is not False for column in columns for fact in column)


def markdown(soaked: Sequence[Played]) -> str:
    """Return the same table in Markdown, for the docs."""
    columns = [list(facts(played)) for played in soaked]
    lines = ["| " + " | ".join(["fact", *[f"{each.layout.name} | bound" for each in soaked]]) + " |"]
    lines.append("|---" * (1 + 2 * len(soaked)) + "|")
    for row in zip(*columns):
        lines.append("| " + " | ".join([row[0].name, *[f"{fact.value} | {fact.bound}" for fact in row]]) + " |")
    return "\n".join(lines) + "\n"


def _verdict(ok: bool | None) -> Text:
    if ok is None:
        return Text("")
    return Text("ok", style="green") if ok else Text("WRONG", style="bold red")
