"""Errors of each command: one line, with the word that was probably meant."""

from __future__ import annotations

import pytest

from rollout.cli.main import main


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["sevre"], "lockstep: error: sevre is not one of serve, "),
        (["demo", "--szie", "tiny"], "lockstep demo: error: unknown flag --szie; did you mean --size?"),
        (
            ["demo", "--size", "tny"],
            "lockstep demo: error: --size: tny is not one of standard, tiny; did you mean ",
        ),
        (["bench", "--dtype=half"], "lockstep bench: error: --dtype: half is not one of auto, "),
        (["bench", "--dtype=bf16"], "lockstep bench: error: --dtype: bf16 is not one of auto, float32, bfloat16, "),
        (["bench", "--input-len", "0"], "lockstep bench: error: --input-len: must be at least 1"),
        (["eplb-plan", "--rnks", "2"], "lockstep eplb-plan: error: unknown flag --rnks; did you mean --ranks?"),
        (["make-checkpoint", "d", "e"], "lockstep make-checkpoint: error: unexpected word e"),
        (["build-kernels", "--cpu-isa", "avx3"], "lockstep build-kernels: error: --cpu-isa: avx3 is not one of "),
    ],
)
def test_an_error_is_one_line_and_a_pointer_to_the_help_n12(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """N12: 75 lines of usage stood before the line that matters."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    first, second = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and first.startswith(error)
    assert second == f"Help: {error.partition(':')[0]} --help"
