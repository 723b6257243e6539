"""Steps that verify drafts, and a draft's own forwards, as recordings on the CPU: the real runners over the stand-in.

Float32 on the compiled operators, where a row has the same bits in every batch: padded or not, replayed or not, as a
row that decodes or as a token of a sequence that extends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.executor import captures, draft_graphs, graph_runner
from rollout.executor.draft_graphs import DraftGraphs
from rollout.executor.graph_runner import GraphRunner
from rollout.executor.input_builder import as_decoding_rows
from rollout.executor.model_runner import ModelRunner
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.model_drafting import ModelDrafting
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.drafters import KnownDrafter
from tests.family_zoo import family_checkpoint
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint
from tests.mtp_zoo import mtp_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from tests.unit.executor.test_graph_runner import planned_once
from tests.unit.executor.test_piece_runner import _Launches

PIECES = [2, 5, 9, 24]
VOCABULARY = 320
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 400,
    "chunked_prefill_size": 32,
    "max_running_requests": 4,
    "enable_return_routed_experts": True,
    "random_seed": 1,
}
EAGER = {"disable_cuda_graph": True}
TEXT = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return tiny_checkpoint(tmp_path_factory.mktemp("drafts") / "model", "moe_dense_first", seed=1)


@pytest.fixture
def graphs() -> Iterator[pytest.MonkeyPatch]:
    with captured_engines(pieces=PIECES) as patch:
        StandInGraphPool.reset_counts()
        yield patch


def play(harness: Any, count: int = 6) -> list[tuple]:
    """Send requests of many lengths, greedy and random, some with masks, and return their results."""
    rids = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(1, 250, (2 + 5 * number % 11,), generator=generator).tolist()
        params: dict[str, Any] = {"max_new_tokens": 9 + 5 * number % 13}
        if number % 2:
            params |= {"temperature": 0.9, "sampling_seed": number}
        if number == 3:
            params |= {"top_p": 0.8}
        fields: dict[str, Any] = {"return_sampling_mask": True} if number == 3 else {}
        fields |= {"top_logprobs_num": 2} if number == 5 else {}
        rids.append(harness.submit(prompt, f"r{number}", params, **fields))
        harness.tick()
    harness.run()
    harness.check_idle()
    found = [harness.results[rid] for rid in rids]
    return [(x.prompt_ids, x.token_ids, x.logprobs, x.routes.tolist(), x.mask, x.top) for x in found]


def draft(scheduler: Any, answers: list[tuple], kind: str, most: int = 7) -> None:
    """Let a scheduler verify drafts from known answers, all that are proposed."""
    outputs = {tuple(prompt): token_ids for prompt, token_ids, *_ in answers}
    drafter = KnownDrafter(outputs, VOCABULARY, kind)
    scheduler._steps._drafting = Drafting(drafter, None, VOCABULARY, most, SMALL["chunked_prefill_size"])


class Replays:
    """Counts the steps that verify, by their rows: as replays, and as what was not replayed as a whole."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.whole: Counter[int] = Counter()
        self.others: Counter[int] = Counter()
        forward = GraphRunner.forward

        def counted(runner: GraphRunner, batch: ForwardBatch, with_routes: bool) -> Any:
            found = forward(runner, batch, with_routes)
            if len(batch.logits_rows) > len(batch.extend_lens) + len(batch.decode.seq_lens):
                (self.others if found is None else self.whole)[batch.num_tokens] += 1
            return found

        patch.setattr(GraphRunner, "forward", counted)


@pytest.mark.full(but="mixed")
@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_replayed_verify_steps_give_what_plain_decoding_gives(
    folder: Path, graphs: pytest.MonkeyPatch, kind: str
) -> None:
    expected = play(Harness(folder, **SMALL | EAGER))
    harness, replays = Harness(folder, **SMALL | TEXT), Replays(graphs)
    runner = harness.scheduler.runner.graphs
    assert runner is not None and runner.sizes == [1, 2, 4, 8, 24], "of four requests with seven tokens each"
    draft(harness.scheduler, expected, kind)
    captured = StandInGraphPool.num_captures
    assert play(harness) == expected
    assert len(replays.whole) > 3 and StandInGraphPool.num_captures == captured
    counts = harness.scheduler._steps._drafting.counts
    assert counts.num_kept > 20


