"""Masks put on logits, on a CPU and by the kernel for other devices."""

import torch

from engine_client.logits import mask_on_cpu, mask_with_kernel

WIDTH = 102
COLUMNS = 110
"""A model may have more columns than its vocabulary."""


def test_the_kernel_masks_alike() -> None:
    scores = torch.randn(5, COLUMNS)
    masks = torch.randint(-(2**31), 2**31, (3, 4)).int()
    masks[:, -1] &= (1 << WIDTH % 32) - 1
    arguments = (scores, masks, [0, 2, 3], WIDTH)
    assert torch.equal(mask_with_kernel(*arguments), mask_on_cpu(*arguments))
