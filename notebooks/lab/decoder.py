"""A small OPT decoder, and the feed-forward block that the paper's models put into it.

The names of the linear layers are those of OPT in the transformers library (q_proj, k_proj, v_proj, out_proj, fc1,
fc2), so that adapters find their targets. Normalisation comes before each branch, positions are learned, the output is
tied to the token embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear

RELEASED_STD = 0.006  # init_std of the released configurations, at width 768
RELEASED_WIDTH = 768
CHUNKS = {"cpu": 1 << 14}  # numbers whose terms of a learned activation are computed at a time
LARGEST_CHUNK = 1 << 24  # on other devices


# ------------------------------------------------------------------------------------------------- the learned activation
def _chunks(device: torch.device, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The vectors in equal parts that are computed at a time."""
    size = CHUNKS.get(device.type, LARGEST_CHUNK)
    return zip(*(vector.split(size) for vector in vectors))


class _Activation(torch.autograd.Function):
    """phi(t) = sum_j v_j ReLU(w_j t + c_j) and its gradients, in chunks that stay in the processor's cache."""

    @staticmethod
    def forward(ctx, t: Tensor, w: Tensor, c: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(t, w, c, v)
        flat, out = t.reshape(-1), torch.empty(t.numel(), dtype=t.dtype, device=t.device)
        for part, target in _chunks(t.device, flat, out):
            torch.mv(torch.outer(w, part).add_(c[:, None]).relu_().T, v, out=target)
        return out.view(t.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        t, w, c, v = ctx.saved_tensors
        to_t = torch.empty(t.numel(), dtype=t.dtype, device=t.device)
        to_w, to_c, to_v = (torch.zeros_like(x) for x in (w, c, v))
        vectors = (t.reshape(-1), gradient.reshape(-1), to_t)
        for part, slope, target in _chunks(t.device, *vectors):
            terms = torch.outer(w, part).add_(c[:, None]).relu_()
            to_v += terms @ slope
            terms = torch.ops.aten.threshold_backward(torch.outer(v, slope), terms, 0)
            to_w += terms @ part
            to_c += terms.sum(1)
            torch.mv(terms.T, w, out=target)
        return to_t.view(t.shape), to_w, to_c, to_v


def learned_activation(t: Tensor, w: Tensor, c: Tensor, v: Tensor) -> Tensor:
    """phi(t) = sum_j v_j ReLU(w_j t + c_j) for each number of ``t``; w, c and v have m numbers each."""
    return _Activation.apply(t, w, c, v)


# ------------------------------------------------------------------------------------------------- feed-forward blocks
class FeedForward(nn.Module):
    """width -> hidden -> width with a ReLU between."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class NdFeedForward(nn.Module):
    """NdLinear (width, 1) -> (hidden, terms), ReLU, NdLinear back to (width, 1): the block of the released OPT.

    It has the parameters of the two layers and computes them as the equal dense block of ``hidden`` units, whose
    activation is one learned function of ``terms`` kinks, shared by all units.
    """

    def __init__(self, width: int, hidden: int, terms: int):
        super().__init__()
        self.fc1 = NdLinear((width, 1), (hidden, terms))
        self.fc2 = NdLinear((hidden, terms), (width, 1))

    def activation_parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """(w, c, v) of the learned activation."""
        first, last = self.fc1.align_layers[1], self.fc2.align_layers[1]
        return first.weight.flatten(), first.bias, last.weight.flatten()

    def forward(self, x: Tensor) -> Tensor:
        into, out_of = self.fc1.align_layers[0], self.fc2.align_layers[0]
        w, c, v = self.activation_parameters()
        hidden = learned_activation(F.linear(x, into.weight, into.bias), w, c, v)
        bias = out_of.bias * v.sum() + self.fc2.align_layers[1].bias
        return F.linear(hidden, out_of.weight, bias)


# ------------------------------------------------------------------------------------------------------------- the decoder
class SelfAttention(nn.Module):
    """Attention of each token to those before it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Attention and a feed-forward block, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, block: nn.Module):
        super().__init__()
        self.self_attn = SelfAttention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.block = block
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.block(self.final_layer_norm(x))


class Decoder(nn.Module):
    """Tokens (B, T) -> logits of the next token (B, T, vocabulary).

    Args:
        context: most tokens that it sees at once. block: makes the feed-forward block of a layer.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        block: Callable[[], nn.Module],
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, block()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last hidden states (B, T, width), normalised."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(at)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens), self.tokens.weight)


# ---------------------------------------------------------------------------------------------------------------- starts
def start_as_released(decoder: nn.Module, std: float) -> None:
    """The start of the released code: weights N(0, std), biases 0, also inside NdLinear.

    The two factors of a learned activation have as many inputs at any width (one, and the number of terms), so they
    keep the released deviation, while ``std`` is scaled with the width by the caller (`scaled_std`).
    """
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    for block in decoder.modules():
        if isinstance(block, NdFeedForward):
            for layer in (block.fc1, block.fc2):
                nn.init.normal_(layer.align_layers[1].weight, std=RELEASED_STD)


def scaled_std(width: int) -> float:
    """The released deviation of weights, at a width where the released model's branches keep their size."""
    return RELEASED_STD * math.sqrt(RELEASED_WIDTH / width)


@torch.no_grad()
def spread_kinks(block: NdFeedForward, std: float, reach: float = 2.0) -> None:
    """Start the learned activation as a ReLU whose kink is spread over ``reach`` deviations of its input on each side.

    All terms have slope one and equal weights, so that the branch has for normal inputs the mean square that it would
    have with a ReLU. ``std``: deviation of the entries of the first matrix; its input is normalised.
    """
    w, c, v = block.activation_parameters()
    width = block.fc1.input_dims[0]
    deviation = std * math.sqrt(width)
    kinks = torch.linspace(-reach, reach, len(w), dtype=w.dtype, device=w.device)
    w.fill_(1.0)
    c.copy_(-kinks * deviation)
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    soft = F.relu(z[:, None] - kinks.double().cpu()).mean(1)
    gain = math.sqrt(0.5 / (soft.square() * density).sum().item())
    v.fill_(gain / len(w))