@pytest.mark.full(but="gpt_oss")
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_latents_and_windows_of_verify_steps(tmp_path: Path, graphs: pytest.MonkeyPatch, family: str) -> None:
    """Drafts reach over pages of windows."""
    checkpoint = family_checkpoint(tmp_path / "model", family, 3, max_position_embeddings=512)
    settings = SMALL | {"max_total_tokens": 1200, "chunked_prefill_size": 64}
    prompts = [list(range(3, 103 + 9 * index)) for index in range(3)]

    def answers(harness: Harness) -> list[tuple]:
        found = harness.generate(prompts, {"max_new_tokens": 60})
        harness.check_idle()
        return [(x.prompt_ids, x.token_ids, x.logprobs) for x in found]

    expected = answers(Harness(checkpoint, **settings | EAGER))
    harness, replays = Harness(checkpoint, **settings | TEXT), Replays(graphs)
    draft(harness.scheduler, expected, "mixed")
    assert answers(harness) == expected and sum(replays.whole.values()) > 10


def test_a_long_sequence_is_read_once(folder: Path, graphs: pytest.MonkeyPatch) -> None:
    """A step whose rows would read much KV again runs in pieces, as do steps beyond the largest recording."""
    expected = play(Harness(folder, **SMALL | EAGER))
    graphs.setattr(captures, "MAX_BYTES_READ_AGAIN", 8192)
    harness, replays = Harness(folder, **SMALL | TEXT), Replays(graphs)
    draft(harness.scheduler, expected, "right")
    computed: list[Any] = []
    graphs.setattr(harness.scheduler.runner, "_computed", computed.append)
    assert play(harness) == expected
    assert replays.whole and replays.others and not computed


def test_padding_of_a_verify_step_touches_nothing_of_anybody(folder: Path, graphs: pytest.MonkeyPatch) -> None:
    """Some rows in a step of eight write to the slots of their tokens, and to the padding slot."""
    (want,) = Harness(folder, **SMALL | EAGER).generate([[5, 9, 2]], {"max_new_tokens": 31})
    harness, replays = Harness(folder, **SMALL | TEXT), Replays(graphs)
    sampled: list[Any] = []
    replayed = ModelRunner.sample_replayed

    def noted(self: ModelRunner, info: Any, positions_N: Any) -> Any:
        tokens = replayed(self, info, positions_N)
        sampled.append(len(positions_N) > 1 and tokens is not None)  # one request: the others are drafted
        return tokens

    graphs.setattr(ModelRunner, "sample_replayed", noted)
    draft(harness.scheduler, [([5, 9, 2], want.token_ids)], "right")
    pool = harness.scheduler.runner.kv_pool
    for tensor in pool.tensors:
        tensor.fill_(torch.nan)
    (got,) = harness.generate([[5, 9, 2]], {"max_new_tokens": 31})
    assert got.token_ids == want.token_ids and got.logprobs == want.logprobs
    assert set(replays.whole) & {3, 5, 6, 7}, "of fewer rows than any recording has"
    assert any(sampled), "what was drafted is sampled in the recording, too"
    for tensor in pool.k:
        written = ~tensor.isnan().any(-1).any(-1)
        assert written[pool.padding_slot] and int(written.sum()) <= 3 + 30 + 7 + 1


@pytest.mark.full(but="dp2 ep2")
@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 2}, {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}],
    ids=["tp2", "dp2 ep2"],
)
def test_ranks_replay_verify_steps_together(folder: Path, layout: dict[str, Any]) -> None:
    """Requests are drafted on one rank while the other one decodes, computes prompts, or has none."""
    settings = SMALL | layout | {"num_threads": 1}
    with captured_ranks(PIECES) as patch:
        with ParallelHarness(folder, captured_gloo, **settings | EAGER) as harness:
            expected = play(harness)
        replays = Replays(patch)
        with ParallelHarness(folder, captured_gloo, **settings | TEXT) as harness:
            computed: list[Any] = []
            for scheduler in harness.schedulers:
                draft(scheduler, expected, "mixed")
                scheduler.runner._computed = computed.append  # type: ignore[method-assign, assignment]
            assert play(harness) == expected
        assert sum(replays.whole.values()) > 6 and not computed


