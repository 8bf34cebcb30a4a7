"""Adapters on Qwen3-1.7B and LLaMA3-8B, as the paper prints them: loaders, prompts, training on the answers, greedy answers.

The real models need transformers, peft and datasets, their weights and a GPU. `load` with ``tiny`` builds a random model of the
same class with two narrow layers, on which the whole path runs in seconds; its answers mean nothing.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ndlinear_lora import NdLinearLoRA, apply_ndlinear_lora

from ..machine import require
from ..models import TARGETS, size
from ..modes import LabError
from ..train.loop import check_finite, default_device

BASES = {  # name on the hub -> the paper's name, the class of its configuration, the licence
    "Qwen/Qwen3-1.7B-Base": ("Qwen3-1.7B", "qwen3", "Apache-2.0"),
    "meta-llama/Meta-Llama-3-8B": ("LLaMA3-8B", "llama", "Meta Llama 3 Community License"),
}
IGNORED = -100  # label of a token that is not trained on


# ---------------------------------------------------------------------------------------------------- model and tokenizer
class Bytes:
    """A stand-in for a tokenizer that needs no file: one token for each byte, and one for the end."""

    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def load(base: str, tiny: bool = False):
    """Model and tokenizer of a base: from the hub in bfloat16, or a random model of the same class with two narrow layers."""
    if base not in BASES:
        raise LabError(f"no base {base!r}; there are: {', '.join(BASES)}")
    transformers = require("transformers")
    if tiny:
        sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        ends = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
        config = transformers.AutoConfig.for_model(BASES[base][1], **sizes, **ends)
        return transformers.AutoModelForCausalLM.from_config(config), Bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return model, transformers.AutoTokenizer.from_pretrained(base)


def adapt(model: nn.Module, arm: str, alpha: float = 1.0) -> nn.Module:
    """Freeze a language model and put the adapters of an arm on its seven kinds of linear maps, in float32.

    Args:
        arm: "ndlinear", "ndlinear-released" (biases, order and start of the release) or "lora-<rank>" (peft's).
        alpha: scale of the update; of LoRA, alpha / rank is, as in peft.
    """
    if arm.startswith("lora-"):
        peft, rank = require("peft"), int(arm.removeprefix("lora-"))
        sizes = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.05}
        return peft.get_peft_model(model, peft.LoraConfig(**sizes, target_modules=list(TARGETS)))
    if arm not in ("ndlinear", "ndlinear-released"):
        raise LabError(f"no arm {arm!r}; give ndlinear, ndlinear-released or lora-<rank>")
    released = {"bias": True, "transform_outer": False} if arm == "ndlinear-released" else {}
    apply_ndlinear_lora(model, TARGETS, alpha=alpha, dropout=0.05, dtype=torch.float32, **released)
    for module in model.modules():
        if released and isinstance(module, NdLinearLoRA):
            module.adapter.reset_parameters()
    return model


# ------------------------------------------------------------------------------------------------------ questions, answers
@dataclass(frozen=True)
class Item:
    """A prompt, the text that is trained as its answer, and what the answer must come to."""

    prompt: str
    answer: str
    gold: str


@dataclass(frozen=True)
class Questions:
    """A set of questions on the hub: where it is, which part, how a row becomes an `Item`, and how an answer is read."""

    address: tuple[str, ...]
    part: str
    item: Callable[[dict], Item]
    read: Callable[[str], str]
    most: int  # tokens of an answer


def number_in(text: str) -> str:
    """The last number of a text without commas and final zeros; "" if there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return f"{float(found[-1].replace(',', '')):g}" if found else ""


def word_in(text: str) -> str:
    """The first word of a text, in lower case: a letter, or yes or no."""
    found = re.search(r"[A-Za-z0-9]+", text)
    return found[0].lower() if found else ""


def _worked(row: dict) -> Item:
    """A row of GSM8K, whose solution ends in #### and the number, or of MultiArith, which has the number alone."""
    solution = str(row.get("answer", row.get("final_ans")))
    return Item(f"Question: {row['question']}\nAnswer:", f" {solution}", number_in(solution))


def _choice(row: dict) -> Item:
    choices = zip(row["choices"]["label"], row["choices"]["text"])
    listed = "\n".join(f"{label}. {text}" for label, text in choices)
    prompt = f"Question: {row['question']}\n{listed}\nAnswer:"
    return Item(prompt, f" {row['answerKey']}", row["answerKey"].lower())


def _boolq(row: dict) -> Item:
    answer = "yes" if row["answer"] else "no"
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return Item(prompt, f" {answer}", answer)


ARC = "allenai/ai2_arc"
TRAINED = {  # for the mathematics GSM8K alone: the paper names Math10K and OpenMathInstruct-1
    "mathematics": Questions(("openai/gsm8k", "main"), "train", _worked, number_in, 256),
    "commonsense": Questions(("tau/commonsense_qa",), "train", _choice, word_in, 4),
}
TESTED = {
    "mathematics": {
        "GSM8K": Questions(("openai/gsm8k", "main"), "test", _worked, number_in, 256),
        "MultiArith": Questions(("ChilleD/MultiArith",), "test", _worked, number_in, 256),
    },
    "commonsense": {
        "CSQA": Questions(("tau/commonsense_qa",), "validation", _choice, word_in, 4),
        "ARC-Easy": Questions((ARC, "ARC-Easy"), "test", _choice, word_in, 4),
        "ARC-Challenge": Questions((ARC, "ARC-Challenge"), "test", _choice, word_in, 4),
        "BoolQ": Questions(("google/boolq",), "validation", _boolq, word_in, 4),
    },
}
MADE_UP = {  # a row of each form, for smoke runs
    _worked: {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"},
    _boolq: {"passage": "Ice floats.", "question": "does ice float", "answer": True},
    _choice: {
        "question": "Where is a book kept?",
        "choices": {"label": ["A", "B"], "text": ["shelf", "river"]},
        "answerKey": "A",
    },
}


def items(questions: Questions, tiny: bool = False) -> list[Item]:
    """The items of a set of questions; with ``tiny`` four made-up ones of the same form."""
    if tiny:
        return [questions.item(MADE_UP[questions.item])] * 4
    rows = require("datasets").load_dataset(*questions.address, split=questions.part)
    return [questions.item(row) for row in rows]


# ---------------------------------------------------------------------------------------------------- training, answering
def batch_of(chosen: Sequence[Item], tokenizer, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(n, T) tokens, mask and labels of prompts with their answers; the prompt and the padding have no label."""
    rows, labels = [], []
    for item in chosen:
        prompt = tokenizer.encode(item.prompt)
        answer = [*tokenizer.encode(item.answer), tokenizer.eos_token_id]
        rows.append(torch.tensor((prompt + answer)[-length:]))
        labels.append(torch.tensor(([IGNORED] * len(prompt) + answer)[-length:]))
    parts = (rows, tokenizer.eos_token_id), (map(torch.ones_like, rows), 0), (labels, IGNORED)
    return tuple(
        nn.utils.rnn.pad_sequence(list(part), batch_first=True, padding_value=filled)
        for part, filled in parts
    )


def fine_tune(model, tokenizer, data: Sequence[Item], *, epochs, lr, batch, length, seed) -> list:
    """Train the adapters on the answers with AdamW at a constant rate, as in the release; returns the loss before each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    order, losses = torch.Generator().manual_seed(seed), []
    model.train()
    for now in range(1, epochs + 1):
        for index in torch.randperm(len(data), generator=order).split(batch):
            parts = batch_of([data[i] for i in index.tolist()], tokenizer, length)
            ids, mask, labels = (part.to(trained[0].device) for part in parts)
            adam.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()))
            check_finite(losses[-1], now, lr)
    return losses


@torch.inference_mode()
def answers(model, tokenizer, prompts: Sequence[str], most: int, batch: int = 32) -> list[str]:
    """What the model writes after each prompt, greedily, up to ``most`` tokens; prompts are padded on the left."""
    model.eval()
    device, end = next(model.parameters()).device, tokenizer.eos_token_id
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    found = [""] * len(encoded)
    order = np.argsort([len(row) for row in encoded], kind="stable")
    for start in range(0, len(order), batch):
        places = order[start : start + batch].tolist()
        gaps = [len(encoded[places[-1]]) - len(encoded[i]) for i in places]
        ids = torch.tensor([[end] * gap + encoded[i] for i, gap in zip(places, gaps)])
        mask = torch.tensor([[i >= gap for i in range(ids.shape[1])] for gap in gaps]).long()
        how = {"max_new_tokens": most, "do_sample": False, "pad_token_id": end}
        written = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **how)
        for place, row in zip(places, written[:, ids.shape[1] :].tolist()):
            found[place] = tokenizer.decode(row[: row.index(end)] if end in row else row)
    return found


