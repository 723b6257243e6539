"""A server on a machine whose compiler is broken: it serves on plain torch, and states so in its log and its facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess


def test_a_start_with_a_broken_compiler_warns_and_the_facts_have_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\necho 'error: no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(tmp_path / "cache"))
    with (tmp_path / "log").open("w") as log:
        model = tiny_checkpoint(tmp_path / "model", "dense")
        with ServerProcess(model, stderr=log, max_total_tokens=64, device="cpu") as server:
            facts = server.http.get("/server_info").json()
            answer = server.client.generate(input_ids=[3, 4, 5], sampling_params={"max_new_tokens": 2})
    reason = f"{compiler} failed: error: no such instruction"
    assert facts["plain_torch_reason"] == reason
    assert facts["batch_invariant"] is False and len(answer.output_ids) == 2
    warnings = [line for line in (tmp_path / "log").read_text().splitlines() if " WARNING " in line]
    assert (
        len(warnings) == 1 and "running on plain torch, several times slower in decoding and not batch" in warnings[0]
    )
    assert reason in warnings[0]
