"""Asks a server all prompts of a run: many at a time, nothing twice, until all are answered or too many fail.

prompts ──► conversations ──► `concurrency` askers ──► journal.jsonl ──► answer batches, once all are over
            in the journal     each one at a time        a line each       (as the workers write them)
            already: passed
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_prep.chat import Rendered
from data_prep.conversation import Conversation, Talk
from data_prep.server.client import Asked, Client, FailedError
from data_prep.server.journal import Journal
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import ServerSection
from peagle_train.store.answers import AnswerRow, AnswerWriter

ERRORS = "errors.jsonl"
_SEED_BITS = 31


class StoppedError(PeagleError):
    """A signal stopped the asking; what was answered is kept."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Answering:
    """What the asking came to."""

    rows: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> str:
        """Tokens per second, for people."""
        return f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s from the server"


Advance = Callable[[Answering], None]


def answer_by_server(
    section: ServerSection,
    batches: Mapping[int, Sequence[Rendered]],
    writer: AnswerWriter,
    *,
    talk: Talk | None,
    max_new_tokens: int,
    vocab_size: int,
    ends: Sequence[int],
    console: Console,
) -> Answering:
    """Lets the server answer all prompts, and writes the batches.

    talk: for conversations of several turns.
    Raises PeagleError: no such server, model or key, an answer without token ids, more failures than
    data.server.max_failures. StoppedError: SIGINT or SIGTERM; what is answered by then is kept.
    """
    prompts = [prompt for rows in batches.values() for prompt in rows]
    journal = Journal(writer.directory)
    try:
        if journal.damaged:
            console.print(f"{journal.path}: {journal.damaged} damaged lines are asked again", style="yellow")
        asking = _Asking(section, journal, prompts, talk, max_new_tokens, writer.directory / ERRORS, console)
        client = Client(section, vocab_size, ends)
        work = asyncio.run(asking.run(client))
        for batch, rows in batches.items():
            found = [row for prompt in rows for row in _rows(journal, prompt)]
            if found:
                writer.write_batch(batch, found)
    except BaseException:
        journal.close()
        raise
    journal.close(remove=True)
    return work


def _rows(journal: Journal, prompt: Rendered) -> list[AnswerRow]:
    key = prompt.key
    return journal.rows(key, prompt.row, prompt.set, prompt.id) if key in journal else []


class _Asking:
    """One run of asking, with what it has come to so far."""

    def __init__(
        self,
        section: ServerSection,
        journal: Journal,
        prompts: Sequence[Rendered],
        talk: Talk | None,
        max_new_tokens: int,
        errors: Path,
        console: Console,
    ):
        self._section, self._journal, self._prompts = section, journal, prompts
        self._talk, self._max_new_tokens, self._errors, self._console = talk, max_new_tokens, errors, console
        self._work = Answering()
        self._last_failure = ""
        self._stopped = 0

    async def run(self, client: Client) -> Answering:
        """Asks until nothing is left. Raises as `answer_by_server`."""
        todo = [prompt for prompt in self._prompts if prompt.key not in self._journal]
        if len(todo) < len(self._prompts):
            done = len(self._prompts) - len(todo)
            self._console.print(f"{done:,} of {len(self._prompts):,} prompts are answered already")
        self._errors.unlink(missing_ok=True)
        if not todo:
            return self._work
        started = time.monotonic()
        try:
            await client.prove(todo[0].token_ids)
            with self._progress(len(todo)) as advance, self._stopping() as stop:
                await self._ask_all(client, iter(todo), advance, stop)
        finally:
            await client.close()
        self._work.seconds = time.monotonic() - started
        return self._work

    async def _ask_all(
        self, client: Client, todo: Iterator[Rendered], advance: Advance, stop: asyncio.Event
    ) -> None:
        askers = [
            asyncio.create_task(self._ask(client, todo, advance)) for _ in range(self._section.concurrency)
        ]
        stopper = asyncio.create_task(stop.wait())
        everyone: asyncio.Future[Any] = asyncio.gather(*askers)
        ends: list[asyncio.Future[Any]] = [everyone, stopper]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped:
                raise StoppedError(
                    f"{signal.Signals(self._stopped).name}: stopped; {len(self._journal):,} of "
                    f"{len(self._prompts):,} prompts are answered and kept, the same command goes on",
                    self._stopped,
                )
            await everyone
        finally:
            for task in (*askers, stopper):
                task.cancel()
            await asyncio.gather(*askers, stopper, return_exceptions=True)

    async def _ask(self, client: Client, todo: Iterator[Rendered], advance: Advance) -> None:
        """Takes one prompt after the other, until none is left."""
        for prompt in todo:
            conversation = Conversation(prompt, self._talk)
            try:
                tokens = await self._converse(client, conversation)
            except FailedError as error:
                self._fail(prompt, conversation, str(error))
            else:
                rows = conversation.rows()
                self._journal.write(conversation.key, rows)
                self._work.rows += len(rows)
                self._work.tokens += tokens
            advance(self._work)

    async def _converse(self, client: Client, conversation: Conversation) -> int:
        """All turns of one conversation; how many tokens were generated."""
        tokens = 0
        while (token_ids := conversation.next) is not None:
            seed = conversation.seed % (1 << _SEED_BITS)
            asked = Asked(token_ids, self._max_new_tokens, conversation.temperature, conversation.top_p, seed)
            answer, finish = await client.complete(asked)
            conversation.answered(answer, finish)
            tokens += len(answer)
        return tokens

    def _fail(self, prompt: Rendered, conversation: Conversation, why: str) -> None:
        """Notes a prompt without answer. Raises PeagleError if there are too many of them."""
        self._work.failed += 1
        entry = {"key": conversation.key, "set": prompt.set, "id": prompt.id, "error": why}
        with self._errors.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        most = self._section.max_failures * len(self._prompts)
        if self._work.failed > most:
            raise PeagleError(
                f"data.server: {self._work.failed:,} of {len(self._prompts):,} prompts got no answer, more "
                f"than the {100 * self._section.max_failures:g} % of data.server.max_failures. The last: "
                f"{why}. All are in {self._errors}; what was answered is kept, and the same command goes on"
            )

    @contextmanager
    def _progress(self, total: int) -> Iterator[Advance]:
        columns = (
            TextColumn("answering"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} prompts"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        started = time.monotonic()
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("answering", total=total, rate="")

            def advance(work: Answering) -> None:
                rate = f"{work.tokens / (time.monotonic() - started):,.0f} tokens/s"
                progress.update(
                    task, advance=1, rate=rate + (f", {work.failed} failed" if work.failed else "")
                )

            yield advance

    @contextmanager
    def _stopping(self) -> Iterator[asyncio.Event]:
        """Set when SIGINT or SIGTERM comes; in another thread than the main one they go elsewhere."""
        stop = asyncio.Event()
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        loop = asyncio.get_running_loop()

        def heard(number: int) -> None:
            self._stopped = number
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, heard, number)
        try:
            yield stop
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
