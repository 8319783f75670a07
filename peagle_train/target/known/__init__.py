"""Sizes of the targets that have a recipe here, for planning where their config.json cannot be had.

One JSON file a target holds what of its config.json decides sizes and shapes, where each key was looked up,
the published head, and, where somebody measured it, how long the target's answers are. A run never reads
this: it reads the real config.json. Whatever was planned from here says so.

    {"model", "sources": [...], "mask_token", "config": {...},
     "published": {"head", "positions", "k"}, "answer_tokens": {"median", "p90", "source"}}

The last two may lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle_train.files import read_json
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import TargetFacts, read_facts
from peagle_train.target.source import TargetNotFoundError, describe


@dataclass(frozen=True)
class Published:
    """A head that its maker published for a target.

    positions: that it was trained for; k: that its maker reports acceptance at; None: not told.
    """

    head: str
    positions: int | None = None
    k: int | None = None


@dataclass(frozen=True)
class AnswerTokens:
    """Lengths of a target's answers as somebody measured them, in tokens."""

    median: float
    p90: float
    source: str


@dataclass(frozen=True)
class Known:
    """What one file holds.

    config: as transformers reads config.json; sources: where its keys were looked up. mask_token: what fits
    `head.mask_token` (docs/targets.md).
    """

    model: str
    sources: list[str]
    mask_token: str
    config: dict[str, Any]
    published: Published | None = None
    answer_tokens: AnswerTokens | None = None

    def facts(self) -> TargetFacts:
        """The target's facts, read from `config` as they are from a config.json."""
        from transformers import AutoConfig

        keys = {key: value for key, value in self.config.items() if key != "model_type"}
        return read_facts(AutoConfig.for_model(self.config["model_type"], **keys), self.model)


def known(model: str) -> Known | None:
    """What is known of a target by its Hub id; None for any other."""
    return next((entry for entry in _all() if entry.model == model), None)


def describe_or_known(section: TargetSection) -> tuple[TargetFacts, str | None]:
    """As `source.describe`; where the config cannot be had, from here, with a sentence that says so.

    Raises PeagleError as `describe`, for a target that is not known here.
    """
    entry = known(section.model)
    try:
        return describe(section), None
    except TargetNotFoundError:
        if entry is None:
            raise
    note = f"the config.json of {entry.model} cannot be had here; its sizes are those that peagle_train knows"
    return entry.facts(), note


def _all() -> list[Known]:
    return [_read(path) for path in sorted(Path(__file__).parent.glob("*.json"))]


def _read(path: Path) -> Known:
    content = read_json(path)
    parts: dict[str, Any] = {
        key: kind(**content[key])
        for key, kind in (("published", Published), ("answer_tokens", AnswerTokens))
        if key in content
    }
    return Known(*(content[key] for key in ("model", "sources", "mask_token", "config")), **parts)
