"""When a training is over."""

from __future__ import annotations

from pathlib import Path

from peagle_train.recipe.schema import TrainSection
from peagle_train.training.checkpoint import Standing, last_recorded
from peagle_train.training.resume import CHECKPOINTS


def why_ended(standing: Standing, section: TrainSection) -> str | None:
    """Why a training that stands here is over, in words; None: it goes on."""
    if standing.step >= section.steps:
        return f"{section.steps} steps"
    if section.patience is not None and standing.stale >= section.patience:
        return (
            f"{standing.step} of {section.steps} steps: no better acceptance in {standing.stale} validations "
            "(train.patience)"
        )
    if section.max_hours is not None and standing.seconds >= 3600 * section.max_hours:
        return (
            f"{standing.step} of {section.steps} steps: {standing.seconds / 3600:.2f} hours (train.max_hours)"
        )
    return None


def steps_taken(directory: Path, section: TrainSection) -> int:
    """Steps of a finished training, for reports. directory: training/."""
    saved = last_recorded(directory / CHECKPOINTS)
    return section.steps if saved is None else saved.standing.step