def accuracy(model, tokenizer, questions: Questions, tiny: bool = False, ask=str) -> float:
    """Share of the questions whose answer, as it is read, is the right one; ``ask`` rewrites their prompts."""
    asked = items(questions, tiny)
    most = min(questions.most, 8) if tiny else questions.most
    written = answers(model, tokenizer, [ask(item.prompt) for item in asked], most)
    right = [questions.read(text) == item.gold for text, item in zip(written, asked)]
    return sum(right) / len(right)


def run(c: dict, tiny: bool = False) -> dict:
    """One fine-tuning of a base with an arm, and its accuracies on the test sets that belong to the training set."""
    model, tokenizer = load(c["base"], tiny)
    model = adapt(model.to(default_device()), c["arm"], c["alpha"])
    data = items(TRAINED[c["data"]], tiny)
    schedule = {key: c[key] for key in ("epochs", "lr", "batch", "length", "seed")}
    losses = fine_tune(model, tokenizer, data, **schedule)
    found = {name: accuracy(model, tokenizer, q, tiny) for name, q in TESTED[c["data"]].items()}
    return {"metrics": found | {"last_loss": losses[-1]}, "parameters": size(model)}


# ------------------------------------------------------------------------------------------------- the authors' own models
INSIDE = ".adapter.adapter."  # in the keys of ensemble-core/NdLinear-LoRA, commit 345ea75; here it is ".adapter."


