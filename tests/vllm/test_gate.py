"""The overfit gate: what a head learned by heart it drafts in vLLM, unless something on the way is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from tests.vllm import gate
from tests.vllm.conftest import RUNNER, collect, make_job, started, submit
from tests.vllm.gate import CLASSES, FAULTS, K

pytestmark = pytest.mark.vllm

LONGEST = K + 1
"""The acceptance length where no draft is ever rejected: 16 rounds, 64 tokens. All six classes reach it."""

LEVEL = 4.7
"""What a sound head must reach. One rejected draft makes one round more, 1 + 64 / 17 = 4.76: forgiven, since
a server may round a near tie of the head another way. Two in two answers, 1 + 64 / 18 = 4.56, are not."""

RED = 4.0
"""What a broken road must stay below. The mildest fault, the unshifted mask, loses just the first round of
each answer, which makes three of two: 1 + (0 + 4 + 4) / 3 = 3.67."""


class Engine(NamedTuple):
    """One engine of vLLM: a class, and what is broken in its head (None: nothing)."""

    twin: str
    fault: str | None = None

    def __str__(self) -> str:
        return f"{self.twin}, {self.fault}" if self.fault else self.twin


SOUND = [pytest.param(Engine(twin), id=twin) for twin in CLASSES]
BROKEN = [
    pytest.param(engine, id=str(engine), marks=() if engine.twin == "llama" else pytest.mark.slow)
    for engine in (Engine(twin, fault) for twin in CLASSES for fault in FAULTS)
]


@dataclass(frozen=True)
class Measured:
    """What vLLM answered and counted."""

    expected: list[list[int]]
    outputs: list[list[int]]
    counters: dict[str, Any]

    @property
    def acceptance_length(self) -> float:
        return 1 + float(self.counters["accepted"]) / float(self.counters["drafts"])


@pytest.fixture(scope="module")
def measured(
    vllm_python: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Engine, Measured]:
    """All engines that the chosen tests ask for, in one vLLM process."""
    asked = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = {spec.params["engine"] for spec in asked if spec is not None and "engine" in spec.params}
    room = tmp_path_factory.mktemp("gate")
    answers = {}
    with started(vllm_python, RUNNER, room) as process:
        for twin in CLASSES:
            engines = [e for e in (Engine(twin, fault) for fault in (None, *FAULTS)) if e in wanted]
            if not engines:
                continue
            subject = gate.make_subject(twin, room / twin)
            head = gate.train(subject, room / twin / "training")
            sound = room / twin / "head"
            gate.export(head, subject, sound)
            for engine in engines:
                directory = sound
                if engine.fault is not None:
                    directory = room / twin / engine.fault
                    gate.plant(engine.fault, sound, directory, subject)
                job = make_job(
                    str(engine),
                    directory,
                    head,
                    subject.target,
                    k=K,
                    prompts=subject.prompts,
                    max_tokens=gate.ANSWER,
                )
                submit(process, job)
                answers[engine] = subject.answers
        results = collect(process, room)
    return {
        engine: Measured(expected, results[str(engine)]["outputs"], results[str(engine)]["counters"])
        for engine, expected in answers.items()
    }


def report(engine: Engine, measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    counters = measured.counters
    with capsys.disabled():
        print(
            f"\n{engine}: acceptance {measured.acceptance_length:.3f} over {counters['drafts']} drafts, "
            f"of which held, by position: {counters['accepted_per_position']}",
            end="",
        )


@pytest.mark.parametrize("engine", SOUND)
def test_a_sound_head_drafts_what_it_learned(
    measured: dict[Engine, Measured], engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured[engine]
    report(engine, found, capsys)
    assert found.outputs == found.expected
    assert LEVEL <= found.acceptance_length <= LONGEST


@pytest.mark.parametrize("engine", BROKEN)
def test_a_planted_fault_turns_the_gate_red(
    measured: dict[Engine, Measured], engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers stay the target's, as always: what a broken head costs is speed, and nobody is told."""
    found = measured[engine]
    report(engine, found, capsys)
    assert found.outputs == found.expected
    assert found.acceptance_length < RED
