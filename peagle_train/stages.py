"""When a stage may be skipped, resumed, or must start anew.

Every stage writes one folder, and the folder says in `stage.json` what it was made from:

    {"stage", "fingerprint", "parts", "seconds", "attempts", "versions", "finished", "files"}

`files` are the sizes of what a finished stage left; a folder that lacks one of them, or has it in another
size, is not finished.

`parts` is a dictionary of everything the output depends on: the stage's name, the version of its format,
the keys of the recipe it reads, the fingerprint of the target, and the fingerprints of the stages before
it. Two rules make the record useful to others than its writer:

  - what comes from the recipe carries its own dotted key, nested (`{"train": {"steps": 400}}`) or flat
    (`{"states.dtype": "float32"}`);
  - a fingerprint of an earlier stage carries that stage's name (`{"prepare": "0f3c..."}`).

Same fingerprint and finished: the stage is skipped. Same and unfinished (killed): it resumes. Another: when
the work begins the old folder is set aside under a name of its own, never deleted, and the keys that differ
are named; when its inputs are asked for again, it is taken back.

    found = finished(folder, parts, console)      # a StageResult to return, or None: work to do
    ...                                           # whatever can be wrong with the inputs, told now
    begin(folder, parts)                          # sets others aside, marks the folder as unfinished
    ...                                           # the work, each unit written atomically
    return seal(folder, parts, seconds, "saved 320 rows")
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
from rich.console import Console

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.files import fingerprint, read_json, write_json
from peagle_train.recipe.fields import has_free_names
from peagle_train.run import FOLDERS, Run
from peagle_train.versions import versions

RECORD = "stage.json"

TRACKING = "tracking"
"""Folder of a stage that other programs go on writing to after it has finished: nothing in it is promised."""


@dataclass(frozen=True)
class StageResult:
    """What a stage did.

    Attributes:
        name: the stage.
        seconds: how long the work took; of a skipped stage, how long it took when it was done.
        skipped: its output was there already.
        message: one line for the user.
        next_command: the command that goes on from here; None: the pipeline knows.
    """

    name: str
    seconds: float
    skipped: bool
    message: str
    next_command: str | None = None


@dataclass(frozen=True)
class StageRecord:
    """The content of a folder's stage.json; `finished` is None while the stage is at work.

    files: bytes of every file of a finished folder, by its path within. seconds: of the last attempt.
    """

    stage: str
    fingerprint: str
    parts: dict[str, Any]
    seconds: float | None
    attempts: int
    finished: str | None
    files: dict[str, int]


def read_record(directory: Path) -> StageRecord | None:
    """The record of a folder, or None if it has none. Raises CorruptError for one that cannot be read."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        return StageRecord(**{key: content[key] for key in StageRecord.__dataclass_fields__})
    except (CorruptError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{path}: found no readable record ({error}); expected the JSON that a stage writes. "
            f"Move {directory} away and run the stage again."
        ) from error


def finished(directory: Path, parts: Mapping[str, Any], console: Console | None = None) -> StageResult | None:
    """The result to return if `directory` was already made from exactly `parts`, else None.

    Of an earlier folder that was set aside and fits these parts the name is given back, and the console (left
    out: standard output) told. A folder of other parts stays where it is until `begin`: what a stage finds
    wrong with its inputs in between must not cost the user the output of the right ones.
    """
    record = _fitting(directory, parts)
    if record is None:
        record = _taken_back(directory, parts, console or rich.get_console())
    if record is None or record.finished is None:
        return None
    return StageResult(
        name=record.stage,
        seconds=record.seconds or 0.0,
        skipped=True,
        message=f"{directory}: already made from the same inputs "
        f"({record.fingerprint[:8]}, {record.finished})",
    )


def fits(directory: Path, parts: Mapping[str, Any]) -> bool:
    """Whether what stands in `directory` is whole, or unfinished, work of exactly these parts."""
    return _fitting(directory, parts) is not None


def make_room(directory: Path, parts: Mapping[str, Any], console: Console | None = None) -> None:
    """Sets a folder aside that does not belong to `parts`, for a stage whose folder appears whole."""
    _settle(directory, parts, console or rich.get_console())


