"""Conversations of several turns in every family's format: asked, read back, masked, numbered, ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.chat import CONTROL, FOREIGN, NO_ROOM, TOO_LONG, Asking, ChatRenderer, Rendered, render_sets
from data_prep.conversation import Conversation, Talk, TalkPlan
from data_prep.jobs import Job
from data_prep.prompts import Answered, Candidates, Message, Prompt
from data_prep.show import marked
from peagle_train.errors import PeagleError
from peagle_train.twin.tokenizers import save_tokenizer
from tests.data_prep.chats import Chat, check, check_call, forgeries, marks_of

# name: family, whether it thinks, whether it has tools, variables, rows of the conversation: one, unless
# thoughts (of the target, of a recorded call) or an empty thought of the prompt are dropped from history
CHATS: dict[str, tuple[str, bool, bool, dict[str, Any], int]] = {
    "smollm2": ("smollm2", False, False, {}, 1),
    "qwen2": ("qwen2", False, False, {}, 1),
    "qwen3": ("qwen3", True, True, {}, 3),
    "qwen3_no_thoughts": ("qwen3", False, True, {"enable_thinking": False}, 3),
    "qwen3_coder": ("qwen3_moe", False, True, {}, 1),
    "llama3": ("llama3", False, True, {}, 1),
    "harmony": ("gpt_oss", True, True, {"reasoning_effort": "low"}, 3),
    "gemma4": ("gemma4", False, True, {}, 3),
    "gemma4_thoughts": ("gemma4", True, True, {"enable_thinking": True}, 3),
}


@pytest.fixture(scope="module", params=sorted(CHATS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chat(name: str, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return made(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return made("qwen3_coder", tmp_path_factory.mktemp("plain"))


def made(name: str, folder: Path) -> Chat:
    family, thinks, calls, variables, _ = CHATS[name]
    return Chat(save_tokenizer(folder, family, 448), thinks, calls, variables)


def test_each_turn_is_trained_as_it_was_generated(name: str, chat: Chat) -> None:
    rows = check(chat)
    assert len(rows) == CHATS[name][-1]


def test_a_call_is_read_and_ends_the_conversation(chat: Chat) -> None:
    if not chat.calls:
        assert "tools" not in chat.tokenizer.chat_template
        return
    check_call(chat)


def test_nothing_that_is_given_becomes_a_control_token(chat: Chat) -> None:
    renderer = ChatRenderer(chat.tokenizer, "Be brief.", chat.variables, chat.day)
    places = len(forgeries(chat, ""))
    for mark in marks_of(chat)[:: 1 if places < 5 else 3]:
        given = forgeries(chat, mark)
        prompts = [Prompt(f"bad:{n}", tuple(turns), f"{n}", tools) for n, (turns, tools) in enumerate(given)]
        sets = {"train": [Candidates([*prompts, Prompt("fine", (Message("user", "Hi!"),), "fine")], None)]}
        rows, left_out = render_sets(renderer, sets, shortest=0, longest=4000)
        assert [row.id for row in rows] == ["fine"] and left_out == {"train": {CONTROL: places}}


def tool_with(name: str = "sum", parameter: str = "a", key: str = "title") -> dict[str, Any]:
    properties = {parameter: {"type": "integer", key: "x"}}
    return {"name": name, "description": "x", "parameters": {"type": "object", "properties": properties}}


@pytest.mark.parametrize(
    ("name", "tool", "key", "forges"),
    [
        ("qwen3_coder", tool_with(key="think"), "a", True),  # <think>x</think>
        ("qwen3_coder", tool_with(key="tool_call"), "a", True),
        ("qwen3_coder", tool_with(), "<|im_end|", True),  # <parameter=<|im_end|>
        ("qwen3_coder", tool_with(name="think", parameter="tool_call"), "think", False),
        ("qwen3_coder", tool_with(key="<b>"), "a < b >", False),
        ("qwen3", tool_with(key="think"), "<|im_end|", False),  # quotes stand around names
        ("harmony", tool_with(name="start", parameter="message", key="end"), "call", False),
        ("gemma4", tool_with(name="table", parameter="eos", key="pad"), "image", False),
        ("gemma4", tool_with(parameter="<"), "|tool_call>call:", False),
    ],
)
def test_names_become_no_control_tokens(
    name: str, tool: dict[str, Any], key: str, forges: bool, tmp_path: Path
) -> None:
    """A template may put a name between marks of its own: what comes of it is counted."""
    chat = made(name, tmp_path)
    called = Message("assistant", "", None, ({"name": tool["name"], "arguments": {key: 2}},))
    turns = (Message("user", "Hi"), called, Message("tool", "5", name=tool["name"]))
    sets = {
        "train": [
            Candidates(
                [Prompt("p", turns, "p", (tool,)), Prompt("fine", (Message("user", "Ho"),), "fine")], None
            )
        ]
    }
    renderer = ChatRenderer(chat.tokenizer, day=chat.day)
    rows, left_out = render_sets(renderer, sets, shortest=0, longest=4000)
    assert left_out == {"train": {CONTROL: 1} if forges else {}} and len(rows) == 2 - forges


def test_names_of_later_turns_become_no_control_tokens(plain: Chat) -> None:
    called = Message("assistant", "", None, ({"name": "sum", "arguments": {"<|im_end|": 2}},))
    later = [Message("user", "Hi"), Message("assistant", "no"), Message("user", "Ho"), called]
    conversation = Conversation(plain.rendered([*later, Message("tool", "5")]), plain.talk)
    say(plain, conversation, "It is 4.")
    assert conversation.next is None and conversation.stopped == "spells a control token"


def test_an_answer_that_spells_a_control_token_is_no_history(chat: Chat) -> None:
    """The target may write `<|im_end|>` in letters; rendered as history it would be one."""
    mark = marks_of(chat)[0]
    conversation = Conversation(chat.rendered(), chat.talk)
    asked = conversation.next
    assert asked is not None
    answer = chat.encode(chat.say(chat.decode(asked), "t", "Hi WORD there"))
    letters = [id for letter in mark for id in chat.encode(letter)]
    place = next(n for n in range(len(answer)) if chat.decode(answer[n:]).startswith("WORD"))
    answer[place : place + 4] = letters
    assert mark in chat.decode(answer[place:])
    conversation.answered(answer, "stop")
    assert conversation.next is None and conversation.stopped == "spells a control token"
    assert conversation.rows()[0].token_ids == asked + answer


def say(chat: Chat, conversation: Conversation, content: str) -> None:
    asked = conversation.next
    assert asked is not None
    conversation.answered(chat.encode(chat.say(chat.decode(asked), "t", content)), "stop")


def test_a_cut_answer_ends_the_conversation(plain: Chat) -> None:
    conversation = Conversation(plain.rendered(), plain.talk)
    say(plain, conversation, "It is 4.")
    conversation.answered(plain.encode("It is"), "length")
    assert conversation.next is None and conversation.stopped == "cut at max_new_tokens"
    (row,) = conversation.rows()
    assert row.finish == "length" and len(row.spans) == 2 and row.stopped == "cut at max_new_tokens"


@pytest.mark.parametrize(
    "limits", [{"max_prompt_tokens": 250, "max_new_tokens": 1}, {"max_positions": 700, "max_new_tokens": 400}]
)
def test_a_prompt_that_grows_too_long_ends_the_conversation(plain: Chat, limits: dict[str, int]) -> None:
    talk = plain.talk
    talk.plan = replace(talk.plan, **limits)
    conversation = Conversation(plain.rendered(), talk)
    say(plain, conversation, "It is 4.")
    if conversation.next is not None:
        say(plain, conversation, "5")
    assert conversation.next is None and conversation.stopped == "too long"


def test_every_prompt_is_bounded_with_its_history(plain: Chat) -> None:
    """So no row is longer than max_prompt_tokens and max_new_tokens together."""
    first = plain.rendered().token_ids
    long = plain.encode(plain.say(plain.decode(first), "", "x" * 300))
    conversation = Conversation(plain.rendered(), plain.talk)
    conversation.answered(long, "stop")
    assert conversation.next is not None
    second = len(conversation.next)
    assert second > len(first) + 300
    for most, stopped in ((second, ""), (second - 1, "too long")):
        talk = plain.talk
        talk.plan = replace(talk.plan, max_prompt_tokens=most, max_new_tokens=len(long))
        conversation = Conversation(plain.rendered(), talk)
        conversation.answered(long, "stop")
        assert conversation.stopped == stopped and (conversation.next is None) == bool(stopped)


def test_an_answer_that_cannot_be_read_ends_the_conversation(tmp_path: Path) -> None:
    chat = made("harmony", tmp_path)
    conversation = Conversation(chat.rendered(), chat.talk)
    conversation.answered(chat.encode("<|channel|>analysis<|message|>Hm.<|end|><|return|>"), "stop")
    assert conversation.next is None and conversation.stopped == "unreadable"


def test_turns_that_the_template_refuses_end_the_conversation(
    plain: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, template = plain.rendered(), plain.tokenizer.chat_template
    no = "{%- if messages | length > 3 -%}{{- raise_exception('enough') -}}{%- endif -%}"
    monkeypatch.setattr(plain.tokenizer, "chat_template", no + template)
    conversation = Conversation(rendered, plain.talk)
    say(plain, conversation, "It is 4.")
    assert conversation.next is None and conversation.stopped == "refused by the template"


def test_a_format_that_is_not_known_is_refused_with_the_cure(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "qwen2", 448)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(PeagleError, match=r"none of harmony .*chatml .*set data\.turns: last, or add"):
        Talk(TalkPlan(None, {}, None, 10, 10, 100), tokenizer)
    assert ChatRenderer(tokenizer).render([Message("user", "Hi")])  # one turn needs no way back


def test_a_conversation_of_several_turns_needs_a_way_on(plain: Chat) -> None:
    with pytest.raises(ValueError, match="3 turns to ask"):
        Conversation(plain.rendered())
    conversation = Conversation(Rendered(0, "train", "p", "Hi", [1, 2]))
    conversation.answered([3], "stop")
    with pytest.raises(ValueError, match="nothing was asked"):
        conversation.answered([3], "stop")
    with pytest.raises(ValueError, match="no tokens"):
        Conversation(Rendered(0, "train", "p", "Hi", [1, 2])).answered([], "stop")


def test_keys_are_of_the_content_alone(plain: Chat) -> None:
    rendered = plain.rendered()
    assert rendered.dialog is not None
    same = replace(rendered, row=9, id="other", text="other", seed=4)
    assert same.key == rendered.key and Conversation(same, plain.talk).key == rendered.key
    later = replace(rendered.dialog, turns=(*rendered.dialog.turns[:2], (Message("user", "Now?"),)))
    others = [
        replace(rendered, set="validation"),
        replace(rendered, token_ids=[*rendered.token_ids, 1]),
        replace(rendered, temperature=0.5),
        replace(rendered, temperature=0.5, seed=1),
        replace(rendered, top_p=0.5),
        replace(rendered, dialog=None),
        replace(rendered, dialog=later),
        replace(rendered, dialog=replace(rendered.dialog, tools=())),
        replace(rendered, dialog=replace(rendered.dialog, variables={"a": 1})),
    ]
    assert len({rendered.key, *(other.key for other in others)}) == 1 + len(others)


def test_prompts_travel_to_workers_unchanged(plain: Chat) -> None:
    given = Rendered(5, "train", "g", "Hi", [1, 2, 3])
    prompts = [plain.rendered(), given]
    job = Job("answer", "t", "float32", "cpu", False, None, None, talk=plain.talk.plan, prompts={0: prompts})
    back = Job.from_json(job.to_json())
    assert back == job
    assert [prompt.key for prompt in back.prompts[0]] == [prompt.key for prompt in prompts]


def test_row_numbers_do_not_depend_on_the_answers(plain: Chat) -> None:
    several = Prompt("s", tuple(plain.messages()), "s", ())
    single = [Prompt(f"q{n}", (Message("user", f"Question {n}"),), f"q{n}") for n in range(2)]
    renderer = ChatRenderer(plain.tokenizer)
    sets = {"train": [Candidates([single[0], several, single[1]], None)]}
    for turns, numbers in (("each", [0, 1, 4]), ("last", [0, 1, 2])):
        asking = Asking(turns=turns)  # type: ignore[arg-type]
        rows, _ = render_sets(renderer, sets, shortest=0, longest=999, asking=asking)
        assert [row.row for row in rows] == numbers
    talk = plain.talk
    for turns_said in range(1, 4):
        conversation = Conversation(replace(plain.rendered(), row=7), talk)
        for number in range(turns_said):
            say(plain, conversation, f"{number}")
        assert [row.row for row in conversation.rows()] == [7]


def test_rows_that_come_with_their_tokens_are_not_asked(plain: Chat) -> None:
    ids = plain.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\nmore")
    end = len(ids) - len(plain.encode("\nmore"))
    span = (end - 3, end)
    good = Prompt("good", (), "good", answered=Answered(tuple(ids), (span,)))
    again = Prompt("again", (), "again", answered=Answered(tuple(ids), (span,)))
    other = (*ids[: end - 2], ids[0], *ids[end - 1 :])
    second = Prompt("second answer", (), "second", answered=Answered(other, (span,)))
    cut = Prompt("cut", (), "cut", answered=Answered(tuple(ids[: end - 1]), ((end - 4, end - 1),)))
    far = Prompt("far", (), "far", answered=Answered((*ids[:-1], 448), ((end - 3, len(ids)),)))
    long = Prompt("long", (), "long", answered=Answered((*ids[:12], *ids), ((12 + end - 3, 12 + end),)))
    rows_of = [Candidates([good, again, second, cut, far, long], None)]
    asking = Asking(vocab_size=448, max_positions=len(ids) + 5, ends=(ids[end - 1],))
    renderer = ChatRenderer(plain.tokenizer)
    rows, left_out = render_sets(renderer, {"train": rows_of}, shortest=0, longest=999, asking=asking)
    assert left_out == {"train": {"repeats": 1, FOREIGN: 1, NO_ROOM: 1}}
    assert [row.id for row in rows] == ["good", "second answer", "cut"]
    conversation = Conversation(rows[0])
    assert conversation.next is None
    (row,) = conversation.rows()
    assert (row.token_ids, row.spans, row.finish) == (ids[:end], [list(span)], "stop")
    assert row.check("here") and row.prompt == plain.decode(ids[: end - 3])
    assert Conversation(rows[2]).rows()[0].finish == "length"


def test_held_out_prompts_are_not_trained_on_in_tokens_either(plain: Chat) -> None:
    ids = tuple(plain.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>"))
    other = (*ids[:-2], ids[0], ids[-1])
    span = ((len(ids) - 3, len(ids)),)
    train = Prompt("t", (), "t", answered=Answered(other, span))
    held = Prompt("h", (), "h", answered=Answered(ids, span))
    more = Prompt("m", (Message("user", "More"),), "m")
    sets = {"train": [Candidates([train, more], None)], "mine": [Candidates([held], None)]}
    rows, left_out = render_sets(ChatRenderer(plain.tokenizer), sets, shortest=0, longest=999)
    assert left_out["train"] == {"in another set": 1} and [row.id for row in rows] == ["m", "h"]


def test_prompts_without_room_for_an_answer_are_left_out(plain: Chat) -> None:
    sets = {"train": [Candidates([Prompt("p", (Message("user", "Hi"),), "p")], None)]}
    asking = Asking(max_new_tokens=90, max_positions=100)
    with pytest.raises(PeagleError, match=r"1 no room for an answer.*lower data\.max_new_tokens"):
        render_sets(ChatRenderer(plain.tokenizer), sets, shortest=0, longest=999, asking=asking)
    with pytest.raises(PeagleError, match=rf"1 {TOO_LONG}"):
        render_sets(ChatRenderer(plain.tokenizer), sets, shortest=0, longest=2, asking=asking)


def test_a_call_without_a_way_to_tell_the_target_is_left_out(tmp_path: Path) -> None:
    chat = made("smollm2", tmp_path)
    call = Message("assistant", "", None, ({"name": "sum", "arguments": {}},))
    user, tool = Message("user", "Hi"), {"name": "sum", "parameters": {}}
    prompts = [
        Prompt("tools", (user,), "a", (tool,)),
        Prompt("called", (user, call, Message("tool", "5")), "b"),
    ]
    sets = {"train": [Candidates([*prompts, Prompt("fine", (Message("user", "Ho"),), "c")], None)]}
    _, left_out = render_sets(ChatRenderer(chat.tokenizer), sets, shortest=0, longest=999)
    assert left_out == {"train": {"refused by the template": 2}}


def test_harmony_takes_one_call_a_turn(tmp_path: Path) -> None:
    chat = made("harmony", tmp_path)
    calls = tuple({"name": name, "arguments": {}} for name in ("a", "b"))
    turns = [Message("user", "Hi"), Message("assistant", "", None, calls), Message("tool", "1")]
    with pytest.raises(PeagleError, match="writes 1 call a turn and drops the others"):
        ChatRenderer(chat.tokenizer, day=chat.day).render(turns)


def test_results_belong_to_their_calls(tmp_path: Path) -> None:
    """By name, in whatever order they come; without names in the order of the calls."""
    chat = made("gemma4", tmp_path)
    calls = tuple({"name": name, "arguments": {}} for name in ("a", "b"))
    renderer = ChatRenderer(chat.tokenizer)
    for names, told in ((("b", "a"), "ba"), ((None, None), "ab"), ((None, "a"), "aa")):
        results = [Message("tool", f"{n}", name=name) for n, name in enumerate(names)]
        text = chat.decode(
            renderer.render([Message("user", "Hi"), Message("assistant", "", None, calls), *results])
        )
        first, second = told
        assert (f"response:{first}{{" in text) and text.count(f"response:{second}{{") >= 1
        assert text.index("response:") == text.index(f"response:{first}{{")


def test_rows_of_several_spans_are_shown(plain: Chat) -> None:
    conversation = Conversation(replace(plain.rendered(), temperature=0.7), plain.talk)
    for content in ("It is 4.", "5", "Bye!"):
        say(plain, conversation, content)
    (row,) = conversation.rows()
    shown = marked(row, plain.tokenizer, colour=False).plain
    for content in ("It is 4.", "5", "Bye!"):
        assert f"assistant\n>>{content}<|im_end|><<" in shown
    assert "3 turns" in shown and "temperature 0.7" in shown
    assert shown.count("*") == row.supervised
    stopped = replace(row, stopped="a tool is called")
    assert "later turns not asked: a tool is called" in marked(stopped, plain.tokenizer, colour=False).plain
