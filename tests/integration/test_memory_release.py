"""Resident memory of a serving process before, while and after its memory is released: measured, not counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint

pytestmark = pytest.mark.full

# About 60 MB of weights and 67 MB of KV in float32.
SPEC = CheckpointSpec(
    hidden_size=256, layers=4, heads=4, kv_heads=4, head_dim=64, intermediate_size=256, experts=8, top_k=2,
    moe_intermediate_size=256, context_length=512, vocab_size=16384, dtype="float32",
)  # fmt: skip
POOL = 8192

PROGRAM = """
import json, os, sys
from pathlib import Path
from rollout.core.messages.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from rollout.server.engine import Engine

PAGE = os.sysconf("SC_PAGE_SIZE")

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

def answer():
    output = engine.generate(input_ids=list(range(40)), sampling_params={"max_new_tokens": 8, "temperature": 0.0})
    return output["output_ids"]

engine = Engine(model_path=sys.argv[1], dtype="float32", max_total_tokens=int(sys.argv[2]), num_threads=1,
                enable_memory_saver=True, enable_weights_cpu_backup=True, skip_tokenizer_init=True)
pool = engine.scheduler.runner.kv_pool
for tensor in (*pool.k, *pool.v):
    tensor.fill_(0.5)  # as a server that has been busy for a while
facts = {"before": answer(), "used": resident()}
facts["bytes"] = engine.control(ReleaseMemoryOccupationReqInput, tags=["kv_cache"]).reply.num_bytes
facts["without_kv"] = resident()
facts["weight_bytes"] = engine.control(ReleaseMemoryOccupationReqInput).reply.num_bytes
facts["without_both"] = resident()
assert engine.control(ResumeMemoryOccupationReqInput).success
facts |= {"after": answer(), "resumed": resident()}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), SPEC)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(POOL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kv_pool_goes_back_to_the_system(facts: dict) -> None:
    assert facts["bytes"] > 60e6
    assert facts["used"] - facts["without_kv"] > 0.95 * facts["bytes"]


def test_the_weights_go_back_to_the_system(facts: dict) -> None:
    assert facts["weight_bytes"] > 50e6
    assert facts["without_kv"] - facts["without_both"] > 0.95 * facts["weight_bytes"]


def test_after_a_resume_it_answers_as_before_and_takes_no_more(facts: dict) -> None:
    assert facts["after"] == facts["before"]
    assert facts["resumed"] < facts["used"] + 5e6
