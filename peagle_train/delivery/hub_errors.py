"""What the Hub refuses, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from peagle_train.delivery.progress import printable, without_queries
from peagle_train.errors import PeagleError, StaleError


@contextmanager
def plain_words(url: str, repo_id: str, endpoint: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into errors that say what to do, without token or signed address."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise PeagleError(f"{url}: the Hub is switched off by HF_HUB_OFFLINE; unset it to push") from None
    except HfHubHTTPError as error:
        raise _refusal(error, url, repo_id) from None
    except httpx2.HTTPError as error:
        raise PeagleError(_unreachable(error, url, endpoint)) from None
    except RuntimeError as error:
        # The upload of a large file wraps what went wrong.
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _refusal(cause, url, repo_id) from None
        if isinstance(cause, httpx2.HTTPError):
            raise PeagleError(_unreachable(cause, url, endpoint)) from None
        raise
    except ValueError as error:
        # Said of a card or an answer that breaks the protocol.
        raise PeagleError(f"{url}: {without_queries(str(error))}") from None


def _unreachable(error: Exception, url: str, endpoint: str) -> str:
    said = without_queries(str(error)).rstrip(".") or type(error).__name__
    return (
        f"{url}: the Hub at {printable(endpoint)} cannot be reached: {said}. "
        "Check the network and HF_ENDPOINT"
    )


def _refusal(error: HfHubHTTPError, url: str, repo_id: str) -> PeagleError:
    status = error.response.status_code
    if status == 401:
        return PeagleError(
            f"{url}: the Hub does not accept the token (401); run `hf auth login`, "
            "or renew HF_TOKEN, which goes first"
        )
    if status == 403:
        return PeagleError(
            f"{url}: access denied (403): the token may not write to {repo_id}; "
            "it needs the role `write`, and you need to be a member of the owner"
        )
    if status == 404:
        return PeagleError(
            f"{url}: no repository {repo_id} that this token may see (404), "
            "and none could be made; check owner and name"
        )
    if status == 412:
        return StaleError(f"{url}: someone else wrote to the branch during this push (412); push again")
    if status == 429:
        return PeagleError(f"{url}: the Hub asks for fewer requests (429); push again later")
    said = error.server_message or f"HTTP {status}"
    return PeagleError(f"{url}: the Hub refused the push ({status}): {without_queries(str(said))}")
