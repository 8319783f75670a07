"""What a target said, read from its token ids: whole, and every way of not being readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.formats import FORMATS, format_of
from data_prep.formats.base import Said
from peagle_train.twin.tokenizers import SHAPES, save_tokenizer

EXPECTED = {"smollm2": "chatml", "qwen2": "chatml", "qwen3": "chatml", "qwen3_moe": "chatml"}
EXPECTED |= {"llama3": "llama3", "gpt_oss": "harmony", "gemma4": "gemma4"}
PROMPTS = {
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "gpt_oss": "<|start|>user<|message|>Hi<|end|><|start|>assistant",
    "gemma4": "<bos><|turn>user\nHi<turn|>\n<|turn>model\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
FINAL = "<|channel|>final<|message|>"
ADD = {"name": "add", "arguments": {"a": 2}}
NESTED = {"a": {"b": [1, "x:y{", True]}, "c-d": None}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {family: save_tokenizer(folder / family, family, 448) for family in SHAPES}


def read(tokenizer: Any, prompt: str, answer: str, *, tools: bool = True) -> Said:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = format_of(tokenizer)
    assert found is not None
    return found.read(encode(prompt), encode(answer), tools=tools)


def test_every_familys_format_is_told_from_its_marks(tokenizers: dict[str, Any]) -> None:
    names = {family: found.name for family in SHAPES if (found := format_of(tokenizers[family]))}
    assert names == EXPECTED and set(EXPECTED.values()) == {kind.name for kind in FORMATS}


def test_a_format_is_not_guessed(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "qwen2", 448)
    tokenizer.chat_template = "<|im_start|>"  # half of the marks
    assert format_of(tokenizer) is None
    tokenizer.chat_template = "<|im_start|> <|im_end|> <|turn> <turn|>"  # Gemma's are no tokens here
    assert format_of(tokenizer) is not None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn>", "<turn|>"]})
    assert format_of(tokenizer) is None  # now it could be either


@pytest.mark.parametrize(
    ("family", "answer", "said"),
    [
        ("qwen3", "It is 4.<|im_end|>", Said("It is 4.")),
        ("qwen3", "  kept \n<|im_end|>", Said("  kept \n")),
        ("qwen3", "<think>\nHm.\n\n2\n</think>\n\nIt is 4.<|endoftext|>", Said("It is 4.", "Hm.\n\n2")),
        ("qwen3", "<think>\n\n</think>\n\nIt is 4.<|im_end|>", Said("It is 4.")),
        (
            "qwen3",
            'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 2}"}\n</tool_call><|im_end|>',
            Said("Wait.", None, (ADD, ADD)),
        ),
        (
            "qwen3",
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n\n3\n</parameter>\n</function>\n</tool_call><|im_end|>",
            Said("", None, ({"name": "add", "arguments": {"a": "2\n\n3"}},)),
        ),
        (
            "qwen3",
            "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>",
            Said("", None, ({"name": "now", "arguments": {}},)),
        ),
        ("gpt_oss", f"{FINAL}It is 4.<|return|>", Said("It is 4.")),
        (
            "gpt_oss",
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL} 4\n<|end|>",
            Said(" 4\n", "Hm."),
        ),
        (
            "gpt_oss",
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>',
            Said("I add.", None, (ADD,)),
        ),
        (
            "gpt_oss",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
            Said("", None, (ADD,)),
        ),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>It is 4.<turn|>", Said("It is 4.", "Hm.")),
        ("gemma4", "<|channel>thought<channel|> It is 4.\n<eos>", Said("It is 4.")),
        (
            "gemma4",
            '<|channel>thought\nHm.<channel|><|tool_call>call:add{a:{b:[1,<|"|>x:y{<|"|>,true]},c-d:null}'
            "<tool_call|><|tool_call>call:add{a:2}<tool_call|><|tool_response>",
            Said("", "Hm.", ({"name": "add", "arguments": NESTED}, ADD)),
        ),
        ("llama3", "It is 4.<|eot_id|>", Said("It is 4.")),
        ("llama3", '{"name": "add", "parameters": {"a": 2}}<|eot_id|>', Said("", None, (ADD,))),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2}}<|eom_id|>', Said("", None, (ADD,))),
    ],
)
def test_what_was_said_is_read(tokenizers: dict[str, Any], family: str, answer: str, said: Said) -> None:
    assert read(tokenizers[family], PROMPTS[family], answer) == said


@pytest.mark.parametrize(
    ("family", "begun", "answer", "said"),
    [
        ("qwen3", "<think>\n\n</think>\n\n", "It is 4.<|im_end|>", Said("It is 4.")),
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nIt is 4.<|im_end|>", Said("It is 4.", "Hm.")),
        ("qwen3", "", "Hm.\n</think>\n\nIt is 4.<|im_end|>", Said("It is 4.", "Hm.")),
        ("gemma4", "<|channel>thought\n<channel|>", "It is 4.<turn|>", Said("It is 4.")),
        ("gemma4", "<|channel>thought\n", "Hm.\n<channel|>It is 4.<turn|>", Said("It is 4.", "Hm.")),
        (
            "gemma4",
            "<|tool_call>call:add{}<tool_call|><|tool_response>response:add{}<tool_response|>",
            "It is 4.<turn|>",
            Said("It is 4."),
        ),
    ],
)
def test_what_the_prompt_began_belongs_to_the_turn(
    tokenizers: dict[str, Any], family: str, begun: str, answer: str, said: Said
) -> None:
    assert read(tokenizers[family], PROMPTS[family] + begun, answer) == said


@pytest.mark.parametrize(
    ("family", "answer", "fault"),
    [
        ("qwen3", "<think>\nHm.<|im_end|>", "a thought that does not end"),
        ("qwen3", "<tool_call>\nadd(2)\n</tool_call><|im_end|>", "a call that cannot be read"),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {}}<|im_end|>', "a call that cannot be read"),
        ("qwen3", '<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>', "a call that cannot be read"),
        ("qwen3", "<function=add>\n</function>\n</tool_call><|im_end|>", "a call without its mark"),
        ("qwen3", "It is<|endoftext|>4.<|im_end|>", "behind the end"),
        ("gpt_oss", "It is 4.<|return|>", "a message with head 'assistantIt is 4.'"),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|return|>", "neither a final message nor a call"),
        ("gpt_oss", "<|channel|>thoughts<|message|>Hm.<|return|>", "on channel 'thoughts'"),
        ("gpt_oss", f"{FINAL}4<|end|>more<|return|>", "outside a message"),
        ("gpt_oss", f"{FINAL}4<|end|><|start|>user{FINAL}5<|return|>", "a message with head 'user'"),
        ("gpt_oss", "<|channel|>commentary to=python<|message|>2 + 2<|call|>", "no JSON object"),
        ("gemma4", "<|channel>thought\nHm.<turn|>", "a channel that cannot be read"),
        ("gemma4", "<|channel>plan\nHm.<channel|>4<turn|>", "a channel that cannot be read"),
        ("gemma4", "<|tool_call>call:add{a:}<tool_call|><turn|>", "a call that cannot be read"),
        ("gemma4", "<|tool_call>add<tool_call|><turn|>", "a call that cannot be read"),
        ("gemma4", "4<turn|>more<eos>", "behind the end"),
        ("llama3", "<|python_tag|>print(2)<|eom_id|>", "a call that cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(
    tokenizers: dict[str, Any], family: str, answer: str, fault: str
) -> None:
    assert fault in read(tokenizers[family], PROMPTS[family], answer).fault


def test_json_is_an_answer_where_no_tools_are(tokenizers: dict[str, Any]) -> None:
    text = '{"name": "add", "parameters": {}}'
    assert read(tokenizers["llama3"], PROMPTS["llama3"], f"{text}<|eot_id|>", tools=False) == Said(text)
    xml = "Write <function=add>."
    assert read(tokenizers["qwen3"], PROMPTS["qwen3"], f"{xml}<|im_end|>", tools=False) == Said(xml)


def test_marks_in_letters_are_text(tokenizers: dict[str, Any]) -> None:
    """The same characters, but not the control token: nothing is cut there."""
    tokenizer = tokenizers["qwen3"]
    letters = [id for letter in "</think>" for id in tokenizer(letter)["input_ids"]]
    answer = [*tokenizer("a ")["input_ids"], *letters, *tokenizer(" b<|im_end|>")["input_ids"]]
    found = format_of(tokenizer)
    assert found is not None
    assert found.read(tokenizer(PROMPTS["qwen3"])["input_ids"], answer) == Said("a </think> b")
