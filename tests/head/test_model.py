"""The network's parts that no equality with the reference would show."""

from __future__ import annotations

import pytest
import torch

from peagle_train.head.model import Rotary
from tests.head.toys import toy_head


def test_rotary_tables_survive_a_cast_of_the_head() -> None:
    """In bfloat16 the frequencies stay float32: at position 100,000 rounded ones would be nonsense."""
    positions = torch.tensor([0, 1, 5_000, 100_000])
    exact = toy_head(dtype=torch.float64).rotary(positions, torch.float64)
    cast = toy_head(dtype=torch.bfloat16).rotary(positions, torch.float32)
    for ours, reference in zip(cast, exact, strict=True):
        assert torch.allclose(ours.double(), reference, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_the_servers_table(dtype: torch.dtype) -> None:
    """1 / theta ** (2 i / D), multiplied by the position in float32."""
    cos, sin = Rotary(8, 10_000.0)(torch.tensor([3]), dtype)
    angles = torch.tensor([3.0 / 10_000 ** (2 * i / 8) for i in range(4)])
    assert torch.allclose(cos[0, 0], angles.cos().to(dtype))
    assert torch.allclose(sin[0, 0].float(), angles.sin(), atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
