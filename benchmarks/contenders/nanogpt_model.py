"""The loop of nanoGPT around nanoGPT's own transformer, that of GPT-2, with the sizes of ours.

Kept: learned position embeddings, LayerNorm without biases, one matrix for queries, keys and values, torch's fused
attention, a feed-forward layer with GELU, an output that shares its weights with the embedding, no dropout. The two
matrices of its feed-forward layer, 4 x dim wide, have as many elements as our three, 8/3 x dim wide.

Source: https://github.com/karpathy/nanoGPT (model.py)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from contenders import Train, Work
from contenders.nanogpt import loop_over


class Norm(nn.Module):
    """LayerNorm without a bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return layer_norm(x_BTD, self.weight.shape, self.weight, None, 1e-5)


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.wide_norm = Norm(dim), Norm(dim)
        self.project, self.mix = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def attend(self, x_BTD: Tensor) -> Tensor:
        parts = self.project(x_BTD).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed_BHTE = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(mixed_BHTE.transpose(1, 2).flatten(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.attention_norm(x_BTD))
        return x_BTD + self.narrow(gelu(self.widen(self.wide_norm(x_BTD))))


class Model(nn.Module):
    """Tokens and targets (both BT) -> scores (BTV) and their loss."""

    def __init__(self, num_layers: int, num_heads: int, dim: int, num_tokens: int, seq_len: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(num_tokens, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                narrow = name.endswith(("mix.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * num_layers) if narrow else 1))
        self.output.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.embed(tokens_BT) + self.places(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        scores = self.output(self.norm(x_BTD))
        return scores, cross_entropy(scores.flatten(0, -2), targets_BT.flatten(), ignore_index=-1)


def build(work: Work) -> Train:
    """nanoGPT's loop over `work`, with a transformer of its kind."""
    return loop_over(work, Model(*work.shape, work.num_classes, work.size))
