"""The fenced blocks of the pages: they parse, their marks are known, and few of them are not run."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import markdown, marks, story
from tests.pages.markdown import ROOT, Block

MAX_NOT_RUN = 43
"""Blocks of commands or Python that no test runs.  The number only falls."""
BLOCKS = [
    block
    for path in markdown.pages()
    for block in markdown.blocks(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
]


def block(language: str, text: str, mark: str = "") -> Block:
    return Block("docs/page.md", 1, language, mark, text)


def test_every_block_is_what_its_fence_and_its_mark_call_it() -> None:
    assert [f"{one.place}: {reason}" for one in BLOCKS if (reason := marks.objection(one))] == []


def test_commands_have_one_name_of_their_language() -> None:
    others = {"sh", "shell", "console", "zsh", "py", "python3", "yml"}
    assert [one.place for one in BLOCKS if one.language in others] == []
    assert [
        one.place for one in BLOCKS if not one.language and one.text.startswith(("lockstep serve --", "curl ", "$ "))
    ] == []


def test_few_blocks_are_not_run_and_each_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = [one for one in BLOCKS if marks.kind(one) == marks.NOT_RUN]
    with capsys.disabled():
        print("", *(f"{one.place} is not run: {marks.text_of(one)}" for one in skipped), sep="\n    ")
    assert len(skipped) == MAX_NOT_RUN, "let MAX_NOT_RUN fall with the number of blocks that are not run"


def objections_of_make(text: str) -> list[str]:
    """List the lines of a block that make refuses, and the variables whose value reaches no command of it."""
    found = []
    for line in text.splitlines():
        if line.startswith("make "):
            words = shlex.split(line, comments=True)
            planned = subprocess.run([*words, "--dry-run", "--always-make"], cwd=ROOT, capture_output=True, text=True)
            values = [word.partition("=")[2] for word in words if "=" in word]
            if planned.returncode != 0 or any(value not in planned.stdout for value in values):
                found.append(f"{line}: {planned.stderr}")
    return found


def test_make_has_the_targets_and_variables_of_the_pages() -> None:
    """Hold also the commands that no page runs: trainings of minutes, and installations."""
    assert [objection for one in BLOCKS if one.language == "bash" for objection in objections_of_make(one.text)] == []


@pytest.mark.parametrize("wrong", ["make example-gro", "make example-grpo STEP=7177  # no such variable"])
def test_a_wrong_command_of_make_is_noticed(wrong: str) -> None:
    assert objections_of_make(f"cd .\n{wrong}\n")


@pytest.mark.parametrize(
    "wrong",
    [
        block("bash", "if true\n"),
        block("python", "print(\n"),
        block("json", '{"a": ...}'),
        block("yaml", "a: [1"),
        block("toml", "a = "),
        block("bash", "true\n", "not run:"),
        block("bash", "true\n", "run by: tests/no_such_test.py"),
        block("bash", "true\n", "not tun: a typo"),
    ],
    ids=["bash", "python", "json", "yaml", "toml", "no reason", "no test", "no mark"],
)
def test_a_block_that_is_wrong_is_noticed(wrong: Block) -> None:
    assert marks.objection(wrong)


def test_blocks_of_a_page_are_read_with_lines_and_marks() -> None:
    source = "# A\n<!-- not run: needs a GPU -->\n```bash\nx\n```\n\n````text\n```\n````\n"
    source += "<!-- page: server --dp-size 2 -->\n"
    found = list(markdown.blocks("p.md", source))
    assert [(one.line, one.language, one.mark, one.text) for one in found] == [
        (3, "bash", "not run: needs a GPU", "x\n"),
        (7, "text", "", "```\n"),
    ]
    assert markdown.page_mark(source) == "server --dp-size 2"
    with pytest.raises(ValueError, match="has no end"):
        list(markdown.blocks("p.md", "```bash\nx\n"))


def test_ports_of_the_servers_of_a_script_are_found() -> None:
    script = (
        "# lockstep serve --port 1\nlockstep serve --help\nA=1 lockstep serve m \\\n  --port 5 &\nlockstep serve m\n"
    )
    assert story.ports_of_servers(script) == {5, 30000}
    assert story.ports_of_servers("lockstep make-checkpoint serve\n") == set()


def run(tmp_path: Path, *blocks: Block) -> None:
    current = story.Story(tmp_path)
    main = sys.modules["__main__"]
    try:
        for one in blocks:
            current.run(one)
    finally:
        current.close()
        sys.modules["__main__"] = main


def test_blocks_of_a_page_share_folder_and_names(tmp_path: Path) -> None:
    written = block("python", "print(open('a').read())\n", "file: made/b.py")
    run(
        tmp_path, block("bash", "echo 1 > a\n"), block("python", "x = 2\n"), block("python", "assert x == 2\n"), written
    )
    assert (tmp_path / "a").read_text() == "1\n" and (tmp_path / "made" / "b.py").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (block("bash", "false\ntrue\n"), "status 1"),
        (block("bash", "false | true\n"), "status 1"),
        (block("bash", "echo $no_such_name\n"), "status"),
        (block("python", "\n\nlogprobs[0]\n"), "line 4, in <module>"),
        (block("python", "raise SystemExit(0)\n"), "SystemExit"),
        (block("bash", "exit 3\nlockstep serve m\n"), "no server was ready"),
    ],
    ids=["first of two", "pipe", "unset", "undefined", "exit", "no server"],
)
def test_a_block_that_does_not_do_what_it_shows_ends_its_page(tmp_path: Path, wrong: Block, message: str) -> None:
    with pytest.raises(story.BlockFailed, match=message):
        run(tmp_path, wrong)


def test_a_block_that_is_not_run_may_be_anything(tmp_path: Path) -> None:
    run(tmp_path, block("bash", "false\n", "not run: so"), block("bash", "false\n", "run by: tests/other.py"))


def test_a_file_outside_the_folder_of_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        run(tmp_path, block("python", "\n", "file: ../b.py"))


def test_a_page_has_a_network_of_its_own_where_the_system_gives_one() -> None:
    """Take a port here, and the same one in a process that enters a new network; elsewhere it is refused."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        take = f"import socket; socket.create_server(('127.0.0.1', {port}))"
        enter = "from tests.pages import network; network.enter() or exit(0); "
        found = subprocess.run([sys.executable, "-c", f"{enter}{take}"], cwd=ROOT, capture_output=True)
        refused = subprocess.run([sys.executable, "-c", take], capture_output=True)
    assert (found.returncode, refused.returncode) == (0, 1), found.stderr.decode()
