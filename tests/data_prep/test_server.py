"""Answers from a server: exact tokens, nothing asked twice, and every way in which a server can fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_prep.chat import Asking, Rendered, render_sets
from data_prep.conversation import Conversation, Talk, TalkPlan
from data_prep.prompts import Candidates, Message, Prompt
from data_prep.server import answer_by_server, client
from data_prep.server.journal import FILE, Journal
from data_prep.server.stage import ERRORS, StoppedError
from peagle_train import Run
from peagle_train.errors import PeagleError
from peagle_train.pipeline import run_stage
from peagle_train.recipe.data import ServerSection
from peagle_train.store import AnswerStore, AnswerWriter
from peagle_train.twin.tokenizers import save_tokenizer
from tests.tiny_run import tiny_recipe

END, VOCAB = 2, 256
KEY = "k-secret-7"

Reply = Callable[[dict[str, Any], int], dict[str, Any] | None]
"""What to answer to a request that is met for the n-th time; None: the connection is cut."""


def answer_of(prompt: list[int], most: int) -> list[int]:
    """What this server's model says: a few tokens that depend on the prompt, then the end."""
    count = 3 + sum(prompt) % 5
    return ([*(5 + (prompt[-1] + i) % 90 for i in range(count)), END])[:most]


def good(request: dict[str, Any], _: int = 1) -> dict[str, Any]:
    tokens = answer_of(request["prompt"], request["max_tokens"])
    finish = "stop" if tokens[-1] == END else "length"
    return body(tokens, finish, len(request["prompt"]))


