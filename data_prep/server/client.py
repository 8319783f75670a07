"""One request to a server: token ids in, token ids out.

The prompt goes as the ids that our renderer made, and the answer must come back as ids (`return_token_ids` of
vLLM). Text is never tokenised again: " the" can be one token or two, and one of the two was generated. So a
server that returns no ids is refused.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
)

from peagle_train.errors import PeagleError
from peagle_train.recipe.data import ServerSection

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a second attempt, doubled each time, and at most."""

_AGAIN = (408, 409, 425, 429)


class FailedError(Exception):
    """A request that got no answer, after all attempts; nothing of it is a secret."""


class _RubbishError(Exception):
    """An answer that cannot be one."""


@dataclass(frozen=True)
class Asked:
    """What is asked, and how."""

    token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


class Client:
    """Requests to one server, each repeated as the recipe says.

    Args:
        section: where the server is.
        vocab_size: of the target: ids must be below.
        ends: tokens that end an answer.
    """

    def __init__(self, section: ServerSection, vocab_size: int, ends: Sequence[int]):
        key = "none"  # the client wants one; servers without keys ignore it
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env, "")
            if not key:
                raise PeagleError(
                    f"data.server.api_key_env: the environment variable {section.api_key_env} is empty; set "
                    "it to the server's key, or leave api_key_env out of the recipe"
                )
        self._section, self._vocab, self._ends = section, vocab_size, sorted(ends)
        self._openai = AsyncOpenAI(base_url=section.url, api_key=key, timeout=section.timeout, max_retries=0)
        self.model = section.model or ""

    async def prove(self, prompt: Sequence[int]) -> None:
        """Finds the model's name, and asks for one token: whether the server does all that is needed.

        Raises PeagleError if nobody answers, and for another model, a key that is refused, no token ids.
        """
        where = f"data.server.url {self._section.url}"
        try:
            served = [model.id async for model in self._openai.models.list()]
        except APIConnectionError as error:
            raise PeagleError(
                f"{where}: nobody answers there ({error}); start the server and wait until it is ready "
                "(`curl URL/models` lists the model), or mend the address"
            ) from error
        except APIError as error:
            raise PeagleError(
                f"{where}: asked for its models it says {_words(error)}; is it an OpenAI API?"
            ) from error
        if not self.model and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            raise PeagleError(
                f"{where}: serves {', '.join(served) or 'no model'}; expected "
                f"{self.model or 'one model, or data.server.model that says which'}"
            )
        try:
            await self._once(Asked(prompt, 1, 0.0, 1.0, 0))
        except _RubbishError as error:
            raise PeagleError(f"{where}: {error}") from error
        except APIError as error:
            raise PeagleError(f"{where}: a first request fails: {_words(error)}") from error

    async def complete(self, asked: Asked) -> tuple[list[int], Literal["stop", "length"]]:
        """The generated tokens, end token included, and how they ended.

        Raises FailedError after the last attempt, PeagleError for what no attempt can mend.
        """
        for attempt in range(self._section.retries + 1):
            try:
                return await self._once(asked)
            except (AuthenticationError, PermissionDeniedError, NotFoundError) as error:
                raise PeagleError(f"data.server.url {self._section.url}: {_words(error)}") from error
            except APIStatusError as error:
                if error.status_code not in _AGAIN and error.status_code < 500:
                    raise FailedError(_words(error)) from error
                failure, pause = _words(error), _told(error)
            except (APIError, _RubbishError) as error:
                failure, pause = _words(error), 0.0
            if attempt < self._section.retries:
                grown = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
                await asyncio.sleep(max(pause, grown * (0.5 + random.random() / 2)))
        raise FailedError(f"{self._section.retries + 1} attempts; the last: {failure}")

    async def close(self) -> None:
        await self._openai.close()

    async def _once(self, asked: Asked) -> tuple[list[int], Literal["stop", "length"]]:
        try:
            response = await self._openai.completions.create(
                model=self.model,
                prompt=list(asked.token_ids),
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                seed=asked.seed,
                extra_body={
                    "return_token_ids": True,
                    "stop_token_ids": self._ends,
                    "add_special_tokens": False,
                },
            )
        except ValueError as error:  # a body that is no JSON
            raise _RubbishError(f"the answer is not readable: {error}") from error
        return self._checked(response, asked)

    def _checked(self, response: Any, asked: Asked) -> tuple[list[int], Literal["stop", "length"]]:
        """The answer, if it can be one. Raises _RubbishError naming what is wrong with it."""
        choices = getattr(response, "choices", None)
        if not choices:
            raise _RubbishError("the answer has no `choices`")
        token_ids, finish = getattr(choices[0], "token_ids", None), choices[0].finish_reason
        if token_ids is None:
            raise _RubbishError(
                "the answer has no `token_ids`: this server does not know `return_token_ids`, and text is "
                "never tokenised again; serve the target with a recent vLLM, or leave data.server out"
            )
        if not isinstance(token_ids, list) or not token_ids or not all(isinstance(i, int) for i in token_ids):
            raise _RubbishError(f"`token_ids` is {token_ids!r:.60}; expected some whole numbers")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab:
            raise _RubbishError(
                f"`token_ids` runs from {min(token_ids)} to {max(token_ids)}; the target has ids 0 to "
                f"{self._vocab - 1}: is another model served?"
            )
        usage = getattr(response, "usage", None)
        if usage is not None and usage.prompt_tokens != len(asked.token_ids):
            raise _RubbishError(
                f"the server read {usage.prompt_tokens} prompt tokens, {len(asked.token_ids)} were sent"
            )
        if len(token_ids) > asked.max_tokens:
            raise _RubbishError(f"{len(token_ids)} tokens came, at most {asked.max_tokens} were asked for")
        ended = [place for place, token in enumerate(token_ids) if token in self._ends]
        if finish == "stop" and ended[:1] == [len(token_ids) - 1]:
            return token_ids, "stop"
        if finish == "length" and not ended:
            return token_ids, "length"
        raise _RubbishError(
            f"finish_reason {finish!r} with end tokens at {ended} of {len(token_ids)}; expected `stop` "
            f"with one of {self._ends} at the end and nowhere else, or `length` without"
        )


def _told(error: APIStatusError) -> float:
    """Seconds that the server asks to wait."""
    try:
        return min(float(error.response.headers.get("retry-after", "0")), LONGEST_PAUSE)
    except ValueError:
        return 0.0


def _words(error: Exception) -> str:
    if isinstance(error, APIStatusError):
        return f"{error.status_code} {error.message}"[:300]
    return f"{type(error).__name__}: {error}"[:300]
