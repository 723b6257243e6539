import pytest
import torch

from capture.capturer import RoutedExpertsCapturer

LAYERS, TOP_K = 3, 2


def choices(num_tokens, num_experts, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(TOP_K).indices


def test_choices_come_back_by_layer_recorded_in_any_order():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    for step, num_tokens in enumerate([5, 8, 1, 0]):
        ids = [choices(num_tokens, 16, 10 * step + layer) for layer in range(LAYERS)]
        capturer.begin_step(num_tokens)
        for layer in (2, 0, 1):
            capturer.record(layer, ids[layer])
        assert torch.equal(capturer.finish_step(), torch.stack(ids, dim=1))


def test_the_result_does_not_change_with_the_next_step():
    capturer = RoutedExpertsCapturer(1, TOP_K, 16)
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 0))
    first = capturer.finish_step()
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 1))
    assert torch.equal(first[:, 0], choices(4, 16, 0))


def test_ids_are_copied_when_they_are_recorded():
    """A router may use one buffer for all layers and steps, as a CUDA graph does."""
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    buffer = torch.empty(4, TOP_K, dtype=torch.int64)
    capturer.begin_step(4)
    for layer in range(LAYERS):
        buffer.copy_(choices(4, 16, layer))
        capturer.record(layer, buffer)
    buffer.zero_()
    rows = capturer.finish_step()
    assert rows.dtype == torch.uint8
    assert torch.equal(rows, torch.stack([choices(4, 16, layer) for layer in range(LAYERS)], dim=1))


def test_a_layer_that_does_not_record_is_caught():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    capturer.begin_step(2)
    capturer.record(0, choices(2, 16, 0))
    capturer.record(2, choices(2, 16, 0))
    with pytest.raises(AssertionError, match=r"\[1\] did not record"):
        capturer.finish_step()


def test_a_layer_that_records_twice_or_is_unknown_is_caught():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    capturer.begin_step(2)
    capturer.record(1, choices(2, 16, 0))
    for layer in (1, LAYERS, -1):
        with pytest.raises(AssertionError, match=f"layer {layer} recorded twice"):
            capturer.record(layer, choices(2, 16, 0))


def test_wrong_shapes_are_caught():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    capturer.begin_step(3)
    for shape in [(2, TOP_K), (3, TOP_K + 1), (1, TOP_K)]:
        with pytest.raises(AssertionError):
            capturer.record(0, torch.zeros(shape, dtype=torch.int64))


def test_recording_outside_a_step_is_caught():
    capturer = RoutedExpertsCapturer(1, TOP_K, 16)
    with pytest.raises(AssertionError, match="outside"):
        capturer.record(0, choices(2, 16, 0))
    with pytest.raises(AssertionError, match="outside"):
        capturer.finish_step()


def test_a_step_that_failed_half_way_leaves_nothing_behind():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    capturer.begin_step(4)
    capturer.record(0, choices(4, 16, 0))
    capturer.begin_step(1)
    ids = choices(1, 16, 1)
    for layer in range(LAYERS):
        capturer.record(layer, ids)
    assert torch.equal(capturer.finish_step()[:, 2], ids)


def test_records_of_a_captured_step_are_copied_together_at_its_end():
    """One copy for all layers, of other memory for each: what changes before the end would be recorded."""
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    rows = torch.full((4, LAYERS, TOP_K), 77, dtype=capturer.dtype)
    ids = [choices(4, 16, layer) for layer in range(LAYERS)]
    capturer.begin_step_in(rows)
    for layer in (1, 2, 0):
        capturer.record(layer, ids[layer])
    assert (rows == 77).all()
    assert capturer.finish_step() is rows and torch.equal(rows.long(), torch.stack(ids, dim=1))
    capturer.begin_step(4)
    for layer in range(LAYERS):
        capturer.record(layer, ids[0])
    assert torch.equal(capturer.finish_step()[:, 2].long(), ids[0]) and torch.equal(rows[:, 2].long(), ids[2])


def test_a_layer_of_a_captured_step_that_does_not_record_is_caught():
    capturer = RoutedExpertsCapturer(LAYERS, TOP_K, 16)
    capturer.begin_step_in(torch.zeros(2, LAYERS, TOP_K, dtype=capturer.dtype))
    capturer.record(0, choices(2, 16, 0))
    with pytest.raises(AssertionError, match=r"\[1, 2\] did not record"):
        capturer.finish_step()
