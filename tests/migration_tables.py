"""Write the tables of flags in docs/migration: `python -m tests.migration_tables`.

They come from `rollout/core/args/foreign_flags.py`, and so do the parsers that read these flags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rollout.core.args.foreign_flags import (
    ALIASES,
    HARMLESS_VALUES,
    OPPOSITES,
    REFUSED,
    SHORT,
    VALUES_OF_SWITCHES,
    WITHOUT_EFFECT,
)

ROOT = Path(__file__).parents[1]
PAGES = {"sglang": ROOT / "docs" / "migration" / "sglang.md", "vllm": ROOT / "docs" / "migration" / "vllm.md"}
BEGIN, END = "<!-- written by python -m tests.migration_tables -->", "<!-- end -->"
NAMES: dict[str, list[str]] = json.loads((ROOT / "tests" / "recorded" / "launch_flags.json").read_text())
"""Names of all launch flags of SGLang 0.5.23 and vLLM 0.32, and older ones that launch scripts still have."""
NOTES = {
    "tp_size": "at most 8",
    "pp_size": "1 only",
    "dp_size": "without `--enable-dp-attention`: independent engines",
    "mem_fraction_static": "of the free memory, for KV and staging",
    "context_length": "`32k` and `32K` are understood",
    "chunked_prefill_size": "`8k` and `8K` are understood",
    "model_path": "or as the first word",
    "json_model_override_args": "a JSON object",
}
"""Notes on our settings."""


def main() -> None:
    for project, page in PAGES.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{tables(project)}\n{END}{after}", encoding="utf-8")


def tables(project: str) -> str:
    """Return the tables of the flags that `project` has."""
    parts = [*_renamed(project), *_with_values(project), *_unused(project), *_refused(project)]
    return "\n".join(parts)


def _renamed(project: str) -> Iterator[str]:
    yield from ("### Other names of the same setting", "", "| theirs | here | note |", "|---|---|---|")
    for setting, others in ALIASES.items():
        known = [_flag(name) for name in others if name in NAMES[project]]
        known += [f"`{short}`" for short, own in SHORT.items() if project == "vllm" and own == f"--{_dashed(setting)}"]
        if known:
            yield f"| {', '.join(known)} | {_flag(setting)} | {NOTES.get(setting, '')} |"
    for name, setting in OPPOSITES.items():
        if name in NAMES[project]:
            yield f"| {_flag(name)} | the opposite of {_flag(setting)} | |"
    for name, (setting, value) in VALUES_OF_SWITCHES.items():
        if name in NAMES[project]:
            yield f"| {_flag(name)} | `--{_dashed(setting)} {value}` | |"
    yield ""


def _with_values(project: str) -> Iterator[str]:
    yield from ("### Accepted with these values only", "", "| theirs | values |", "|---|---|")
    for name in sorted(HARMLESS_VALUES.keys() & NAMES[project]):
        yield f"| {_flag(name)} | {', '.join(f'`{value}`' for value in sorted(HARMLESS_VALUES[name]))} |"
    yield ""


def _unused(project: str) -> Iterator[str]:
    names = sorted(WITHOUT_EFFECT & set(NAMES[project]))
    yield from ("### Without effect", "", "A warning at the start names them:", "")
    yield ", ".join(_flag(name) for name in names) + "."
    yield ""


def _refused(project: str) -> Iterator[str]:
    names = sorted(REFUSED.keys() & set(NAMES[project]))
    if names:
        yield from ("### Refused with a reason", "", "| theirs | reason |", "|---|---|")
        yield from (f"| {_flag(name)} | {REFUSED[name]} |" for name in names)
        yield ""


def _flag(name: str) -> str:
    return f"`--{_dashed(name)}`"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


if __name__ == "__main__":
    main()