def put_published(model: nn.Module, tensors: Mapping[str, Tensor], alpha: float) -> nn.Module:
    """Put the adapters of a checkpoint of the authors' newer script on a model, in place, as NdLinearLoRA.

    Args:
        tensors: of the checkpoint; keys without `INSIDE` are left out. alpha: that of the training.

    Raises:
        LabError: there are no such adapters, or one does not fit the model.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, inside, rest = key.partition(INSIDE)
        if inside:
            found.setdefault(name, {})[rest] = value
    if not found:
        raise LabError(f"no key of the checkpoint has {INSIDE!r} in it: {list(tensors)[:5]}")
    for name, state in found.items():
        weights = [state[key] for key in sorted(state) if key.endswith(".weight")]
        folds = [tuple(weight.shape[axis] for weight in weights) for axis in (1, 0)]
        options = {"bias": len(state) > len(weights), "transform_outer": False}
        try:
            layer = NdLinearLoRA(
                model.get_submodule(name), *folds, alpha=alpha, dtype=torch.float32, **options
            )
            layer.adapter.load_state_dict(state)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise LabError(f"{name} does not fit the model: {error}") from error
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return model


SOLVE = {  # how the released evaluation begins
    "GSM8K": "Solve the following math problem step by step:",
    "MultiArith": "Solve the following math problem:",
}


def ask_as_released(name: str, prompt: str) -> str:
    """A prompt of `TESTED` in the words of the authors' scripts of the older repository, commit 95888fc.

    Their evaluation has mathematics and ARC, with a backslash and an n where a line should end. CommonsenseQA is asked as it is
    trained there. BoolQ is in no script and stays as it is.
    """
    if name == "BoolQ":
        return prompt
    asked = prompt.removesuffix("\nAnswer:")
    if name in SOLVE:
        return rf"{SOLVE[name]}\n\n{asked.removeprefix('Question: ')}\n\nAnswer: "
    question, _, choices = asked.partition("\n")
    asked = f"{question}\nChoices:\n{choices}\nAnswer:"
    return asked if name == "CSQA" else asked.replace("\n", r"\n")


def run_published(c: dict, tiny: bool = False) -> dict:
    """Accuracies of a published adapter on the test sets of its training set, without training, asked as released."""
    load_file = require("safetensors.torch").load_file
    model, tokenizer = load(c["base"], tiny)
    tensors = {}
    for file in sorted(pathlib.Path(c["folder"]).glob("*.safetensors")):
        tensors |= load_file(file)
    model = put_published(model, tensors, c["alpha"]).to(default_device())
    return {
        name: accuracy(model, tokenizer, questions, tiny, functools.partial(ask_as_released, name))
        for name, questions in TESTED[c["data"]].items()
    }
