import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from capture.routed_experts import RoutedExperts, id_dtype
from capture.storage import rows_to_numpy, storage_dtype

LAYERS, TOP_K = 3, 2


def choices(num_tokens, num_experts, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(TOP_K).indices


@pytest.mark.parametrize("num_experts", [16, 255, 256, 40_000, 65_535])
def test_rows_come_back_as_recorded_in_any_layer_order(num_experts):
    capturer = RoutedExpertsCapturer(8, LAYERS, TOP_K, num_experts)
    address = capturer._buffer_TLK.data_ptr()
    for step, num_tokens in enumerate([5, 8, 1, 0]):
        ids = [choices(num_tokens, num_experts, 10 * step + layer) for layer in range(LAYERS)]
        capturer.begin_step(num_tokens)
        for layer in (2, 0, 1):
            capturer.record(layer, ids[layer])
        rows = capturer.finish_step()
        assert rows.dtype == storage_dtype(num_experts)
        array = rows_to_numpy(rows, num_experts)
        assert array.dtype == id_dtype(num_experts)
        assert torch.equal(torch.from_numpy(array.astype("int64")), torch.stack(ids, dim=1))
        assert RoutedExperts(array, num_experts, (0, 1, 2), LAYERS).complete
    assert capturer._buffer_TLK.data_ptr() == address


def test_the_result_does_not_change_with_the_next_step():
    capturer = RoutedExpertsCapturer(4, 1, TOP_K, 16)
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 0))
    rows = capturer.finish_step()
    before = rows.clone()
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 1))
    assert torch.equal(rows, before)


def test_a_layer_that_does_not_record_is_caught():
    capturer = RoutedExpertsCapturer(4, LAYERS, TOP_K, 16)
    capturer.begin_step(2)
    capturer.record(0, choices(2, 16, 0))
    capturer.record(2, choices(2, 16, 0))
    with pytest.raises(AssertionError, match=r"\[1\] did not record"):
        capturer.finish_step()


def test_a_layer_that_records_twice_or_is_unknown_is_caught():
    capturer = RoutedExpertsCapturer(4, LAYERS, TOP_K, 16)
    capturer.begin_step(2)
    capturer.record(1, choices(2, 16, 0))
    for layer in (1, LAYERS, -1):
        with pytest.raises(AssertionError, match=f"layer {layer} recorded twice"):
            capturer.record(layer, choices(2, 16, 0))


def test_wrong_shapes_and_too_many_tokens_are_caught():
    capturer = RoutedExpertsCapturer(4, LAYERS, TOP_K, 16)
    with pytest.raises(AssertionError, match="5 tokens"):
        capturer.begin_step(5)
    capturer.begin_step(3)
    for shape in [(2, TOP_K), (3, TOP_K + 1), (1, TOP_K)]:
        with pytest.raises(AssertionError):
            capturer.record(0, torch.zeros(shape, dtype=torch.int64))


def test_recording_outside_a_step_is_caught():
    capturer = RoutedExpertsCapturer(4, 1, TOP_K, 16)
    with pytest.raises(AssertionError, match="outside"):
        capturer.record(0, choices(2, 16, 0))
    with pytest.raises(AssertionError, match="outside"):
        capturer.finish_step()


def test_a_step_that_failed_half_way_leaves_nothing_behind():
    capturer = RoutedExpertsCapturer(4, LAYERS, TOP_K, 16)
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 0))
    capturer.begin_step(1)
    ids = choices(1, 16, 1)
    for layer in range(LAYERS):
        capturer.record(layer, ids)
    assert torch.equal(capturer.finish_step()[:, 2].long(), ids)
