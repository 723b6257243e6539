"""Check commit messages: `python -m tests.commits FILE` for git's hook, `python -m tests.commits A..B` for a range.

A subject is imperative, has at most 72 characters and names one change.  A body gives the reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_SUBJECT = 72
MAX_LINE = 80
"""Characters of a line of the body that can be broken."""
IMPERATIVE_ALL_THE_SAME = {"Address", "Bring", "Bypass", "Compress", "Discuss", "Embed", "Express", "Feed", "Focus",
                           "Guess", "Need", "Pass", "Press", "Process", "Ring", "Seed", "Shed", "Speed", "Spring",
                           "String", "Suppress", "Swing"}  # fmt: skip
_GIT_MAKES = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def problems(message: str) -> list[str]:
    """Return the rules that a message breaks, each as a sentence."""
    kept = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    lines = "\n".join(kept).strip().splitlines()
    if not lines:
        return ["the message is empty"]
    subject, first = lines[0], re.split(r"[\s:]", lines[0])[0]
    if subject.startswith(_GIT_MAKES):
        return []
    found = []
    if len(subject) > MAX_SUBJECT:
        found.append(f"the subject has {len(subject)} characters: at most {MAX_SUBJECT}")
    if ";" in subject:
        found.append("the subject has a semicolon: one change a commit")
    if subject.endswith("."):
        found.append("the subject ends with a period: leave it out")
    if not _is_imperative(first):
        found.append(f"the subject begins with {first!r}: begin with a verb in the imperative, as 'Add' or 'Fix'")
    if len(lines) > 1 and lines[1]:
        found.append("the second line is not empty")
    if len([line for line in lines[1:] if line]) == 0:
        found.append("there is no body: say why")
    if any(len(line) > MAX_LINE and " " in line.strip() for line in lines[2:]):
        found.append(f"a line of the body has over {MAX_LINE} characters: break it")
    return found


def _is_imperative(word: str) -> bool:
    """Judge the form of a word: a capital, then letters, without the ending of another form of a verb."""
    if word in IMPERATIVE_ALL_THE_SAME:
        return True
    return re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) is not None and not word.endswith(("s", "ed", "ing"))


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print(__doc__)
        return 2
    path = Path(words[0])
    if path.is_file() or ".." not in words[0]:
        found = problems(path.read_text(encoding="utf-8"))
        print(*(f"commit message: {problem}" for problem in found), sep="\n", end="\n" if found else "")
        return bool(found)
    command = ["git", "log", "--no-merges", "--format=%h%n%B%x00", words[0]]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    status = 0
    for entry in filter(None, map(str.strip, log.split("\0"))):
        name, _, message = entry.partition("\n")
        for problem in problems(message):
            print(f"{name} {message.splitlines()[0]}: {problem}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
