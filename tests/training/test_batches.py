from __future__ import annotations

import torch

from hf_tinylm.modeling.loss import IGNORE_INDEX
from hf_tinylm.training.batches import filled_up


def test_a_batch_is_filled_up_with_rows_that_have_no_target() -> None:
    ids = torch.arange(6).reshape(2, 3)
    batch = {"input_ids": ids, "shift_labels": ids + 1, "position_ids": ids.clone()}
    filled = filled_up(batch, 4)
    assert {name: tuple(tensor.shape) for name, tensor in filled.items()} == dict.fromkeys(batch, (4, 3))
    assert all(torch.equal(filled[name][:2], tensor) for name, tensor in batch.items())
    assert (filled["shift_labels"][2:] == IGNORE_INDEX).all()
    assert torch.equal(filled["input_ids"][2:], ids[1:].expand(2, 3))
    assert all(torch.equal(filled_up(batch, 2)[name], tensor) for name, tensor in batch.items())
