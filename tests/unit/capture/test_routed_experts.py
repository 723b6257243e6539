import numpy as np
import pytest

from capture.errors import RouteValueError
from capture.routed_experts import RoutedExperts, concat, id_dtype, missing_id


def make_routed(num_rows=6, num_experts=8, top_k=3, layers=(1, 2, 4), hidden=5, start=0, spans=(), seed=0):
    """Return a random valid record."""
    rng = np.random.default_rng(seed)
    scores = rng.random((num_rows, len(layers), num_experts))
    ids = np.argsort(scores, axis=-1)[..., :top_k].astype(id_dtype(num_experts))
    return RoutedExperts(ids, num_experts, layers, hidden, start, spans)


@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "uint16"), (65535, "uint16")])
def test_id_dtype_leaves_its_maximum_free(num_experts, dtype):
    assert id_dtype(num_experts) == np.dtype(dtype)
    assert missing_id(num_experts) >= num_experts


@pytest.mark.parametrize("num_experts", [0, -1, 65536])
def test_id_dtype_refuses_counts_without_a_dtype(num_experts):
    with pytest.raises(RouteValueError, match="experts"):
        id_dtype(num_experts)


@pytest.mark.parametrize("num_experts", [8, 300])
def test_missing_rows_are_found_and_marked(num_experts):
    ids = make_routed(num_experts=num_experts).logical_ids_TLK.copy()
    ids[[1, 4]] = missing_id(num_experts)
    routed = RoutedExperts(ids, num_experts, (1, 2, 4), 5)
    assert routed.missing_rows().tolist() == [1, 4]
    assert not routed.complete
    signed = routed.signed_ids()
    assert signed.dtype == np.int64
    assert (signed[[1, 4]] == -1).all()
    assert np.array_equal(signed[[0, 2, 3, 5]], ids[[0, 2, 3, 5]])


def test_a_complete_record_has_no_missing_rows_and_cannot_be_written_to():
    routed = make_routed()
    assert routed.complete
    assert routed.missing_rows().size == 0
    with pytest.raises(ValueError, match="read-only"):
        routed.logical_ids_TLK[0] = 0


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        ((2, 1, 0), 255, "is partly missing"),
        ((2, 1), 255, "is partly missing"),
        ((3, 0, 1), 8, "outside 0..7"),
    ],
)
def test_partly_missing_rows_and_unknown_experts_are_refused(position, value, message):
    ids = make_routed().logical_ids_TLK.copy()
    ids[position] = value
    with pytest.raises(RouteValueError, match=message):
        RoutedExperts(ids, 8, (1, 2, 4), 5)


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 2), (1, 2)])
def test_an_expert_chosen_twice_is_refused_wherever_the_pair_stands(left, right):
    ids = make_routed().logical_ids_TLK.copy()
    ids[5, 2, left] = ids[5, 2, right]
    with pytest.raises(RouteValueError, match="twice"):
        RoutedExperts(ids, 8, (1, 2, 4), 5)


def test_wrong_geometry_is_refused():
    ids = make_routed().logical_ids_TLK
    wrong = [
        (ids.astype(np.int32), 8, (1, 2, 4), 5),
        (ids, 300, (1, 2, 4), 5),
        (ids[0], 8, (1, 2, 4), 5),
        (ids[:, :0], 8, (), 5),
        (ids[:, :, :0], 8, (1, 2, 4), 5),
        (ids, 8, (1, 2), 5),
        (ids, 8, (2, 1, 4), 5),
        (ids, 8, (1, 1, 4), 5),
        (ids, 8, (1, 2, 5), 5),
        (ids, 8, (-1, 2, 4), 5),
        (ids, 8, (1, 2, 4), 5, -1),
    ]
    for arguments in wrong:
        with pytest.raises(RouteValueError):
            RoutedExperts(*arguments)


@pytest.mark.parametrize(
    "spans", [(("a", 0, 7),), (("a", 2, 2),), (("a", 0, 3), ("b", 2, 4)), (("a", 3, 4), ("b", 0, 2)), (("a", -1, 2),)]
)
def test_spans_out_of_order_or_range_are_refused(spans):
    with pytest.raises(RouteValueError, match="span"):
        make_routed(spans=spans)


def test_slicing_moves_start_and_clips_spans():
    routed = make_routed(start=10, spans=(("a", 0, 2), ("b", 2, 6)))
    part = routed.rows(1, 4)
    assert part.start == 11
    assert part.weight_versions == (("a", 0, 1), ("b", 1, 3))
    assert np.array_equal(part.logical_ids_TLK, routed.logical_ids_TLK[1:4])
    assert routed.rows(3, 3).weight_versions == ()
    for first, end in [(-1, 2), (3, 2), (0, 7)]:
        with pytest.raises(RouteValueError):
            routed.rows(first, end)


def test_concat_of_slices_restores_the_record():
    routed = make_routed(num_rows=9, start=4, spans=(("a", 0, 3), ("b", 3, 9)))
    parts = [routed.rows(0, 2), routed.rows(2, 2), routed.rows(2, 5), routed.rows(5, 9)]
    assert concat(parts) == routed


def test_concat_refuses_gaps_overlaps_and_other_models():
    routed = make_routed()
    with pytest.raises(RouteValueError, match="starts at token 3"):
        concat([routed.rows(0, 2), routed.rows(3, 6)])
    with pytest.raises(RouteValueError, match="starts at token 1"):
        concat([routed.rows(0, 2), routed.rows(1, 6)])
    with pytest.raises(RouteValueError, match="different models"):
        concat([routed.rows(0, 2), make_routed(layers=(0, 2, 4)).rows(2, 6)])
    with pytest.raises(RouteValueError, match="no records to concatenate"):
        concat([])


def test_equality_sees_every_fact():
    routed = make_routed(spans=(("a", 0, 6),))
    assert routed == make_routed(spans=(("a", 0, 6),))
    assert routed != make_routed(spans=(("b", 0, 6),))
    assert routed != make_routed(spans=(("a", 0, 6),), seed=1)
    assert routed != make_routed(spans=(("a", 0, 6),), start=1)
    assert routed != "routes"
