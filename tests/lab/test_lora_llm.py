"""The run on Qwen3 and LLaMA: prompts, labels, answers and estimates by hand, the whole path on tiny random models."""

import pytest
import torch
from lab import LabError
from lab.chapters import lora_llm
from lab.models import TARGETS

CONFIG = {"alpha": 1.0, "epochs": 2, "lr": 1e-3, "batch": 2, "length": 64, "seed": 0}


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 1,234.50 in all.", "1234.5"), ("3 and then -7", "-7"), ("none", ""), ("#### 80", "80")],
)
def test_the_last_number_is_the_answer(text, number):
    assert lora_llm.number_in(text) == number


def test_the_first_word_is_the_choice():
    assert lora_llm.word_in(" B.\nQuestion: A") == "b"
    assert lora_llm.word_in("Yes, it does") == "yes" and lora_llm.word_in("?!") == ""


def test_rows_become_prompts_and_answers():
    found = {f.__name__: f(row) for f, row in lora_llm.MADE_UP.items()}
    assert found["_worked"].gold == "5" and found["_worked"].answer == " 2 + 3 = 5\n#### 5"
    assert lora_llm._worked({"question": "4 + 3?", "final_ans": 7}).gold == "7"
    assert found["_boolq"].prompt == "Ice floats.\nQuestion: does ice float?\nAnswer:"
    assert (found["_boolq"].answer, found["_boolq"].gold) == (" yes", "yes")
    assert found["_choice"].prompt == "Question: Where is a book kept?\nA. shelf\nB. river\nAnswer:"
    assert (found["_choice"].answer, found["_choice"].gold) == (" A", "a")
    for kind in (*lora_llm.TESTED.values(), {"": lora_llm.TRAINED["mathematics"]}):
        for questions in kind.values():
            item = lora_llm.items(questions, tiny=True)[0]
            assert questions.read(item.answer) == item.gold, "its own answer is right"


def test_only_the_answer_is_trained_on():
    made = [lora_llm.Item("ab", "c", ""), lora_llm.Item("a", "", "")]
    ids, mask, labels = lora_llm.batch_of(made, lora_llm.Bytes(), 64)
    assert ids.tolist() == [[97, 98, 99, 256], [97, 256, 256, 256]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[-100, -100, 99, 256], [-100, 256, -100, -100]]
    cut, _, wanted = lora_llm.batch_of(made, lora_llm.Bytes(), 2)
    assert cut.tolist()[0] == [99, 256] == wanted.tolist()[0], "the answer is what stays"
    assert lora_llm.Bytes().decode([104, 105, 256]) == "hi"


@pytest.mark.parametrize("base", lora_llm.BASES)
def test_the_whole_path_runs_on_a_random_model_of_the_class(base):
    kind = "Qwen3ForCausalLM" if "Qwen" in base else "LlamaForCausalLM"
    assert type(lora_llm.load(base, tiny=True)[0]).__name__ == kind
    found = lora_llm.run(CONFIG | {"base": base, "arm": "ndlinear", "data": "commonsense"}, True)
    assert set(found["metrics"]) == {*lora_llm.TESTED["commonsense"], "last_loss"}
    assert 0 < found["metrics"]["last_loss"] < 8
    # two layers of width 32, inner 48, keys of 16: (4, 8), (6, 8) and (4, 4)
    square, keys, inner = 4 * 4 + 8 * 8, 4 * 4 + 8 * 4, 4 * 6 + 8 * 8
    assert found["parameters"] == 2 * (2 * square + 2 * keys + 3 * inner)


@pytest.mark.parametrize(
    ("arm", "count"), [("ndlinear", 28), ("ndlinear-released", 56), ("lora-2", 28)]
)
def test_arms_train_their_adapters_alone_and_learn_the_answer(arm, count):
    torch.manual_seed(0)
    model, tokenizer = lora_llm.load("Qwen/Qwen3-1.7B-Base", tiny=True)
    ids = torch.arange(12)[None]
    before = model(ids).logits.detach()
    model = lora_llm.adapt(model, arm)
    now = model.eval()(ids).logits
    assert torch.allclose(now, before, atol=1e-6) == (arm != "ndlinear-released")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == count
    assert all(any(target in name for target in TARGETS) for name in trained)
    data = [lora_llm.Item("is it?", "yes", "yes")] * 4
    schedule = {"epochs": 12, "lr": 3e-2, "batch": 2, "length": 32, "seed": 0}
    losses = lora_llm.fine_tune(model, tokenizer, data, **schedule)
    assert len(losses) == 24 and losses[-1] < losses[0] - 0.3


