"""Curves of a training in the trackers that the recipe names.

The trackers follow log.jsonl, which stays the truth: after each new line they are sent what they have not
been sent yet, and tracking/state.json keeps how far each one is. Three things follow from that:

  - steps that are taken again after a kill are not sent again, and no second run appears;
  - a tracker that is turned on late, or failed for a while, gets the whole curve at the next start;
  - without `track` nothing here is imported, started or written.

    training/tracking/
      state.json        per tracker: the id of its run, and the last record sent
      PROJECT/          event files of tensorboard
      wandb/            one folder an attempt
      mlflow/           mlflow.db and artifacts, unless an MLflow server is named

trackio keeps its own place, where `trackio show` looks.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import atomic_file, read_json, remove_leftovers, write_json
from peagle_train.recipe.schema import Recipe, TrackSection
from peagle_train.recipe.yaml_text import dump
from peagle_train.stages import TRACKING

State = dict[str, dict[str, Any]]


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The points of one record of log.jsonl, by the name of their curve; a depth without elements has none.

    Depths and draft positions are counted from 1 as in reports: `depth_1` is the first drafted token.
    """
    if "validation" in record:
        score = record["validation"]
        accepted = enumerate(score["per_position"], start=1)
        return {
            "validation/acceptance_length": score["acceptance_length"],
            **{f"validation/accepted_at/{position}": share for position, share in accepted},
        }
    names = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "elements")
    accuracy = enumerate(record["accuracy"], start=1)
    return {
        **{f"train/{name}": record[name] for name in names},
        **{f"train/accuracy/depth_{depth}": share for depth, share in accuracy if share is not None},
    }


def require_trackers(track: TrackSection) -> None:
    """Raises PeagleError if a tracker is not installed, or wandb would have to ask for a key."""
    available = {str(name) for name in get_available_trackers()}
    missing = [name for name in track.log_with if name not in available]
    if missing:
        raise PeagleError(
            f"track.log_with: not installed here: {', '.join(missing)}; run `pip install "
            f"{' '.join(missing)}` (`pip install 'peagle-train[track]'` for all trackers), or leave it out"
        )
    if "wandb" in track.log_with and not track.offline:
        import wandb

        unsent = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
        if not unsent and not wandb.login(prompt=False, verify=False):
            raise PeagleError(
                "track.log_with: wandb found no API key; run `wandb login`, set WANDB_API_KEY, or set "
                "track.offline=true to keep the run here and upload it later with `wandb sync`"
            )