def body(tokens: Any, finish: str, prompt_tokens: int) -> dict[str, Any]:
    choice = {"index": 0, "text": "", "finish_reason": finish, "token_ids": tokens, "logprobs": None}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": 1}
    return {
        "id": "x",
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


class Server(ThreadingHTTPServer):
    """A server whose completions a test scripts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Reply = good
        self.models = ["m"]
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": m, "object": "model"} for m in self.server.models]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mine = self.server
        with mine.lock:
            mine.keys.add(self.headers.get("Authorization"))
            if request["max_tokens"] > 1:
                mine.asked[tuple(request["prompt"])] += 1
                mine.requests.append(request)
            mine.at_once += 1
            mine.most_at_once = max(mine.most_at_once, mine.at_once)
            times = mine.asked[tuple(request["prompt"])]
        try:
            found = mine.reply(request, times) if request["max_tokens"] > 1 else good(request)
        finally:
            with mine.lock:
                mine.at_once -= 1
        if found is None:
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
            return
        self.send(found)

    def send(self, value: dict[str, Any]) -> None:
        status, text = value.pop("status", 200), value.pop("text", None)
        headers = value.pop("headers", {})
        data = (json.dumps(value) if text is None else text).encode()
        self.send_response(status)
        for name, content in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, content)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError):  # a client that was stopped, or waits no longer
            self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)


def prompts(count: int = 12) -> list[Rendered]:
    return [Rendered(n, "train", f"own:{n}", f"text {n}", [7, 8, 20 + n]) for n in range(count)]


def ask(server: Server, folder: Path, rows: list[Rendered], **keys: Any) -> Any:
    talk = keys.pop("talk", None)
    section = ServerSection(**{"url": server.url, "timeout": 5.0, "concurrency": 4, **keys})
    folder.mkdir(exist_ok=True)
    return answer_by_server(
        section,
        {0: rows[::2], 1: rows[1::2]},
        AnswerWriter(folder, "f"),
        talk=talk,
        max_new_tokens=6,
        vocab_size=VOCAB,
        ends=[END],
        console=Console(quiet=True),
    )


def dialogs(folder: Path, count: int) -> tuple[list[Rendered], Talk]:
    """Conversations of two questions each, and what it takes to hold them."""
    tokenizer = save_tokenizer(folder / "tokenizer")
    plan = TalkPlan(None, {}, None, max_prompt_tokens=900, max_new_tokens=20, max_positions=1000)
    asked = [
        Prompt(f"p{n}", (Message("user", f"Question {n}"), Message("user", f"More {n}")), f"g{n}")
        for n in range(count)
    ]
    talk = Talk(plan, tokenizer)
    sets = {"train": [Candidates(asked, None)]}
    rows, _ = render_sets(talk.renderer, sets, shortest=0, longest=900, asking=Asking(turns="each"))
    return rows, talk


def test_conversations_are_held_turn_by_turn(server: Server, tmp_path: Path) -> None:
    rows, talk = dialogs(tmp_path, 5)
    second = [Conversation(row, talk) for row in rows]
    for conversation in second:
        first = conversation.next
        assert first is not None
        said = answer_of(first, 6)
        conversation.answered(said, "stop" if said[-1] == END else "length")
    going = [conversation.next for conversation in second if conversation.next]
    assert 0 < len(going) < 5  # an answer that is cut ends its conversation

    work = ask(server, tmp_path / "one", rows, talk=talk)
    assert work.rows == 5 and set(server.asked.values()) == {1}
    assert set(server.asked) == {tuple(row.token_ids) for row in rows} | {tuple(ids) for ids in going}
    stored(tmp_path / "one")
    kept = {row.row: row for row in AnswerStore(tmp_path / "one").rows()}
    assert sorted(kept) == [row.row for row in rows] == [0, 2, 4, 6, 8]
    assert sorted(len(row.spans) for row in kept.values()) == [1] * (5 - len(going)) + [2] * len(going)
    for row in kept.values():
        for start, end in row.spans:
            assert row.token_ids[start:end] == answer_of(row.token_ids[:start], 6)
        assert (row.stopped == "cut at max_new_tokens") == (len(row.spans) == 1)


def stored(folder: Path) -> dict[int, list[int]]:
    """Tokens by row, after sealing."""
    AnswerWriter(folder, "f").seal()
    return {row.row: row.token_ids for row in AnswerStore(folder).rows()}


def test_every_prompt_is_answered_once_with_exact_tokens(server: Server, tmp_path: Path) -> None:
    rows = prompts()
    server.reply = lambda r, n: time.sleep(0.05) or good(r)
    work = ask(server, tmp_path, rows)
    wanted = {row.row: [*row.token_ids, *answer_of(row.token_ids, 6)] for row in rows}
    assert stored(tmp_path) == wanted
    assert work.rows == 12 and work.tokens == sum(len(t) - 3 for t in wanted.values()) and not work.failed
    assert set(server.asked.values()) == {1} and 1 < server.most_at_once <= 4
    assert not (tmp_path / FILE).exists() and not (tmp_path / ERRORS).exists()
    finishes = {row.row: (row.finish, row.spans) for row in AnswerStore(tmp_path).rows()}
    assert {"stop", "length"} == {finish for finish, _ in finishes.values()}
    assert all(spans == [[3, len(wanted[row])]] for row, (_, spans) in finishes.items())
    request = server.requests[0]
    assert request["return_token_ids"] and request["stop_token_ids"] == [END]
    assert (request["temperature"], request["model"], request["max_tokens"]) == (0.0, "m", 6)


def failing(first: int, how: Reply) -> Reply:
    """Fails so many times for each prompt, then answers."""
    return lambda request, times: how(request, times) if times <= first else good(request)


def stalled(request: dict[str, Any], times: int) -> dict[str, Any]:
    time.sleep(1.0)
    return good(request)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda r, n: {"status": 500, "error": {"message": "boom"}}, id="500"),
        pytest.param(lambda r, n: {"status": 503, "text": "<html>"}, id="html"),
        pytest.param(lambda r, n: {"status": 429, "headers": {"Retry-After": "0.05"}}, id="429"),
        pytest.param(lambda r, n: None, id="cut"),
        pytest.param(stalled, id="stalled"),
        pytest.param(lambda r, n: {"text": "rubbish"}, id="no JSON"),
        pytest.param(lambda r, n: {"choices": []}, id="no choices"),
        pytest.param(lambda r, n: body(None, "stop", 3), id="no ids"),
        pytest.param(lambda r, n: body([], "stop", 3), id="empty"),
        pytest.param(lambda r, n: body(["a"], "stop", 3), id="text"),
        pytest.param(lambda r, n: body([VOCAB, END], "stop", 3), id="out of range"),
        pytest.param(lambda r, n: body([5, END], "stop", 4), id="other prompt"),
        pytest.param(lambda r, n: body([5, 6], "stop", 3), id="no end"),
        pytest.param(lambda r, n: body([END, 5], "length", 3), id="end within"),
        pytest.param(lambda r, n: body([5] * 7, "length", 3), id="too many"),
    ],
)
def test_a_fault_that_passes_costs_a_pause(server: Server, tmp_path: Path, how: Reply) -> None:
    server.reply = failing(2, how)
    rows = prompts(4)
    assert ask(server, tmp_path, rows, timeout=0.4, retries=2).failed == 0
    assert stored(tmp_path) == {r.row: [*r.token_ids, *answer_of(r.token_ids, 6)] for r in rows}
    assert set(server.asked.values()) == {3}


def test_retry_after_is_heeded(server: Server, tmp_path: Path) -> None:
    server.reply = failing(1, lambda r, n: {"status": 429, "headers": {"Retry-After": "0.6"}})
    started = time.monotonic()
    ask(server, tmp_path, prompts(1))
    assert time.monotonic() - started > 0.6


def test_a_prompt_without_answer_is_noted_and_the_others_go_on(server: Server, tmp_path: Path) -> None:
    rows = prompts()
    bad = rows[5].token_ids
    server.reply = lambda r, n: (
        {"status": 400, "error": {"message": "too long"}} if r["prompt"] == bad else good(r)
    )
    assert ask(server, tmp_path, rows, max_failures=0.1).failed == 1
    assert set(stored(tmp_path)) == set(range(12)) - {5}
    (entry,) = map(json.loads, (tmp_path / ERRORS).read_text().splitlines())
    assert entry["id"] == "own:5" and "400" in entry["error"] and "too long" in entry["error"]
    assert server.asked[tuple(bad)] == 1  # no attempt can mend it


def test_too_many_failures_end_the_run_and_what_was_answered_is_kept(server: Server, tmp_path: Path) -> None:
    rows = prompts()
    server.reply = lambda r, n: good(r) if r["prompt"][-1] < 26 else {"status": 500}
    with pytest.raises(
        PeagleError, match=r"2 of 12 prompts got no answer, more than the 10 %.*The last: 2 att"
    ):
        ask(server, tmp_path, rows, retries=1, max_failures=0.1, concurrency=1)
    server.reply, server.asked = good, Counter()
    ask(server, tmp_path, rows)
    assert set(stored(tmp_path)) == set(range(12))
    assert not {prompt for prompt in server.asked if prompt[-1] in (20, 22, 24)}  # they came first


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, {}, "nobody answers there"),
        ({"model": "other"}, {}, "serves m; expected other"),
        ({}, {"models": ["a", "b"]}, r"serves a, b; expected one model, or data\.server\.model"),
        ({"api_key_env": "PEAGLE_TEST_NO_KEY"}, {}, "the environment variable PEAGLE_TEST_NO_KEY is empty"),
        ({}, {"reply": lambda r, n: {"status": 401, "error": {"message": "no"}}}, "401"),
    ],
)
def test_what_no_attempt_can_mend_is_one_clear_error(
    server: Server, tmp_path: Path, keys: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    started = time.monotonic()
    with pytest.raises(PeagleError, match=message):
        ask(server, tmp_path, prompts(), **keys)
    assert time.monotonic() - started < 5


def test_a_server_without_token_ids_is_refused_before_anything_is_asked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.good", lambda r, n=1: body(None, "stop", len(r["prompt"])))
    with pytest.raises(
        PeagleError, match="does not know `return_token_ids`, and text is never tokenised again"
    ):
        ask(server, tmp_path, prompts())
    assert not server.asked


def test_the_key_is_sent_and_never_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_TEST_KEY", KEY)
    server.reply = lambda r, n: {"status": 500, "error": {"message": "no"}}
    with pytest.raises(PeagleError) as error:
        ask(server, tmp_path, prompts(), api_key_env="PEAGLE_TEST_KEY", retries=0)
    assert server.keys == {f"Bearer {KEY}"}
    assert KEY not in str(error.value)
    assert not any(KEY in file.read_text() for file in tmp_path.iterdir())


def test_a_torn_and_a_changed_line_are_asked_again(server: Server, tmp_path: Path) -> None:
    rows = prompts()
    server.reply = lambda r, n: good(r) if r["prompt"][-1] < 30 else {"status": 500}
    with pytest.raises(PeagleError):
        ask(server, tmp_path, rows, retries=0, max_failures=0.0, concurrency=1)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"text', b'"tExt')
    (tmp_path / FILE).write_bytes(b"".join(lines)[:-40])
    server.reply, server.asked = good, Counter()
    ask(server, tmp_path, rows)
    assert set(stored(tmp_path)) == set(range(12))
    assert len(server.asked) == 12 - (len(lines) - 2)


def test_rows_have_the_numbers_and_names_of_this_run(tmp_path: Path) -> None:
    first, second = prompts(1)[0], Rendered(30, "train", "renamed", "text 0", [7, 8, 20])
    journal = Journal(tmp_path)
    conversation = Conversation(first)
    conversation.answered([5, END], "stop")
    journal.write(conversation.key, conversation.rows())
    (row,) = journal.rows(Conversation(second).key, second.row, second.set, second.id)
    assert (row.row, row.id, row.token_ids) == (30, "renamed", [7, 8, 20, 5, END])


def recipe_for(server: Server, folder: Path, *rows: int) -> Path:
    path = tiny_recipe(folder, "tiny", heldout=3, train={})
    text = "".join(json.dumps({"prompt": f"What is {n} plus {n}?"}) + "\n" for n in rows)
    (folder / "train.jsonl").write_text(text)
    return path


PROGRAM = """
import sys
from rich.console import Console
from peagle_train import Run
from peagle_train.errors import PeagleError
from peagle_train.pipeline import run_stage
try:
    with Run.open(sys.argv[1], sys.argv[2:], command=("peagle", "prepare")) as run:
        run_stage(run, "prepare", Console())
except PeagleError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT))],
)
def test_stopped_reshuffled_and_gone_on_nothing_is_asked_twice(
    server: Server, tmp_path: Path, number: signal.Signals
) -> None:
    wanted = list(range(100, 130))
    path = recipe_for(server, tmp_path, *wanted)
    keys = ["data.batch_size=4", f"data.server={{url: {server.url}, concurrency: 2}}"]
    slow = threading.Event()

    def reply(request: dict[str, Any], times: int) -> dict[str, Any]:
        if len(server.requests) > 10:
            slow.wait(8)
        return small(request)

    def small(request: dict[str, Any]) -> dict[str, Any]:
        return body([5, 6, END], "stop", len(request["prompt"]))

    server.reply = reply
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), *keys],
        stdout=subprocess.PIPE,
        text=True,
    )
    while len(server.requests) <= 10:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    slow.set()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert f"{number.name}: stopped;" in out and "the same command goes on" in out
    before, server.asked, server.reply = server.asked, Counter(), lambda r, n: small(r)
    recipe_for(server, tmp_path, *reversed(wanted))
    with Run.open(path, keys, command=("peagle", "prepare")) as run:
        run_stage(run, "prepare", Console(quiet=True))
        store = AnswerStore(run.answers_dir)
        rows = store.rows()
    texts = [row.prompt for row in rows if row.set == "train"]
    assert sorted(texts) == sorted(f"What is {n} plus {n}?" for n in wanted)
    again = set(before) & set(server.asked)
    assert len(again) <= 2, "only requests that were in flight are asked again"
    assert len(before) + len(server.asked) - len(again) == len(rows)


@pytest.mark.processes
def test_the_states_of_a_servers_answers_are_made_by_extract(server: Server, tmp_path: Path) -> None:
    path = recipe_for(server, tmp_path, 1, 2, 3)
    server.reply = lambda r, n: body([5, 6, END], "stop", len(r["prompt"]))
    with Run.open(path, [f"data.server={{url: {server.url}}}"], command=("peagle", "prepare")) as run:
        run_stage(run, "prepare", Console(quiet=True))
        assert not run.states_dir.exists()
        run_stage(run, "extract", Console(quiet=True))
        record = json.loads((run.answers_dir / "stage.json").read_text())
    assert record["parts"]["data"]["server"] == {"model": None} and server.url not in json.dumps(record)


def test_a_stop_is_told_apart_from_a_fault() -> None:
    assert StoppedError("x", signal.SIGTERM).exit_code == 143
