"""A transformer that predicts the next token, with the architecture of Llama 3.

It is written to be split over ranks: layers are in a dictionary by number, so that a stage of a pipeline keeps some
under their names; heads are counted in the output of a projection, so that a rank may have a part of them; the seed
of each weight is made of its name, so that any part of the model can be initialised alone.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from muster.config import TRANSFORMERS, check_transformer
from muster.train.data.sampler import seed_of


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer.

    Attributes:
        dim: width of a token's vector between the layers.
        num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads heads of queries.
        hidden: width inside the feed-forward part.
        context: tokens of a sequence, where --seq-len does not say otherwise.
        vocab: size of the vocabulary, where neither the data nor --vocab-size give it.
        theta: base of the wavelengths of the rotary embedding.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    context: int
    vocab: int = 256
    theta: float = 10_000.0


LLAMA_3 = partial(Shape, num_heads=32, num_kv_heads=8, vocab=128_256, theta=500_000.0)

# 1b and 8b have the shapes of Llama 3.2 1B and Llama 3 8B (huggingface.co/meta-llama, config.json), except that Llama's
# 1B shares the embedding with the output; 124m has the width, depth and heads of the small GPT-2.
SHAPES = {
    "gpt-tiny": Shape(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden=384, context=128),
    "gpt-small": Shape(dim=384, num_layers=6, num_heads=6, num_kv_heads=6, hidden=1024, context=256),
    "gpt-124m": Shape(dim=768, num_layers=12, num_heads=12, num_kv_heads=12, hidden=2048, context=1024, vocab=50_304),
    "gpt-1b": LLAMA_3(dim=2048, num_layers=16, hidden=8192, context=4096),
    "gpt-8b": LLAMA_3(dim=4096, num_layers=32, hidden=14336, context=8192),
}

assert tuple(SHAPES) == TRANSFORMERS

aten = torch.ops.aten

COSTLY = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operations whose results `selective` keeps: they take nearly all of the time, their results little of the memory."""


def shape_of(name: str) -> Shape:
    """The shape called `name`; MusterError where there is none."""
    check_transformer(name)
    return SHAPES[name]


