"""The models that every lesson trains."""

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchvision.models import resnet18 as torchvision_resnet18

from utils.errors import BadInput

NORMS = {"group": partial(nn.GroupNorm, 32), "batch": nn.BatchNorm2d}


def resnet18(num_classes: int = 10, in_channels: int = 1, norm: str = "group"):
    """Make torchvision's ResNet-18 (11 million parameters) with random weights.

    Takes images of shape [batch, in_channels, height, width] and returns logits of shape
    [batch, num_classes]. Two changes to torchvision's model: the first convolution takes
    `in_channels` channels, and `norm="group"` (the default) is GroupNorm with 32 groups,
    which treats every image alone. `norm="batch"` is the original BatchNorm: it averages
    over the images of one rank, so results depend on how many ranks there are.

    Sources: He et al. 2015 (arXiv 1512.03385); Wu and He 2018 (arXiv 1803.08494).

    Raises:
        BadInput: `norm` is neither "group" nor "batch".
    """
    if norm not in NORMS:
        raise BadInput(f"norm is {norm!r}, but must be 'group' or 'batch'.")
    model = torchvision_resnet18(num_classes=num_classes, norm_layer=NORMS[norm])
    first = model.conv1
    model.conv1 = nn.Conv2d(
        in_channels, 64, first.kernel_size, first.stride, first.padding, bias=False
    )
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


class Shape(NamedTuple):
    """The sizes of a decoder-only transformer, from which its bytes and FLOPs follow.

    layers: blocks. width: numbers per token between blocks. ffn: those inside a block's
    feed-forward network. heads: of attention; kv_heads: of its keys and values, fewer where
    several heads share them. vocabulary: in tokens. gated: the network multiplies two
    products of its input (SwiGLU), so it has three matrices instead of two. tied: the
    output layer uses the weights of the token embedding.

    Sources: https://github.com/meta-llama/llama-models (Llama 3), Shazeer 2020 (SwiGLU,
    arXiv 2002.05202), Ainslie et al. 2023 (shared keys and values, arXiv 2305.13245).
    """

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    gated: bool = True
    tied: bool = False

    @property
    def block(self) -> int:
        """Parameters in the matrices of a block."""
        attention = 2 * self.width**2 * (1 + self.kv_heads / self.heads)
        return int(attention + (3 if self.gated else 2) * self.width * self.ffn)

    @property
    def parameters(self) -> int:
        """All but norms, biases and learned positions: under 1% of a large model."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.layers * self.block + embeddings


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a `GPT`: vocabulary in tokens, block size (longest text) in tokens."""

    vocab_size: int = 256  # one token per byte of text
    block_size: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64

    @property
    def shape(self) -> Shape:
        return Shape(
            *(self.layers, self.width, 4 * self.width, self.heads, self.heads),
            vocabulary=self.vocab_size,
            gated=False,
        )


SMOKE = GPTConfig()  # 0.24 million parameters
# 163 million parameters: GPT-2's 124 million, and an output layer of its own.
GPT2_124M = GPTConfig(vocab_size=50257, block_size=1024, layers=12, heads=12, width=768)
SIZES = {"smoke": SMOKE, "gpt2-124m": GPT2_124M}  # by the name that a command line says