def begin(directory: Path, parts: Mapping[str, Any], console: Console | None = None) -> bool:
    """Marks `directory` as the unfinished work of `parts`; True if earlier unfinished work of the same
    parts is there to be resumed.

    Raises ValueError if the folder is already finished: ask `finished` first.
    """
    record = _settle(directory, parts, console or rich.get_console())
    if record is not None and record.finished is not None:
        raise ValueError(f"{directory} is finished; a stage must ask finished() before begin()")
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory, parts, attempts=record.attempts + 1 if record else 1, seconds=None, done=None)
    return record is not None


def seal(
    directory: Path,
    parts: Mapping[str, Any],
    seconds: float,
    message: str = "",
    next_command: str | None = None,
) -> StageResult:
    """Marks `directory` as finished, and returns the result for the stage to return.

    A stage whose folder appears at once may seal the temporary folder, without `begin`.
    """
    record = read_record(directory)
    if record is not None and record.fingerprint != fingerprint(parts):
        raise StaleError(
            f"{directory}: cannot be sealed, begun with other inputs ({differences(record.parts, parts)})"
        )
    done = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    _write(directory, parts, attempts=record.attempts if record else 1, seconds=round(seconds, 3), done=done)
    return StageResult(str(parts["stage"]), seconds, False, message or f"wrote {directory}", next_command)


def require(run: Run, stage: str) -> str:
    """The fingerprint of an earlier stage, proven to be finished and to fit the recipe of `run`.

    This keeps `peagle train` from learning on states of yesterday's recipe. The stages before it are
    held against the recipe too, as far as their folders are there. Raises PeagleError if the
    stage has not finished, and StaleError, naming the keys, if it was made from other inputs.
    """
    directory = run.stage_dir(stage)
    record = read_record(directory)
    if record is not None and (harmed := _harmed(directory, record)):
        raise CorruptError(
            f"{directory}: {harmed}; run `{run.command_for(stage)}` to make it anew (the old folder is kept)"
        )
    command = run.command_for(stage)
    if record is None or record.finished is None:
        state = "has not finished" if record else "has not run"
        raise PeagleError(
            f"{directory}: {stage} {state}; run `{command}` first, or `{run.command_for('run')}` for all"
        )
    stale = [
        f"{key}: {_short(there)} there, {_short(here)} in the recipe"
        for key, there, here in _recipedifferences(record.parts, run.recipe.model_dump(mode="json"))
    ]
    for earlier in FOLDERS:
        named = record.parts.get(earlier)
        if not isinstance(named, str) or earlier == stage:
            continue
        if read_record(run.stage_dir(earlier)) is None:
            continue  # this folder came from elsewhere without those before it
        now = require(run, earlier)  # first the cause, then what follows from it
        if now != named:
            stale.append(f"{earlier}: {named[:8]} there, {now[:8]} now")
    if stale:
        raise StaleError(
            f"{directory}: made from other inputs than the recipe's ({'; '.join(stale)}); run `{command}` to "
            "make it anew (the old folder is kept)"
        )
    return record.fingerprint


def _fitting(directory: Path, parts: Mapping[str, Any]) -> StageRecord | None:
    """The record of a folder that belongs to `parts` and lacks nothing."""
    record = read_record(directory) if directory.is_dir() else None
    if record is None or record.fingerprint != fingerprint(parts) or _harmed(directory, record):
        return None
    return record


def _taken_back(directory: Path, parts: Mapping[str, Any], console: Console) -> StageRecord | None:
    """The record of a finished folder of these parts that had been set aside; it is put back in its place."""
    for aside in sorted(directory.parent.glob(f"{directory.name}.old-{fingerprint(parts)[:8]}*")):
        try:
            record = _fitting(aside, parts)
        except CorruptError:
            continue  # an old folder that nobody asked for
        if record is not None and record.finished is not None:
            _settle(directory, parts, console)
            aside.rename(directory)
            message = f"{directory}: {aside.name} was made from these inputs and is taken back"
            console.print(message, style="yellow", markup=False, highlight=False)
            return record
    return None


