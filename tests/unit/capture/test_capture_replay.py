import numpy as np
import pytest
import torch
from torch import nn

from capture import replay
from capture.errors import CaptureError, RouteValueError, UnsupportedRouterError
from capture.replay import find_routers, force_routes, pad_routes, record_routes
from capture.routed_experts import RoutedExperts, id_dtype, missing_id
from tests.family_zoo import family_model
from tests.trainer_moe import trainer_model

BATCH, SEQ, EXPERTS, TOP_K, LAYERS = 2, 7, 8, 3, 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(seed=0):
    return torch.randint(0, 64, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def recorded(model, ids):
    with record_routes(model) as record:
        logits = logits_of(model, ids)
    return record.ids().view(BATCH, SEQ, LAYERS, TOP_K), logits


def other_routes(routes):
    """Return valid routes that differ from `routes` everywhere."""
    return (routes + 1) % EXPERTS


def leftovers(model):
    return [name for name, module in model.named_modules() if module._forward_hooks or "forward" in vars(module)]


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", [0, 1])
def test_forcing_what_was_recorded_reproduces_the_logits_exactly(seed, dtype, norm_topk_prob):
    model = trainer_model(seed, norm_topk_prob, dtype)
    routes, logits = recorded(model, tokens(seed))
    assert torch.equal(logits, logits_of(model, tokens(seed)))
    with force_routes(model, routes) as forced:
        assert torch.equal(logits_of(model, tokens(seed)), logits)
    assert (forced.forced_positions, forced.own_positions) == (BATCH * SEQ, 0)


def test_recorded_choices_are_those_of_a_plain_top_k():
    model = trainer_model()
    seen = []
    handles = [router.register_forward_pre_hook(lambda m, x: seen.append((m, x[0]))) for router in find_routers(model)]
    routes, _ = recorded(model, tokens())
    for handle in handles:
        handle.remove()
    for layer, (router, hidden) in enumerate(seen):
        expected = (hidden @ router.weight.T).topk(TOP_K).indices
        assert torch.equal(routes.flatten(0, 1)[:, layer], expected)


def test_forcing_other_routes_changes_the_logits_and_is_what_the_experts_see():
    model = trainer_model()
    routes, logits = recorded(model, tokens())
    with force_routes(model, other_routes(routes)), record_routes(model) as record:
        changed = logits_of(model, tokens())
    assert not torch.allclose(changed, logits, atol=1e-3)
    assert torch.equal(record.ids().view_as(routes), other_routes(routes))


def test_forced_weights_are_the_current_scores_of_the_forced_experts():
    model = trainer_model()
    routes = other_routes(recorded(model, tokens())[0])
    router = find_routers(model)[0]
    hidden = torch.randn(BATCH * SEQ, 32)
    forced_ids = routes.flatten(0, 1)[:, 0]
    probabilities = torch.softmax(hidden @ router.weight.T, dim=-1)
    expected = torch.stack([probabilities[row, forced_ids[row]] for row in range(BATCH * SEQ)])
    expected = expected / expected.sum(dim=-1, keepdim=True)
    with force_routes(model, routes):
        _, scores, ids = router(hidden)
    assert torch.equal(ids, forced_ids)
    assert torch.allclose(scores, expected, atol=1e-6)


@pytest.mark.mutant
def test_a_replay_that_keeps_its_own_weights_would_be_caught(monkeypatch):
    """Deliberately wrong: forced ids combined with the weights of the model's own choice."""
    model = trainer_model()
    routes, _ = recorded(model, tokens())
    with force_routes(model, other_routes(routes)):
        right = logits_of(model, tokens())
    own = replay.weights_of

    def wrong(router, logits_TE, ids_TK):
        return own(router, logits_TE, logits_TE.topk(router.top_k).indices)

    monkeypatch.setattr(replay, "weights_of", wrong)
    with force_routes(model, other_routes(routes)):
        assert not torch.allclose(logits_of(model, tokens()), right, atol=1e-3)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_gradients_reach_the_router_and_equal_those_of_the_unforced_model(norm_topk_prob):
    model = trainer_model(norm_topk_prob=norm_topk_prob)
    routes, _ = recorded(model, tokens())
    logits_of(model, tokens()).logsumexp(-1).sum().backward()
    free = [router.weight.grad.clone() for router in find_routers(model)]
    model.zero_grad()
    with force_routes(model, routes):
        logits_of(model, tokens()).logsumexp(-1).sum().backward()
    for router, expected in zip(find_routers(model), free):
        assert expected.abs().max() > 0
        assert torch.allclose(router.weight.grad, expected, rtol=1e-4, atol=1e-7)


def test_gradient_of_forced_routes_matches_a_finite_difference():
    """Other routes than the model's own, so that a gradient through the wrong experts would show."""
    model = trainer_model(dtype=torch.float64)
    routes = other_routes(recorded(model, tokens())[0])
    weight = find_routers(model)[1].weight
    direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(3))

    def value():
        return logits_of(model, tokens()).logsumexp(-1).sum()

    with force_routes(model, routes):
        value().backward()
        slope = float((weight.grad * direction).sum())
        # The router's softmax is float32 by definition, so the step must stay well above its rounding.
        with torch.no_grad():
            weight += 1e-3 * direction
            above = float(value())
            weight -= 2e-3 * direction
            below = float(value())
    assert slope == pytest.approx((above - below) / 2e-3, rel=2e-2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_gradient_checkpointing_inside_the_context():
    model = trainer_model().train()
    routes = other_routes(recorded(model, tokens())[0])
    with force_routes(model, routes):
        logits_of(model, tokens()).logsumexp(-1).sum().backward()
    plain = [router.weight.grad.clone() for router in find_routers(model)]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with force_routes(model, routes) as forced:
        logits_of(model, tokens()).logsumexp(-1).sum().backward()
    assert forced.forced_positions == BATCH * SEQ
    for router, expected in zip(find_routers(model), plain):
        assert torch.allclose(router.weight.grad, expected, rtol=1e-5, atol=1e-8)


def test_the_last_position_has_no_row_and_routes_by_itself():
    model = trainer_model()
    routes, _ = recorded(model, tokens())
    changed = other_routes(routes)
    with force_routes(model, changed[:, :-1]) as forced, record_routes(model) as record:
        logits_of(model, tokens())
    assert (forced.forced_positions, forced.own_positions) == (BATCH * (SEQ - 1), BATCH)
    seen = record.ids().view_as(routes)
    assert torch.equal(seen[:, :-1], changed[:, :-1])
    assert torch.equal(seen[:, -1, 0], routes[:, -1, 0])  # the first MoE layer's choice precedes any changed expert


@pytest.mark.parametrize("form", ["tensor", "list", "records", "unsigned arrays"])
def test_missing_rows_fall_back_to_the_models_own_routing(form):
    model = trainer_model()
    routes, logits = recorded(model, tokens())
    given = routes[:, :-1].clone()
    given[0, 2] = given[1, 0] = -1
    unsigned = np.where(given.numpy() < 0, missing_id(EXPERTS), given.numpy()).astype(id_dtype(EXPERTS))
    routed_ids = {
        "tensor": given,
        "list": [given[0], given[1].numpy()],
        "records": [RoutedExperts(rows, EXPERTS, (1, 2), 3) for rows in unsigned],
        "unsigned arrays": list(unsigned),
    }[form]
    with force_routes(model, routed_ids) as forced:
        assert torch.equal(logits_of(model, tokens()), logits)
    assert (forced.forced_positions, forced.own_positions) == (BATCH * (SEQ - 1) - 2, BATCH + 2)


def test_sequences_of_different_lengths_and_starts():
    model = trainer_model()
    routes = other_routes(recorded(model, tokens())[0])
    record = RoutedExperts(routes[0, 2:6].numpy().astype(np.uint8), EXPERTS, (1, 2), 3, start=2)
    with force_routes(model, [record, routes[1, :3]]) as forced, record_routes(model) as seen:
        logits_of(model, tokens())
    ids = seen.ids().view_as(routes)
    assert torch.equal(ids[0, 2:6], routes[0, 2:6])
    assert torch.equal(ids[1, :3], routes[1, :3])
    assert forced.forced_positions == 7


@pytest.mark.parametrize("mask_len", [SEQ, SEQ - 2])
def test_the_mask_chooses_the_forced_positions(mask_len):
    model = trainer_model()
    routes, _ = recorded(model, tokens())
    mask = torch.rand(BATCH, mask_len, generator=torch.Generator().manual_seed(1)) < 0.5
    with force_routes(model, other_routes(routes), mask) as forced, record_routes(model) as record:
        logits_of(model, tokens())
    assert forced.forced_positions == int(mask.sum())
    followed = (record.ids().view_as(routes) == other_routes(routes)).all(dim=-1).all(dim=-1)
    assert torch.equal(followed[:, :mask_len] & mask, mask)
    assert not followed[:, :mask_len][~mask].any()
    assert not followed[:, mask_len:].any()


def test_several_forwards_under_one_set_of_routes():
    model = trainer_model()
    routes, logits = recorded(model, tokens())
    with force_routes(model, routes) as forced:
        for _ in range(3):
            assert torch.equal(logits_of(model, tokens()), logits)
    assert forced.forced_positions == BATCH * SEQ


def test_recording_several_forwards_concatenates_them():
    model = trainer_model()
    with record_routes(model) as record:
        logits_of(model, tokens(0))
        logits_of(model, tokens(1)[:, :3])
    assert tuple(record.ids().shape) == (BATCH * (SEQ + 3), LAYERS, TOP_K)


def test_nothing_recorded_is_an_error():
    with record_routes(trainer_model()) as record:
        pass
    with pytest.raises(CaptureError, match="no forward"):
        record.ids()


def test_the_model_is_restored_after_use_and_after_exceptions():
    model = trainer_model()
    routes, logits = recorded(model, tokens())
    assert leftovers(model) == []
    with pytest.raises(RuntimeError, match="ours"), force_routes(model, other_routes(routes)), record_routes(model):
        assert len(leftovers(model)) == LAYERS
        raise RuntimeError("ours")
    assert leftovers(model) == []
    with pytest.raises(RouteValueError, match="forward over"), force_routes(model, routes):
        logits_of(model, tokens()[:, :4])
    assert leftovers(model) == []
    assert torch.equal(logits_of(model, tokens()), logits)


def test_a_forward_over_other_tokens_than_the_routes_is_refused():
    model = trainer_model()
    routes, _ = recorded(model, tokens())
    with force_routes(model, routes), pytest.raises(RouteValueError, match="cannot follow"):
        logits_of(model, torch.zeros(3, 5, dtype=torch.int64))
    with force_routes(model, routes[:, :-1]):
        logits_of(model, tokens())
        with pytest.raises(RouteValueError, match="without a KV cache"):
            logits_of(model, tokens()[:, :-1])


def test_wrong_routes_are_refused_on_entry():
    model = trainer_model()
    routes, _ = recorded(model, tokens())
    partly = routes.clone()
    partly[0, 0, 0, 0] = -1
    doubled = routes.clone()
    doubled[0, 0, 0, 0] = doubled[0, 0, 0, 1]
    foreign = RoutedExperts(routes[0].numpy().astype(np.uint16), 300, (1, 2), 3)
    mask = torch.ones(3, SEQ, dtype=torch.bool)
    wrong = [
        (partly, None),
        (doubled, None),
        (routes + EXPERTS, None),
        (routes.float(), None),
        (routes[..., :1, :], None),
        (routes[..., :2], None),
        (routes[0], None),
        ([], None),
        ([routes[0], routes[1, :, :1]], None),
        (foreign, None),
        (routes, mask),
        (routes, mask[0]),
    ]
    for routed_ids, given_mask in wrong:
        with pytest.raises(RouteValueError), force_routes(model, routed_ids, given_mask):
            raise AssertionError("entered with wrong routes")


def test_unsigned_routes_that_cannot_mark_missing_are_refused():
    routes = np.zeros((2, 1, 1), dtype=np.uint8)
    with pytest.raises(RouteValueError, match="cannot mark MISSING"):
        pad_routes([routes], num_experts=256)
    assert pad_routes([routes], num_experts=255, seq_len=3).flatten().tolist() == [0, 0, -1]


def test_models_without_routers_are_refused():
    with pytest.raises(UnsupportedRouterError, match="no router"), record_routes(nn.Linear(2, 2)):
        raise AssertionError("entered without routers")


class SigmoidRouter(nn.Module):
    """A router that weighs experts by a sigmoid, as DeepSeek-V3 does; forcing it by a softmax would be wrong."""

    def __init__(self):
        super().__init__()
        self.top_k, self.num_experts, self.norm_topk_prob = TOP_K, EXPERTS, True
        self.weight = nn.Parameter(torch.randn(EXPERTS, 4))

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        scores, ids = logits.sigmoid().topk(self.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), ids


def test_routers_with_another_formula_are_refused():
    router = SigmoidRouter()
    routes = torch.arange(TOP_K).expand(1, 5, 1, TOP_K)
    with force_routes(router, routes), pytest.raises(UnsupportedRouterError, match="formula"):
        router(torch.randn(5, 4))
    with record_routes(router) as record:
        router(torch.randn(5, 4))
    assert tuple(record.ids().shape) == (5, 1, TOP_K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_is_forced_and_its_router_learns(dtype):
    """Scores are a softmax of the chosen logits alone, which have a bias; forced experts are scored by theirs."""
    model = family_model("gpt_oss", 3).to(dtype)
    ids = tokens()
    with record_routes(model) as record:
        logits = logits_of(model, ids)
    routes = record.ids().view(BATCH, SEQ, 2, 3)
    with force_routes(model, routes):
        forced = logits_of(model, ids)
    assert torch.equal(forced, logits)
    forced.logsumexp(-1).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if ".router." in name}
    assert len(gradients) == 4 and all(gradient.abs().max() > 0 for gradient in gradients.values())
    other = (routes + 1) % 8
    seen = []
    routers = find_routers(model)
    with force_routes(model, other):
        handles = [router.register_forward_hook(lambda m, x, y: seen.append(y)) for router in routers]
        changed = logits_of(model, ids)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(changed, logits, atol=1e-2)
    for layer, (router_logits, scores, chosen) in enumerate(seen):
        assert torch.equal(chosen, other.flatten(0, 1)[:, layer])
        assert torch.equal(scores, router_logits.gather(1, chosen).softmax(-1))