def launches_of_verify(harness: Harness, length: int = 7) -> int:
    """Return the launches from Python of the forward of a step that verifies, a replay counted as one."""
    counted, forward, found = _Launches(), harness.scheduler.runner.forward, []

    def seen(batch: ForwardBatch) -> Any:
        before, replays = counted.count, StandInGraphPool.num_replays
        with counted:
            result = forward(batch)
        if len(batch.logits_rows) > 1:
            found.append(counted.count - before + StandInGraphPool.num_replays - replays)
        return result

    (plain,) = harness.generate([[5, 9, 2]], {"max_new_tokens": 9})
    draft(harness.scheduler, [([5, 9, 2], plain.token_ids)], "right", most=length)
    harness.scheduler.runner.forward = seen  # type: ignore[method-assign]
    harness.generate([[5, 9, 2]], {"max_new_tokens": 9})
    assert found
    return found[0]


def test_launches_from_python_of_a_layer_that_verifies(tmp_path: Path, graphs: pytest.MonkeyPatch) -> None:
    """A layer costs nothing in a whole recording, three launches in pieces, and seven in Python."""
    folders = [tiny_checkpoint(tmp_path / str(layers), "moe_dense_first", 1, layers=layers) for layers in (2, 4)]
    found = []
    for most, more in ((16 << 20, {}), (0, {}), (0, EAGER)):
        graphs.setattr(captures, "MAX_BYTES_READ_AGAIN", most)
        counts = []
        for checkpoint in folders:
            harness = Harness(checkpoint, **SMALL | TEXT | more)
            harness.scheduler.runner.recorded = None  # as on CUDA, where no tape is played
            counts.append(launches_of_verify(harness))
        found.append((counts[1] - counts[0]) / 2)
    assert found == [0, 3, 7], found


def test_rows_of_a_step() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=torch.arange(6),
        positions=torch.tensor([4, 5, 6, 9, 10, 2]),
        out_cache_loc=torch.arange(6),
        req_to_token=torch.zeros((5, 16), dtype=torch.int64),
        extend_req_pool_indices=[3, 1],
        extend_prefix_lens=[4, 9],
        extend_lens=[3, 2],
        decode=DecodeRows(*map(torch.tensor, ([2], [3], [2], [3]))),
        logits_rows=nothing,
    )
    rows = as_decoding_rows(batch)
    assert rows.decode.req_pool_indices.tolist() == [3, 3, 3, 1, 1, 2]
    assert (rows.decode.seq_lens - 1).tolist() == batch.positions.tolist()
    assert rows.num_extend_tokens == 0 and torch.equal(rows.decode.seq_lens_host, rows.decode.seq_lens)


# --- the draft's own forwards -----------------------------------------------------------------------------------------


def proposals(harness: Any, patch: pytest.MonkeyPatch) -> tuple[list[Any], list[tuple], Any]:
    """Return what the draft of an engine proposes, the engine's answers, and its runner of drafts."""
    scheduler = harness.schedulers[0] if isinstance(harness, ParallelHarness) else harness.scheduler
    drafting = scheduler._steps._drafting
    assert isinstance(drafting, ModelDrafting)
    for each in harness.schedulers if isinstance(harness, ParallelHarness) else [scheduler]:
        each._steps._drafting._choice = None
    proposed: list[Any] = []
    propose = drafting.runner.propose

    def noted(*given: Any) -> Any:
        proposed.append(propose(*given))
        return proposed[-1]

    patch.setattr(drafting.runner, "propose", noted)
    return proposed, play(harness), drafting.runner


