"""Rows of a data set on the Hub, streamed: nothing is downloaded but the rows that are read.

They come in an order of their own, drawn once (shards, then a buffer), so that the first few thousand are not
the first file; the same revision gives the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.prompts.rows import Row
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import MixPart

PREFIX = "hub:"
_BUFFER = 10_000


def read_hub(part: MixPart) -> Iterator[Row]:
    """Every row of the split that a part names. Raises PeagleError if it cannot be had."""
    from datasets import load_dataset

    name = part.source.removeprefix(PREFIX)
    if part.part is None:
        raise PeagleError(
            f"prompt source {part.source!r}: found no `part`, the split of it that is to be read; expected "
            "one, for example part: train"
        )
    revision = revision_of(part)
    try:
        stream = load_dataset(name, part.subset, split=part.part, revision=revision, streaming=True)
        stream = stream.shuffle(seed=0, buffer_size=_BUFFER)
        for number, value in enumerate(stream):
            yield Row(f"{name} {part.part} row {number}", dict(value), raw=str(value))
    except (OSError, ValueError) as error:  # not found, no such subset or split, no network
        raise _not_had(part, error) from error


def revision_of(part: MixPart) -> str:
    """The commit that a part means: what it names if that is a commit, else what the Hub says today."""
    if part.revision is not None and re.fullmatch(r"[0-9a-f]{40}", part.revision):
        return part.revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        found = HfApi().dataset_info(part.source.removeprefix(PREFIX), revision=part.revision).sha
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise _not_had(part, error) from error
    assert found is not None
    return found


def _not_had(part: MixPart, error: Exception) -> PeagleError:
    return PeagleError(
        f"prompt source {part.source!r} (subset {part.subset}, part {part.part}): cannot be read from the "
        f"Hub: {error}. Check the names and the network, and for gated data `hf auth login`"
    )