def test_answers_come_back_in_order_and_end_at_the_end():
    class Echo(torch.nn.Module):
        """Writes the last byte of each prompt, a mark, the end, and a mark again."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def generate(self, input_ids, attention_mask, max_new_tokens, **options):
            assert options == {"do_sample": False, "pad_token_id": 256}
            assert torch.equal(input_ids == 256, attention_mask == 0), "padding on the left"
            assert attention_mask[:, -1].all()
            rest = torch.tensor([33, 256, 33]).expand(len(input_ids), 3)
            return torch.cat([input_ids, input_ids[:, -1:], rest], 1)

    prompts = ["abc", "b", "longer d", "e"]
    found = lora_llm.answers(Echo(), lora_llm.Bytes(), prompts, 4, batch=3)
    assert found == ["c!", "b!", "d!", "e!"]


def test_unknown_names_are_refused():
    with pytest.raises(LabError, match="no base 'gpt'"):
        lora_llm.load("gpt")
    with pytest.raises(LabError, match="no arm 'dora'"):
        lora_llm.adapt(torch.nn.Linear(2, 2), "dora")


def test_accuracy_counts_right_answers(monkeypatch):
    monkeypatch.setattr(lora_llm, "answers", lambda *a, **k: [" A", "B", "a.", "A"])
    questions = lora_llm.TESTED["commonsense"]["CSQA"]
    assert lora_llm.accuracy(None, None, questions, tiny=True) == 0.75


# ------------------------------------------------------------------------------------------------- the authors' own models
def published(model, bias):
    """A small checkpoint of the newer script's layout: two factors for every q_proj, under `.adapter.adapter.`"""
    torch.manual_seed(0)
    tensors = {"lm_head.weight": torch.zeros(1)}
    for name, layer in model.named_modules():
        if name.endswith("q_proj"):
            sizes = (4, 2), (layer.in_features // 4, layer.out_features // 2)
            for k, (inputs, outputs) in enumerate(sizes):
                start = f"{name}.adapter.adapter.align_layers.{k}"
                tensors[f"{start}.weight"] = torch.randn(outputs, inputs)
                if bias:
                    tensors[f"{start}.bias"] = torch.randn(outputs)
    return tensors


@pytest.mark.parametrize("bias", [False, True])
def test_a_published_checkpoint_gives_the_function_of_the_script(bias):
    """The script: last axis first, then the first axis, each with its bias, times alpha, beside the frozen map."""
    model, _ = lora_llm.load("Qwen/Qwen3-1.7B-Base", tiny=True)
    tensors = published(model, bias)
    name = next(key for key in tensors if "adapter" in key).partition(".adapter.")[0]
    base = model.get_submodule(name)
    starts = [f"{name}.adapter.adapter.align_layers.{k}" for k in (0, 1)]
    first, last = (tensors[f"{start}.weight"] for start in starts)
    b_first, b_last = (tensors.get(f"{start}.bias", torch.zeros(1)) for start in starts)
    x = torch.randn(3, base.in_features)
    folded = torch.einsum("bij,lj->bil", x.reshape(3, 4, -1), last) + b_last
    update = torch.einsum("bil,ki->bkl", folded, first) + b_first[:, None]
    wanted = base(x) + 2.0 * update.flatten(1)
    lora_llm.put_published(model, tensors, alpha=2.0)
    torch.testing.assert_close(model.get_submodule(name)(x), wanted, atol=1e-4, rtol=1e-4)


def test_published_adapters_are_asked_as_the_released_scripts_ask():
    asked = {
        name: lora_llm.ask_as_released(name, lora_llm.items(questions, tiny=True)[0].prompt)
        for sets in lora_llm.TESTED.values()
        for name, questions in sets.items()
    }
    lines = ["Solve the following math problem step by step:", "", "What is 2 + 3?", "", "Answer: "]
    assert asked["GSM8K"] == r"\n".join(lines) and asked["MultiArith"].count(r"\n") == 4
    lines = ["Question: Where is a book kept?", "Choices:", "A. shelf", "B. river", "Answer:"]
    assert asked["CSQA"] == "\n".join(lines)
    assert asked["ARC-Easy"] == asked["ARC-Challenge"] == r"\n".join(lines)
    assert asked["BoolQ"].endswith("Question: does ice float?\nAnswer:")


def test_a_published_checkpoint_is_evaluated_and_a_foreign_one_refused(tmp_path):
    base = "Qwen/Qwen3-1.7B-Base"
    tensors = published(lora_llm.load(base, tiny=True)[0], False)
    pytest.importorskip("safetensors.torch").save_file(tensors, tmp_path / "model.safetensors")
    c = {"base": base, "data": "commonsense", "alpha": 1.0, "folder": str(tmp_path)}
    found = lora_llm.run_published(c, tiny=True)
    assert set(found) == set(lora_llm.TESTED["commonsense"])
    with pytest.raises(LabError, match="no key of the checkpoint"):
        lora_llm.put_published(torch.nn.Linear(2, 2), {"weight": torch.zeros(2)}, 1.0)
    with pytest.raises(LabError, match="does not fit the model"):
        lora_llm.put_published(torch.nn.Linear(2, 2), tensors, 1.0)