class Tracking:
    """Sends the records of one training's log to running trackers.

    Args:
        accelerator: with started trackers.
        directory: the training folder.
        state: what tracking/state.json holds, by `_key`.
        keys: the key in `state` of each tracker, by its name.
        console: told when a tracker fails.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, state: State, keys: dict[str, str], console: Console
    ):
        self._accelerator, self._console = accelerator, console
        self._log, self._file = directory / "log.jsonl", directory / TRACKING / "state.json"
        self._state, self._live = state, dict(keys)
        self._offset = 0

    def follow(self) -> None:
        """Sends the lines of log.jsonl that the trackers lack. Call it when the log has grown.

        A tracker that fails is let go with a warning: days of training do not end for a chart, and what it
        missed is sent at the next start.
        """
        with self._log.open("rb") as file:
            file.seek(self._offset)
            records = [json.loads(line) for line in file]
            self._offset = file.tell()
        # At a step that has both, the training record comes first.
        points = [([r["step"], int("validation" in r)], curves(r)) for r in records]
        for name, key in list(self._live.items()):
            try:
                self._send(name, self._state[key], points)
            except Exception as error:  # noqa: BLE001 - trackers raise whatever their transports raise
                del self._live[name]
                self._console.print(
                    f"track: {name} failed and is sent nothing more ({_words(error)}); training goes on, and "
                    f"{self._log} has every record",
                    style="yellow",
                    markup=False,
                    highlight=False,
                )
        write_json(self._file, self._state)

    def _send(self, name: str, run: dict[str, Any], points: list[tuple[list[int], dict[str, float]]]) -> None:
        tracker = self._accelerator.get_tracker(name)
        for place, values in points:
            if place > run["sent"]:
                tracker.log(values, step=place[0])
                run["sent"] = place


@contextmanager
def trackers(
    accelerator: Accelerator, recipe: Recipe, directory: Path, console: Console
) -> Iterator[Tracking | None]:
    """The trackers of a recipe, started; finished however the block ends, so that their files are whole.

    Yields None where there is nothing to do: no tracker is named, or this is not the main process.
    Raises PeagleError if a tracker cannot start.
    """
    track = recipe.track
    if not track.log_with or not accelerator.is_main_process:
        yield None
        return
    folder = directory / TRACKING
    folder.mkdir(parents=True, exist_ok=True)
    state: State = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    keys: dict[str, str] = {name: _key(name, track) for name in track.log_with}
    # What a tracker was told about its surroundings holds until it has finished.
    with ExitStack() as surroundings, ExitStack() as running:
        running.callback(_finish, accelerator, console)
        try:
            _start(accelerator, recipe, folder, state, keys, surroundings)
        except Exception as error:  # as above
            raise PeagleError(
                f"track.log_with: {', '.join(track.log_with)} cannot start: {_words(error)}; "
                "mend that, set track.offline=true, or leave the tracker out of track.log_with"
            ) from error
        tracking = Tracking(accelerator, directory, state, keys, console)
        yield tracking
        tracking.follow()  # a tracker that was turned on after the last record


def _key(name: str, track: TrackSection) -> str:
    """Names a run of a tracker: in another project or team it is another run."""
    return "/".join(part for part in (name, track.entity, track.project) if part)


def _start(
    accelerator: Accelerator,
    recipe: Recipe,
    folder: Path,
    state: State,
    keys: dict[str, str],
    stack: ExitStack,
) -> None:
    """Starts every tracker, in the run it had before if it had one, and writes the recipe into new runs."""
    track, values = recipe.track, recipe.model_dump(mode="json")
    new = [name for name, key in keys.items() if key not in state]
    for name in new:
        state[keys[name]] = {"id": uuid.uuid4().hex[:8], "sent": [-1, 0]}
    ids = {name: state[key]["id"] for name, key in keys.items()}
    run = track.run or recipe.name
    settings: dict[str, dict[str, Any]] = {}
    if "wandb" in keys:
        import wandb

        if track.offline:
            stack.enter_context(_environment({"WANDB_ERROR_REPORTING": "false"}))
        settings["wandb"] = {
            "id": ids["wandb"],
            "name": run,
            "entity": track.entity,
            "dir": str(folder),
            "resume": "allow",
            "mode": "offline" if track.offline else None,
            "config": values,
            # Of what surrounds the run only machine and versions: no terminal output, no repository.
            "settings": wandb.Settings(console="off", disable_git=True),
        }
    if "trackio" in keys:
        if track.offline:
            stack.enter_context(_trackio_stays_here())
        # Its runs resume by name, so the name carries the id: two runs of one name stay two.
        name = f"{run}-{ids['trackio']}"
        settings["trackio"] = {"name": name, "resume": "allow", "config": values, "embed": False}
    if "mlflow" in keys:
        known = {} if "mlflow" in new else {"run_id": ids["mlflow"]}
        settings["mlflow"] = {"run_name": run, **known, **_mlflow_store(track, folder / "mlflow", stack)}
    accelerator.init_trackers(track.project, init_kwargs=settings)
    if "mlflow" in new:
        state[keys["mlflow"]]["id"] = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
        accelerator.get_tracker("mlflow").store_init_configuration(dict(_flat(values)))
    if "tensorboard" in new:
        # As text: hyperparameters would appear as a run of their own at every start.
        accelerator.get_tracker("tensorboard", unwrap=True).add_text("recipe", f"```yaml\n{dump(values)}```")
    write_json(folder / "state.json", state)


def _mlflow_store(track: TrackSection, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Points mlflow to a database in `folder` unless the user named a server; undone with `stack`."""
    if track.offline or not os.environ.get("MLFLOW_TRACKING_URI"):
        stack.enter_context(_environment({"MLFLOW_DISABLE_TELEMETRY": "true"}))
    import mlflow

    chosen = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    if chosen and not track.offline:
        return {}
    folder.mkdir(exist_ok=True)
    remove_leftovers(folder)
    database = folder.resolve() / "mlflow.db"
    if not database.is_file():
        # mlflow makes its tables in many steps, and never mends what a kill left half made.
        with atomic_file(database) as temporary:
            mlflow.MlflowClient(f"sqlite:///{temporary}").search_experiments()
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    stack.callback(mlflow.set_tracking_uri, chosen)  # type: ignore[arg-type]  # None unsets it
    return {"logging_dir": (folder / "artifacts").resolve().as_uri()}


@contextmanager
def _trackio_stays_here() -> Iterator[None]:
    """Takes away what sends trackio to a Space or a server, and its question to the Hub for a user name."""
    from huggingface_hub import constants

    away = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
    before = constants.HF_HUB_OFFLINE
    with _environment(dict.fromkeys(away)):
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _finish(accelerator: Accelerator, console: Console) -> None:
    """Ends what was started. accelerate's end_training would also end the process group, still needed."""
    for tracker in accelerator.trackers:
        if not hasattr(tracker, "tracker"):
            continue  # another one could not start, and this one's turn never came
        try:
            tracker.finish()
        except Exception as error:  # noqa: BLE001 - the others are to be finished too
            message = f"track: {tracker.name} did not end well: {_words(error)}"
            console.print(message, style="yellow", markup=False, highlight=False)
    accelerator.trackers.clear()


def _words(error: Exception) -> str:
    """An error without the user and password that a server's address may carry."""
    return re.sub(r"//[^/@\s]+@", "//", f"{type(error).__name__}: {error}")


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for the block; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, for trackers that know no sections."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