class Block(nn.Module):
    """One layer: every token looks at the tokens before it, then thinks by itself."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width, self.head_width = config.width, config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):  # [batch, time, width]
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def attend(self, x):
        batch, time, _ = x.shape
        # the rows of qkv belong to one head after the other: any half has whole heads
        qkv = self.qkv(x).view(batch, time, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads, time, width / heads]
        # is_causal instead of a mask: a buffer would be lost by an init on "meta"
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class GPT(nn.Module):
    """A decoder-only transformer in the shape of GPT-2, with random weights.

    Takes tokens, integers of shape [batch, time] with time up to `config.block_size`,
    and returns logits of shape [batch, time, vocab_size]. A layer norm comes before
    each part of a layer; the output layer has weights of its own, because FSDP2 cannot
    put one tensor into two groups.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    Raises:
        BadInput: the width is not a multiple of the number of heads, or an input is
            longer than the block size.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.width % config.heads:
            raise BadInput(
                f"The width is {config.width}, which {config.heads} heads cannot share "
                "equally: choose a multiple of the number of heads."
            )
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if self.head.weight.device.type != "meta":
            self.init_weights()

    def init_weights(self):
        """Fill every parameter; call it after a model of device "meta" got memory."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if (bias := getattr(module, "bias", None)) is not None:
                    nn.init.zeros_(bias)

    def forward(self, tokens):  # [batch, time] -> [batch, time, vocab_size]
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise BadInput(
                f"The text has {time} tokens, but this GPT reads at most "
                f"{self.config.block_size}: cut it, or choose a larger block_size."
            )
        places = torch.arange(time, device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _NormInOne(torch.autograd.Function):
    """RMSNorm that keeps its input and a number per token, as PyTorch's kernel for GPUs."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, grad_normed = x * scale, grad * weight
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_x = (grad_normed - normed * along) * scale
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, which on a CPU is several operations, and keeps what each returns."""

    def forward(self, x):
        return _NormInOne.apply(x, self.weight)


class LlamaBlock(nn.Module):
    """A block as in Llama 3: RMSNorm, rotary positions, shared keys and values, SwiGLU."""

    def __init__(self, shape: Shape):
        super().__init__()
        width, self.head_width = shape.width, shape.width // shape.heads
        of_keys = shape.kv_heads * self.head_width
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, of_keys, bias=False)
        self.v = nn.Linear(width, of_keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, shape.ffn, bias=False)
        self.up = nn.Linear(width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x):  # [batch, time, width]
        x = x + self.attend(self.norm1(x))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x):
        # each [batch, heads, time, head width]; keys and values have fewer heads
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            *(rotate(q), rotate(k), v), is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x):  # [batch, heads, time, head width]
    """Turn each pair of numbers by an angle that grows with its place in the text.

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864).
    """
    time, half = x.shape[-2], x.shape[-1] // 2
    numbers = torch.arange(half, dtype=torch.float32, device=x.device)
    speeds = 500_000 ** -(numbers / half)
    angles = torch.arange(time, device=x.device)[:, None] * speeds
    turned = torch.view_as_complex(x.float().unflatten(-1, (half, 2)))
    turned = turned * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Llama(nn.Module):
    """A decoder-only transformer in the shape of Llama 3, with random weights.

    Takes tokens, integers of shape [batch, time], and returns logits of shape
    [batch, time, vocabulary].

    Source: Dubey et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783).
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens):  # [batch, time] -> [batch, time, vocabulary]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def checkpoint_blocks(model: GPT | Llama, what: str = "full") -> None:
    """Let a model's blocks compute their activations again in the backward pass.

    Args:
        model: before it is sharded.
        what: "none"; "full": of a block only its input is kept; "selective": also what its
            matrix products and attention return, which would cost most to compute again.

    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if what == "none":
        return
    options: dict = {}
    if what == "selective":
        aten = torch.ops.aten
        kept = [
            aten.mm.default,
            aten.addmm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
        ]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, **options)


@torch.no_grad()
def fill_by_name(model: nn.Module, gather=nullcontext, seed: int = 0) -> None:
    """Give a GPT random weights, the same on every number of ranks, sharded or not.

    Each parameter is drawn whole from a seed of its name, on the CPU of every rank. If it
    is a DTensor, each rank then keeps its shard. So beside its shards a rank never holds
    more than one parameter and its pieces. The values are distributed as those of
    `init_weights`.

    Args:
        model: in memory, not on "meta".
        gather: for parameters that are whole only in a `with gather(parameter)` block,
            as at stage 3 of DeepSpeed.
        seed: another one gives other weights.
    """
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")  # of `checkpoint_blocks`
        with gather(parameter):
            parameter.copy_(  # no name for it: the next would be drawn beside it
                cut_like(parameter, start_values(name, parameter.shape, seed))
            )


def cut_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter's whole values, a DTensor; sends nothing."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def start_values(name: str, shape: torch.Size, seed: int = 0) -> torch.Tensor:
    """Draw what a GPT's parameter `name` starts from, from a seed of that name."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # the weight of a layer norm
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.empty(shape).normal_(std=0.02, generator=generator)