def _settle(directory: Path, parts: Mapping[str, Any], console: Console) -> StageRecord | None:
    """The record of a folder that belongs to `parts`; a folder that does not is set aside."""
    if not directory.is_dir():
        return None
    record = read_record(directory)
    if record is None:
        if any(directory.iterdir()):
            _set_aside(directory, "unknown", "it holds no stage.json", console)
        return None
    if record.fingerprint != fingerprint(parts):
        why = f"made from other inputs ({differences(record.parts, parts)})"
        _set_aside(directory, record.fingerprint[:8], why, console)
        return None
    if harmed := _harmed(directory, record):
        _set_aside(directory, f"{record.fingerprint[:8]}-damaged", harmed, console)
        return None
    return record


def _harmed(directory: Path, record: StageRecord) -> str:
    """What a finished folder lacks, in words; empty if nothing."""
    if record.finished is None:
        return ""  # still at work: nothing is promised yet
    wrong = []
    for name, size in record.files.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            wrong.append(name)
    if not wrong:
        return ""
    return f"{', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}: missing or not of the recorded size"


def _sizes(directory: Path) -> dict[str, int]:
    """Every file below a folder but the record, logs of workers, hidden files and what trackers keep."""
    sizes = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        passed = name.parts[0] == TRACKING or any(part.startswith(".") for part in name.parts)
        if file.is_file() and not passed and file.suffix != ".log" and str(name) != RECORD:
            sizes[str(name)] = file.stat().st_size
    return sizes


def set_aside(directory: Path, why: str, console: Console) -> None:
    """Gives a stage's folder another name, so that its work begins anew; without a folder does nothing.

    Its user has done with it: unlike one that other inputs pushed aside, it is never taken back.
    """
    if directory.is_dir():
        record = read_record(directory)
        _set_aside(directory, f"anew-{record.fingerprint[:8] if record else 'unknown'}", why, console)


def reopen(directory: Path) -> None:
    """Marks a finished folder as unfinished: its work goes on further than its limits were."""
    write_json(directory / RECORD, {**read_json(directory / RECORD), "finished": None, "files": {}})


def _set_aside(directory: Path, label: str, why: str, console: Console) -> None:
    aside = directory.with_name(f"{directory.name}.old-{label}")
    number = 2
    while aside.exists():
        aside = directory.with_name(f"{directory.name}.old-{label}-{number}")
        number += 1
    directory.rename(aside)
    console.print(f"{directory}: {why}; kept as {aside.name}", style="yellow", markup=False, highlight=False)


def _write(
    directory: Path, parts: Mapping[str, Any], *, attempts: int, seconds: float | None, done: str | None
) -> None:
    write_json(
        directory / RECORD,
        {
            "stage": parts["stage"],
            "fingerprint": fingerprint(parts),
            "parts": dict(parts),
            "seconds": seconds,
            "attempts": attempts,
            "versions": versions(),
            "finished": done,
            "files": _sizes(directory) if done else {},
        },
    )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """`train.steps: 400, now 500`, for every key that differs."""
    plain = json.loads(json.dumps(here))  # tuples become lists, as in the file
    old, new = dict(_flat(there)), dict(_flat(plain))
    absent = object()
    changed = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, absent), new.get(key, absent)
        if before is absent or after is absent or before != after:
            names = ["none" if value is absent else _short(value) for value in (before, after)]
            changed.append(f"{key}: {names[0]}, now {names[1]}")
    return "; ".join(changed)


def _recipedifferences(parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of `parts` that are keys of the recipe too and hold another value there.

    A stage may leave keys of a section out (those its output does not depend on), but where names are
    the user's own, as those of held-out sets, a name on one side alone is a difference.
    """
    for key, there in parts.items():
        path = tuple(key.split("."))
        here: Any = recipe
        for part in path:
            here = here[part] if isinstance(here, Mapping) and part in here else ...
        if here is not ...:
            yield from _compare(path, there, here)


def _compare(path: tuple[str, ...], there: Any, here: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        free = has_free_names(path)
        for name in dict.fromkeys([*there, *here]):
            if name in there and name in here:
                yield from _compare((*path, name), there[name], here[name])
            elif free:
                yield ".".join((*path, name)), there.get(name), here.get(name)
    elif not isinstance(here, Mapping) and here != there:
        yield ".".join(path), there, here


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