@lru_cache(maxsize=8)
def rotary_angles(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine (TE) and sine (half of E) of the angle that rotates each pair of a head's dimensions at each position."""
    places_T = torch.arange(seq_len, device=device, dtype=torch.float32)
    pairs_E = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    angles_TE = torch.outer(places_T, theta ** (-pairs_E / head_dim))
    return torch.cat((angles_TE.cos(), angles_TE.cos()), dim=-1), angles_TE.sin()


def apply_rotary(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Queries or keys, rotated by position (RoFormer, arXiv 2104.09864); each pair has a dimension from each half."""
    half = x_BHTE.shape[-1] // 2
    turned = x_BHTE * cos_TE
    turned[..., :half].addcmul_(x_BHTE[..., half:], sin_TE, value=-1)
    turned[..., half:].addcmul_(x_BHTE[..., :half], sin_TE)
    return turned


class Rotary(torch.autograd.Function):
    """`apply_rotary` with its own backward pass, which rotates the gradient back by the same angles.

    Autograd's backward pass takes twice as long on CPUs: it adds up a tensor of the whole size for each half.
    """

    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        ctx.angles = cos_TE, sin_TE
        return apply_rotary(x_BHTE, cos_TE, sin_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_TE, sin_TE = ctx.angles
        return apply_rotary(gradients[0], cos_TE, -sin_TE), None, None


def widened(weight: Tensor, x: Tensor) -> Tensor:
    """`weight`, converted to double precision where `x` has it."""
    return weight.double() if x.dtype == torch.float64 else weight


class Linear(nn.Linear):
    """A linear layer that computes in double precision where its input has it."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, widened(self.weight, input))


class RMSNorm(nn.RMSNorm):
    """An RMS norm that computes in double precision where its input has it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = widened(self.weight, x)
        if x.is_cpu and x.dtype == weight.dtype != torch.bfloat16 and not isinstance(x, DTensor):
            return RMSNormOnCPU.apply(x, weight, self.eps)
        return rms_norm(x, self.normalized_shape, weight, self.eps)


class RMSNormOnCPU(torch.autograd.Function):
    """rms_norm for CPUs, where torch's is a chain of small operations, whose gradients take half as long again."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True)
        scale_BT1 = norm_BT1.square_().div_(x_BTD.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        return (x_BTD * scale_BT1).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient_BTD,) = gradients
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        # The backward pass of a layer norm over rows with a mean of 0, in one kernel. It differs by one term: the
        # gradient of the mean, which is added back here.
        mean_BT1, needed = torch.zeros_like(scale_BT1), [True, True, False]
        of_x_BTD, of_weight_D, _ = aten.native_layer_norm_backward(
            gradient_BTD, x_BTD, weight_D.shape, mean_BT1, scale_BT1, weight_D, None, needed
        )
        of_mean_BT1 = gradient_BTD.flatten(0, -2).mv(weight_D).view_as(scale_BT1).mul_(scale_BT1).div_(len(weight_D))
        return of_x_BTD.add_(of_mean_BT1), of_weight_D, None


def attend(query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> Tensor:
    """Causal attention (BTHE), on CPUs in fp32 separately for the first and the second half of the tokens.

    torch's kernel for CPUs goes through blocks of 512 keys: with fewer tokens than that, it also computes all scores
    that are masked. In two calls it computes a quarter less; in bf16 they would be slower than one.
    """
    seq_len = query_BHTE.shape[2]
    if not (query_BHTE.is_cpu and query_BHTE.dtype == torch.float32 and 128 < seq_len <= 512):
        return scaled_dot_product_attention(query_BHTE, key_BHTE, value_BHTE, is_causal=True).transpose(1, 2)
    half = seq_len // 2
    query, key, value = (part[:, :, :half] for part in (query_BHTE, key_BHTE, value_BHTE))
    is_visible = torch.ones(seq_len - half, seq_len, dtype=torch.bool).tril(half)
    halves = (
        scaled_dot_product_attention(query, key, value, is_causal=True),
        scaled_dot_product_attention(query_BHTE[:, :, half:], key_BHTE, value_BHTE, attn_mask=is_visible),
    )
    return torch.cat([mixed_BHTE.transpose(1, 2) for mixed_BHTE in halves], dim=1)


class Attention(nn.Module):
    """Causal grouped-query attention, over as many heads as the projections return."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        self.theta = shape.theta
        self.query = Linear(shape.dim, shape.num_heads * self.head_dim, bias=False)
        self.key = Linear(shape.dim, shape.num_kv_heads * self.head_dim, bias=False)
        self.value = Linear(shape.dim, shape.num_kv_heads * self.head_dim, bias=False)
        self.out = Linear(shape.num_heads * self.head_dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        angles = rotary_angles(query.shape[2], self.head_dim, self.theta, query.device)
        precise = torch.promote_types(query.dtype, torch.float32)
        query, key = (Rotary.apply(part.to(precise), *angles).to(part.dtype) for part in (query, key))
        if (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        return self.out(attend(query, key, value).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.dim, shape.hidden, bias=False)
        self.up = Linear(shape.dim, shape.hidden, bias=False)
        self.down = Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate(x_BTD), self.up(x_BTD)
        if x_BTD.is_cpu and not isinstance(gate_BTF, DTensor):
            return self.down(SwiGLU.apply(gate_BTF, up_BTF))
        return self.down(silu(gate_BTF) * up_BTF)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, with a backward pass that allocates less memory than autograd's."""

    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        silu_BTF = silu(gate_BTF)
        ctx.save_for_backward(gate_BTF, up_BTF, silu_BTF)
        return silu_BTF * up_BTF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTF, up_BTF, silu_BTF = ctx.saved_tensors
        of_silu_BTF = gradients[0] * up_BTF
        of_gate_BTF = aten.silu_backward.grad_input(of_silu_BTF, gate_BTF, grad_input=of_silu_BTF)
        return of_gate_BTF, gradients[0] * silu_BTF


class Layer(nn.Module):
    """Attention and feed-forward, each applied to the normalised input and added to the input.

    Args:
        recompute: what is computed again in the backward pass instead of being kept: none, selective, full.
    """

    def __init__(self, shape: Shape, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def compute(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(x_BTD)
        if self.recompute == "full":
            return checkpoint(self.compute, x_BTD, use_reentrant=False)  # torch.compile rejects an explicit default
        contexts = partial(create_selective_checkpoint_contexts, COSTLY)
        return checkpoint(self.compute, x_BTD, use_reentrant=False, context_fn=contexts)


class GPT(nn.Module):
    """Tokens (BT) -> scores of the next token (BTV).

    Attributes:
        embed, norm, output: None in a part of the model that does not have them.
        is_part: whether this is a part of the model: other ranks have the other layers.

    Args:
        exact: compute in double precision on CPUs, with weights and gradients in fp32: their last bits then don't
            depend on how sums within a matrix are split over ranks.
    """

    is_part = False

    def __init__(self, shape: Shape, num_tokens: int, recompute: str = "none", exact: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.exact = exact
        self.embed: nn.Embedding | None = nn.Embedding(num_tokens, shape.dim)
        self.layers = nn.ModuleDict({str(number): Layer(shape, recompute) for number in range(shape.num_layers)})
        self.norm: nn.RMSNorm | None = RMSNorm(shape.dim, eps=1e-5)
        self.output: nn.Linear | None = Linear(shape.dim, num_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.exact and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            x = x.double()
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws each weight with a seed from its name, so that every part of a split model gets those of the whole."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            # Smaller where a layer adds to the residual stream, which would otherwise grow with the number of layers.
            adds = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            std = 0.02 / math.sqrt(2 * self.shape.num_layers) if adds else 0.02
            generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, "weights", name))
            whole = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
            whole.normal_(std=std, generator=generator)
            if isinstance(parameter, DTensor):
                # Without communication: all ranks have drawn the same.
                sizes, starts = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                parameter.to_local().copy_(whole[box])
            else:
                parameter.copy_(whole)


def layers_of(shape: Shape, stage: int, num_stages: int) -> range:
    """The layers of a stage of a pipeline, whose `num_stages` stages have as equal a number of layers as possible."""
    return range(stage * shape.num_layers // num_stages, (stage + 1) * shape.num_layers // num_stages)


def keep_stages(model: GPT, stages: list[int], num_stages: int) -> None:
    """Removes all layers and ends from `model` that none of `stages` (numbered from 0) needs."""
    model.is_part = True
    kept = {str(layer) for stage in stages for layer in layers_of(model.shape, stage, num_stages)}
    for name in set(model.layers) - kept:
        del model.layers[name]
    if 0 not in stages:
        model.embed = None
    if num_stages - 1 not in stages:
        model.norm = model.output = None


def stage_of(model: GPT, stage: int, num_stages: int) -> GPT:
    """One stage of `model`, with the same layers and weights, not copies of them."""
    with torch.device("meta"):
        one = GPT(replace(model.shape, num_layers=0), 1, exact=model.exact)
    names = map(str, layers_of(model.shape, stage, num_stages))
    one.layers = nn.ModuleDict({name: model.layers[name] for name in names})
    one.embed = model.embed if stage == 0 else None
    one.norm, one.output = (model.norm, model.output) if stage == num_stages - 1 else (None, None)
    return one