def model_draft(folder: Path, tmp_path: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the served model of a draft, and the settings of the draft."""
    settings = {"speculative_num_steps": 3, "context_length": 128}
    if name == "STANDALONE":
        other = tiny_checkpoint(tmp_path / "other", "dense", seed=4)
        return folder, settings | {"speculative_algorithm": name, "speculative_draft_model_path": str(other)}
    checkpoint = mtp_checkpoint(tmp_path / "mtp", "glm4_moe", 3)
    return checkpoint, settings | {"speculative_algorithm": "NEXTN"}


@pytest.mark.parametrize("name", ["STANDALONE", "NEXTN"])
def test_replayed_drafts_propose_what_drafts_in_python_propose(
    folder: Path, tmp_path: Path, graphs: pytest.MonkeyPatch, name: str
) -> None:
    served, settings = model_draft(folder, tmp_path, name)
    plain = play(Harness(served, **SMALL | EAGER | settings | {"speculative_algorithm": None}))
    wanted, expected, in_python = proposals(Harness(served, **SMALL | EAGER | settings), graphs)
    assert expected == plain and in_python.graphs is None
    found, got, runner = proposals(Harness(served, **SMALL | settings), graphs)
    assert runner.graphs is not None and got == plain
    assert found == wanted and sum(len(ids) for each in found for ids in each) > 30


def launches_of_draft(harness: Harness) -> int:
    """Return the launches from Python of a forward of one token, a replay counted as one."""
    drafting, counts = harness.scheduler._steps._drafting, []
    assert isinstance(drafting, ModelDrafting)
    drafting._choice = None
    runner = drafting.runner
    runner.model._recorded = None  # type: ignore[attr-defined]
    forward = runner._forward

    def seen(batch: ForwardBatch, *given: Any) -> torch.Tensor:
        counted, replays = _Launches(), StandInGraphPool.num_replays
        with counted:
            result = forward(batch, *given)
        if len(batch.decode.seq_lens) == 1:
            counts.append(counted.count + StandInGraphPool.num_replays - replays)
        return result

    runner._forward = seen  # type: ignore[method-assign]
    harness.generate([[5, 9, 2]], {"max_new_tokens": 8})
    return min(counts)


@pytest.mark.full(but="NEXTN")
@pytest.mark.parametrize("name", ["STANDALONE", "NEXTN"])
def test_launches_from_python_of_a_draft(folder: Path, tmp_path: Path, graphs: pytest.MonkeyPatch, name: str) -> None:
    """A forward of one token costs as many launches as it has operators in Python, and a replay costs one."""
    served, settings = model_draft(folder, tmp_path, name)
    found = [launches_of_draft(Harness(served, **SMALL | settings | more)) for more in (EAGER, {})]
    assert found == ([17, 8] if name == "NEXTN" else [17, 7])


@pytest.mark.full
def test_ranks_replay_a_draft_together(folder: Path, tmp_path: Path) -> None:
    served, draft_settings = model_draft(folder, tmp_path, "STANDALONE")
    settings = SMALL | draft_settings | {"tp_size": 2, "num_threads": 1}
    with captured_ranks(PIECES) as patch:
        found = []
        for more in (EAGER, {}):
            with ParallelHarness(served, captured_gloo, **settings | more) as harness:
                proposed, answers, runner = proposals(harness, patch)
                found.append((proposed, answers))
                assert (runner.graphs is None) == (more is EAGER)
    assert found[0] == found[1]


# --- wrong runners ----------------------------------------------------------------------------------------------------


def rows_see_all(patch: pytest.MonkeyPatch) -> None:
    """Let every row of a request see its last token (wrong)."""

    def acausal(batch: ForwardBatch) -> ForwardBatch:
        rows = as_decoding_rows(batch)
        decode, lens = rows.decode, rows.decode.seq_lens.clone()
        for row in decode.req_pool_indices.unique():
            lens[decode.req_pool_indices == row] = lens[decode.req_pool_indices == row].max()
        return replace(rows, decode=decode._replace(seq_lens=lens, seq_lens_host=lens))

    patch.setattr(graph_runner, "as_decoding_rows", acausal)
    patch.setattr(draft_graphs, "as_decoding_rows", acausal)


def stale_lengths(patch: pytest.MonkeyPatch) -> None:
    """Keep the lengths of the first replay (wrong)."""
    planned_once(patch)


def stale_hidden_states(patch: pytest.MonkeyPatch) -> None:
    """Replay a draft on the hidden states of its capture (wrong)."""
    forward = DraftGraphs.forward
    patch.setattr(DraftGraphs, "forward", lambda self, batch, hidden_TD: forward(self, batch, None))


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [rows_see_all, stale_lengths], ids=lambda wrong: wrong.__name__)
def test_wrong_verify_steps_are_noticed(
    folder: Path, graphs: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = play(Harness(folder, **SMALL | EAGER))
    wrong(graphs)
    harness = Harness(folder, **SMALL | TEXT)
    draft(harness.scheduler, expected, "right")
    assert play(harness) != expected


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [rows_see_all, stale_lengths, stale_hidden_states], ids=lambda wrong: wrong.__name__)
def test_wrong_drafts_are_noticed(
    folder: Path, tmp_path: Path, graphs: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    served, settings = model_draft(folder, tmp_path, "NEXTN")
    wanted, _, _ = proposals(Harness(served, **SMALL | EAGER | settings), graphs)
    wrong(graphs)
    found, _, _ = proposals(Harness(served, **SMALL | settings), graphs)
    assert found != wanted
