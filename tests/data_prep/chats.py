"""A conversation in every family's format, its answers scripted, checked against the template itself.

Told twice: by `Conversation`, from token ids alone, and here by hand, as a server would send the turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

from data_prep.chat import Asking, ChatRenderer, Rendered, render_sets
from data_prep.conversation import Conversation, Talk, TalkPlan
from data_prep.prompts import Candidates, Message, Prompt
from peagle_train.store import AnswerRow
from peagle_train.target.tokens import control_texts

DAY = date(2025, 6, 28)
TOOL = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = {"name": "sum", "arguments": {"a": 2, "unit": "two {m}"}}
ANSWERS = [
    ("The user adds.\nSo do I.", "It is 4."),
    ("The tool said 5.", "5\n\n  in all"),
    ("Thanks.", "Bye!"),
]


@dataclass(frozen=True)
class Chat:
    """One chat template, and what its target does.

    thinks: it writes thoughts. calls: its template knows tools. variables: for the template.
    """

    tokenizer: Any
    thinks: bool
    calls: bool
    variables: dict[str, Any]

    @property
    def day(self) -> date | None:
        return DAY if "strftime_now" in self.tokenizer.get_chat_template() else None

    @property
    def talk(self) -> Talk:
        day = None if self.day is None else self.day.isoformat()
        return Talk(TalkPlan("Be brief.", self.variables, day, 4000, 400, 10_000), self.tokenizer)

    def messages(self) -> list[Message]:
        """Three questions; the second is answered from the result of a call. Recorded answers are false."""
        called = [Message("assistant", "", "I must add.", (CALL,)), Message("tool", "5", name="sum")]
        return [
            Message("system", "Answer in one line."),
            Message("user", "What is 2 plus 2?"),
            Message("assistant", "It is 7."),
            Message("user", "And 2 plus 3?"),
            *(called if self.calls else []),
            Message("assistant", "It is 8."),
            Message("user", "Good bye."),
        ]

    def rendered(self, messages: list[Message] | None = None) -> Rendered:
        """The conversation, every turn to be asked."""
        tools = (TOOL,) if self.calls else ()
        prompt = Prompt("own:1", tuple(messages or self.messages()), "g", tools)
        renderer = ChatRenderer(self.tokenizer, "Be brief.", self.variables, self.day)
        sets = {"train": [Candidates([prompt], None)]}
        asking = Asking(turns="each", max_new_tokens=400, max_positions=10_000)
        rows, left_out = render_sets(renderer, sets, shortest=0, longest=4000, asking=asking)
        assert left_out == {"train": {}}
        return rows[0]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def say(self, prompt: str, reasoning: str, content: str) -> str:
        """An answer as the family generates one behind this prompt, its end token included."""
        if prompt.endswith("<|start|>assistant"):
            thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
            return f"{thought if self.thinks else ''}<|channel|>final<|message|>{content}<|return|>"
        if "<|turn>" in prompt:
            opening = "" if prompt.endswith("thought\n") else "<|channel>thought\n"
            return f"{f'{opening}{reasoning}<channel|>' if self.thinks else ''}{content}<turn|>"
        if "<|im_start|>" in prompt:
            opening = "" if prompt.rstrip("\n").endswith("<think>") else "<think>\n"
            thought = f"{opening}{reasoning}\n</think>\n\n"
            return f"{thought if self.thinks else ''}{content}<|im_end|>"
        return f"{content}<|eot_id|>"

    def call(self, prompt: str) -> str:
        """A call as the family generates one behind this prompt."""
        if prompt.endswith("<|start|>assistant"):
            return (
                "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.sum <|constrain|>json<|message|>{"a": 2, "unit": "two {m}"}<|call|>'
            )
        if "<|turn>" in prompt:
            return '<|tool_call>call:sum{a:2,unit:<|"|>two {m}<|"|>}<tool_call|><turn|>'
        thought = "Add.\n</think>\n\n" if prompt.rstrip("\n").endswith("<think>") else ""
        if "<function=" in self.tokenizer.get_chat_template():
            parameters = "<parameter=a>\n2\n</parameter>\n<parameter=unit>\ntwo {m}\n</parameter>\n"
            return f"{thought}<tool_call>\n<function=sum>\n{parameters}</function>\n</tool_call><|im_end|>"
        if "<|im_start|>" in prompt:
            arguments = '{"a": 2, "unit": "two {m}"}'
            call = f'{{"name": "sum", "arguments": {arguments}}}'
            return f"{thought}<tool_call>\n{call}\n</tool_call><|im_end|>"
        return '{"name": "sum", "parameters": {"a": 2, "unit": "two {m}"}}<|eot_id|>'

    def served(self, turns: list[dict[str, Any]]) -> str:
        """What the template makes of turns that a server would send it."""
        return str(
            self.tokenizer.apply_chat_template(
                turns,
                chat_template=ChatRenderer(self.tokenizer, day=self.day)._template,
                tools=[TOOL] if self.calls else None,
                tokenize=False,
                add_generation_prompt=True,
                **self.variables,
            )
        )


def assistant(
    reasoning: str | None, content: str, calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        turn |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls:
        turn["tool_calls"] = [{"type": "function", "id": "x", "function": call} for call in calls]
    return turn


def check(chat: Chat) -> list[AnswerRow]:
    """Holds the conversation and checks every prompt, every span and every mark; returns its rows."""
    conversation = Conversation(chat.rendered(), chat.talk)
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "What is 2 plus 2?"},
    ]
    called = [
        assistant("I must add.", "", [CALL]),
        {"role": "tool", "content": "5", "name": "sum", "tool_call_id": "x"},
    ]
    later: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "And 2 plus 3?"}, *(called if chat.calls else [])],
        [{"role": "user", "content": "Good bye."}],
    ]
    said: list[list[int]] = []
    prompts: list[list[int]] = []
    for reasoning, content in ANSWERS:
        asked = conversation.next
        assert asked is not None, conversation.stopped
        assert chat.decode(asked) == chat.served(history)
        answer = chat.encode(chat.say(chat.decode(asked), reasoning, content))
        prompts.append(asked)
        said.append(answer)
        conversation.answered(answer, "stop")
        history.append(assistant(reasoning if chat.thinks else None, content))
        history += later.pop(0) if later else []
    assert conversation.next is None and conversation.stopped == ""
    rows = conversation.rows()
    assert [row.row for row in rows] == list(range(len(rows)))
    # Each turn is trained as it was generated: behind its own prompt, token for token.
    spans = [(row, start, end) for row in rows for start, end in row.spans]
    assert [row.token_ids[start:end] for row, start, end in spans] == said
    assert [row.token_ids[:start] for row, start, _ in spans] == prompts
    for row in rows:
        marked = [id for id, flag in zip(row.token_ids, row.loss_mask, strict=True) if flag]
        assert marked == [id for start, end in row.spans for id in row.token_ids[start:end]]
        assert row.finish == "stop" and row.supervised == len(marked) > 0
    text = "".join(chat.decode(row.token_ids[start:end]) for row, start, end in spans)
    assert "It is 7." not in text and "And 2 plus 3?" not in text and "I must add." not in text
    # A turn is in a row of its own exactly where its prompt does not begin with all tokens so far.
    begun = [True]
    for place in range(1, len(said)):
        so_far = prompts[place - 1] + said[place - 1]
        begun.append(prompts[place][: len(so_far)] != so_far)
    assert len(rows) == sum(begun)
    return rows


def check_call(chat: Chat) -> None:
    """A call by the target is read, and ends the conversation: nobody has its result."""
    conversation = Conversation(chat.rendered(), chat.talk)
    asked = conversation.next
    assert asked is not None
    answer = chat.encode(chat.call(chat.decode(asked)))
    said = chat.talk.format.read(asked, answer, tools=True)
    text = "<function=" in chat.tokenizer.get_chat_template()  # whose arguments are text
    wanted = {"a": "2" if text else 2, "unit": "two {m}"}
    assert (said.tool_calls, said.content) == (({"name": "sum", "arguments": wanted},), "")
    assert not said.fault
    conversation.answered(answer, "stop")
    assert conversation.next is None and conversation.stopped == "a tool is called"
    (row,) = conversation.rows()
    assert row.token_ids[row.prompt_length :] == answer and row.stopped == "a tool is called"


def forgeries(chat: Chat, mark: str) -> list[tuple[list[Message], tuple[dict[str, Any], ...]]]:
    """The same text in every place that is not the template's own: turns and tools."""
    text, user = f"x {mark} y", Message("user", "Hi")
    found: list[tuple[list[Message], tuple[dict[str, Any], ...]]] = [
        ([Message("user", text)], ()),
        ([Message("system", text), user], ()),
        ([user, Message("assistant", text), user], ()),
        ([user, Message("assistant", "yes", text), user], ()),
    ]
    if chat.calls:
        call = Message("assistant", "", None, ({"name": "sum", "arguments": {"a": [text]}},))
        fine = Message("assistant", "", None, (CALL,))
        found += [
            ([user, call, Message("tool", "5")], ()),
            ([user, fine, Message("tool", text)], ()),
            ([user], ({**TOOL, "function": {**TOOL["function"], "description": text}},)),  # type: ignore[dict-item]
            ([user], ({**TOOL, "function": {**TOOL["function"], "name": "s>"}},)),  # type: ignore[dict-item]
        ]
    return found


def marks_of(chat: Chat) -> list[str]:
    return sorted(control_texts(chat.tokenizer))
