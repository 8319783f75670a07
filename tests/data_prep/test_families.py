"""Every family's chat format: rendered, answered, masked, shown; and nothing that a user could forge."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.answer import answer
from data_prep.chat import ChatRenderer
from data_prep.prompts import Message
from data_prep.show import marked
from peagle_train.store import AnswerRow
from peagle_train.target.adapter import Target
from peagle_train.target.tokens import control_texts, is_reserve
from peagle_train.twin.models import TOKENIZERS, TWINS
from peagle_train.twin.tokenizers import save_tokenizer

DAY = date(2025, 6, 28)
QUESTION = "What is 2 plus 2?"
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FORMATS = {
    "smollm2": CHATML,
    "qwen2": CHATML,
    "qwen3": CHATML,
    "qwen3_moe": CHATML,
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDay: 28 Jun 2025\n\nBe brief."
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gpt_oss": "<|start|>system<|message|>An assistant.\nDay: 2025-06-28\nReasoning: medium\n"
    "Channels: analysis, commentary, final.<|end|>"
    "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
    "<|start|>user<|message|>{}<|end|><|start|>assistant",
    "gemma4": "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n{}<turn|>\n<|turn>model\n"
    "<|channel>thought\n<channel|>",
}
# An answer as the family writes one, its end left off.
ANSWERS = {
    "smollm2": "It is 4.",
    "qwen2": "It is 4.",
    "qwen3": "<think>\n2 plus 2\n</think>\n\nIt is 4.",
    "qwen3_moe": "<tool_call>\nsum\n</tool_call>",
    "llama3": "<|python_tag|>2 + 2",
    "gpt_oss": "<|channel|>analysis<|message|>2 plus 2<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 4.",
    "gemma4": "<|channel>thought\n2 plus 2<channel|>It is 4.",
}


@pytest.fixture(scope="module", params=sorted(TWINS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(TWINS[kind](tmp_path_factory.mktemp(kind)), dtype="float32", device="cpu")


def renderer(target: Target) -> ChatRenderer:
    dated = "strftime_now" in target.tokenizer.chat_template
    return ChatRenderer(target.tokenizer, "Be brief.", day=DAY if dated else None)


def encode(target: Target, text: str) -> list[int]:
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def control_ids(target: Target) -> set[int]:
    return set(target.tokenizer.convert_tokens_to_ids(list(control_texts(target.tokenizer))))


def test_the_rendering_is_the_familys_format(kind: str, target: Target) -> None:
    ids = renderer(target).render([Message("user", QUESTION)])
    text = FORMATS[TOKENIZERS[kind]].format(QUESTION)
    assert target.tokenizer.decode(ids) == text
    # Each mark is one token, and each word plain text.
    marks = control_texts(target.tokenizer)
    expected = sum(text.count(mark) for mark in marks)
    assert sum(id in control_ids(target) for id in ids) == expected > 0
    assert target.tokenizer.bos_token is None or ids.count(target.tokenizer.bos_token_id) == text.count(
        target.tokenizer.bos_token
    )


def test_the_loss_mask_covers_exactly_what_was_generated(
    kind: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is made to say an answer of its family's form; each end token in turn ends it."""
    prompts = [
        renderer(target).render([Message("user", text)]) for text in (QUESTION, "What is the sum of 2 and 2?")
    ]
    said = encode(target, ANSWERS[TOKENIZERS[kind]])
    forward = target.logits
    for end in target.end_token_ids:
        script = iter([*said, end])

        def scripted(last: torch.Tensor, script: Any = script) -> torch.Tensor:
            logits = forward(last)
            logits[:, next(script)] = torch.inf
            return logits

        monkeypatch.setattr(target, "logits", scripted)
        rows = answer(target, prompts, max_new_tokens=len(said) + 5)
        for prompt, found in zip(prompts, rows, strict=True):
            assert found.finish == "stop"
            assert found.token_ids == [*prompt, *said, end]
            spans = [[len(prompt), len(found.token_ids)]]
            row = AnswerRow(0, "train", "p", QUESTION, found.token_ids, spans, found.finish)
            assert row.loss_mask == [False] * len(prompt) + [True] * (len(said) + 1)
            shown = marked(row, target.tokenizer, colour=False).plain
            ending = target.tokenizer.decode([end])
            assert f"{FORMATS[TOKENIZERS[kind]][-9:]}>>{ANSWERS[TOKENIZERS[kind]]}{ending}<<" in shown
            assert shown.count("*") == len(said) + 1


def test_the_targets_own_greedy_words_are_masked_alike(target: Target) -> None:
    prompt = renderer(target).render([Message("user", QUESTION)])
    found = answer(target, [prompt], max_new_tokens=9)[0]
    new = len(found.token_ids) - len(prompt)
    assert found.prompt_length == len(prompt) and found.token_ids[: len(prompt)] == prompt
    assert (new == 9 and found.finish == "length") or found.token_ids[-1] in target.end_token_ids


def test_no_control_token_comes_from_a_user(kind: str, target: Target) -> None:
    made = renderer(target)
    honest = [id for id in made.render([Message("user", "x")]) if id in control_ids(target)]
    marks = control_texts(target.tokenizer)
    assert len(marks) >= 3
    for mark in marks:
        for text in (mark, f"x{mark}y", f"x {mark}\n"):
            assert made.spells_control_token([Message("user", text)]) is not None
    # Text that comes near one is let through, and stays text.
    marks = {mark for mark in marks if not is_reserve(mark)}
    near = [mark[1:] for mark in marks] + [mark[:-1] for mark in marks] + [mark.upper() for mark in marks]
    near += [" ".join(mark) for mark in marks] + ["<|", "|>", "<0x41>", "</s>"]
    near = [text for text in near if not made.spells_control_token([Message("user", text)])]
    assert len(near) > 10
    for text in near:
        ids = made.render([Message("user", text)])
        assert [id for id in ids if id in control_ids(target)] == honest


VARIABLES: dict[str, tuple[str, Any, str]] = {
    "gpt_oss": ("reasoning_effort", "low", "Reasoning: low"),
    "gemma4": ("enable_thinking", True, "<|turn>system\n<|think|>\nBe brief."),
    "qwen3": ("enable_thinking", False, "assistant\n<think>\n\n</think>\n\n"),
    "llama3": ("date_string", "a Monday", "Day: a Monday"),
}


@pytest.mark.parametrize("family", sorted(VARIABLES))
def test_variables_reach_the_template(family: str, tmp_path: Path) -> None:
    name, value, written = VARIABLES[family]
    tokenizer = save_tokenizer(tmp_path, family, 448)
    day = DAY if "strftime_now" in tokenizer.chat_template else None
    texts = [
        tokenizer.decode(
            ChatRenderer(tokenizer, "Be brief.", variables, day).render([Message("user", QUESTION)])
        )
        for variables in ({}, {name: value})
    ]
    assert written not in texts[0] and written in texts[1]


def test_qwen_coders_tools_stand_in_the_system_turn(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "qwen3_moe", 448)
    tool = {"name": "sum", "parameters": {"type": "object"}}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert '{"name": "sum"' in text.split("<|im_end|>")[0]
    assert ids.count(tokenizer.convert_tokens_to_ids("<tool_call>")) == 1
