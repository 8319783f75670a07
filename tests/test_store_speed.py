"""scripts/store_speed.py prints a rate for every way of reading, against that of a step."""

from __future__ import annotations

import sys

import pytest
import torch

from scripts import store_speed


def test_it_prints_every_way_of_reading_and_its_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        sys, "argv", ["x", "--rows", "5", "--tokens", "24", "--prompt", "6", "--draft-vocabulary", "64"]
    )
    store_speed.main()
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    consumed = float(next(line for line in lines if "consumes" in line).split()[4].replace(",", ""))
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("reading")) + 1 :]
    assert len(table) == 5
    for line in table:
        rate, _, times = (float(cell.replace(",", "")) for cell in line.split()[-3:])
        assert times == pytest.approx(rate / consumed, rel=0.02, abs=1)
