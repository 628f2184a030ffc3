"""What is kept of the forward pass, and what the backward pass computes again."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten

COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Matrix products and attention: nearly all of the time, and a small part of the memory."""


def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps the costly results and computes the rest again."""
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def save_matrix_products() -> Any:
    """The contexts of a selective checkpoint, for torch.utils.checkpoint."""
    return create_selective_checkpoint_contexts(choose)
