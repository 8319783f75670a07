"""The draft vocabulary, first weights, and a head in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from peagle_train.errors import CorruptError
from peagle_train.head.initialise import initialise_from_target, initialise_randomly
from peagle_train.head.io import load_head, save_head
from peagle_train.head.vocabulary import choose_draft_vocabulary, count_supervised
from tests.head.toys import toy_head


def test_the_most_frequent_tokens_are_chosen() -> None:
    rows = [(torch.tensor([5, 7, 7, 2, 9]), torch.tensor([False, True, True, True, True]))]
    counts = count_supervised(rows, 12)
    assert counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 1, 0, 0]
    chosen = choose_draft_vocabulary(counts, 2, always=[], never=[])
    assert chosen.token_ids.tolist() == [2, 7] and chosen.coverage == 0.75 and chosen.seen == 3


def test_end_tokens_are_in_and_the_mask_token_is_out() -> None:
    counts = torch.tensor([9, 8, 7, 0, 5])
    chosen = choose_draft_vocabulary(counts, 3, always=[3], never=[0])
    assert chosen.token_ids.tolist() == [1, 2, 3]
    assert chosen.coverage == 15 / 29


def test_fewer_distinct_tokens_than_asked_for() -> None:
    chosen = choose_draft_vocabulary(torch.tensor([0, 0, 0, 0, 4, 0]), 4, always=[], never=[1])
    assert chosen.token_ids.tolist() == [0, 2, 3, 4] and chosen.coverage == 1.0


@pytest.mark.parametrize("size", [0, 6])
def test_a_size_that_cannot_be_met(size: int) -> None:
    with pytest.raises(ValueError, match="draft vocabulary"):
        choose_draft_vocabulary(torch.ones(6), size, always=[2], never=[0])


def test_the_map_is_offsets() -> None:
    head = toy_head(draft_vocab_size=3)
    head.set_draft_tokens(torch.tensor([2, 5, 6]))
    assert head.d2t is not None and head.d2t.tolist() == [2, 4, 4]
    assert head.draft_token_ids.tolist() == [2, 5, 6]
    with pytest.raises(ValueError, match="rising"):
        head.set_draft_tokens(torch.tensor([5, 2, 6]))
    full = toy_head(draft_vocab_size=40)
    assert full.d2t is None and full.draft_token_ids.tolist() == list(range(40))
    with pytest.raises(ValueError, match="whole vocabulary"):
        full.set_draft_tokens(torch.arange(40))


class TargetLayer(nn.Module):
    def __init__(self, hidden: int, kv: int, inner: int):
        super().__init__()
        self.self_attn = nn.Module()
        for name, shape in {
            "q": (hidden, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, hidden),
        }.items():
            setattr(self.self_attn, f"{name}_proj", nn.Linear(shape[1], shape[0], bias=False))
        self.mlp = nn.Module()
        for name, (i, o) in {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}.items():
            setattr(self.mlp, f"{name}_proj", nn.Linear(i, o, bias=False))
        self.input_layernorm = nn.RMSNorm(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)


def test_initialised_from_the_target_it_starts_as_the_targets_continuation() -> None:
    """With zeroed embedding halves the first layer is the target's layer on the deepest aux state."""
    head = toy_head(dtype=torch.float32, target_hidden_size=16)
    layers = [TargetLayer(16, 8, 24) for _ in range(3)]
    left = initialise_from_target(
        head,
        embeddings=torch.randn(40, 16),
        output_rows=torch.randn(25, 16),
        final_norm=torch.rand(16),
        layers=[dict(layer.named_parameters()) for layer in layers[1:]],
        mean_aux=torch.arange(48.0),
        seed=0,
    )
    assert left == []
    assert torch.equal(head.layers[0].self_attn.q_proj.weight[:, 16:], layers[1].self_attn.q_proj.weight)
    assert not head.layers[0].self_attn.q_proj.weight[:, :16].any()
    assert torch.equal(head.layers[1].mlp.up_proj.weight, layers[2].mlp.up_proj.weight)
    aux = torch.randn(3, 48)
    assert torch.allclose(head.fc(aux), aux[:, 32:])
    assert torch.equal(head.mask_hidden.flatten(), torch.arange(48.0))


def test_what_does_not_fit_is_named() -> None:
    head = toy_head(dtype=torch.float32, intermediate_size=20, target_hidden_size=16)
    left = initialise_from_target(
        head,
        embeddings=torch.randn(40, 16),
        output_rows=torch.randn(25, 16),
        final_norm=torch.rand(16),
        layers=[dict(TargetLayer(16, 8, 24).named_parameters()) for _ in range(2)],
        mean_aux=torch.zeros(48),
        seed=0,
    )
    assert left == [f"layers.{i}.mlp.{n}_proj.weight" for i in range(2) for n in ("gate", "up", "down")]


def test_random_initialisation_follows_the_seed_and_keeps_the_embeddings() -> None:
    table = torch.randn(40, 16)
    heads = [toy_head(dtype=torch.float32) for _ in range(3)]
    for head, seed in zip(heads, (1, 1, 2), strict=True):
        initialise_randomly(head, table, seed)
    assert torch.equal(heads[0].fc.weight, heads[1].fc.weight)
    assert not torch.equal(heads[0].fc.weight, heads[2].fc.weight)
    assert torch.equal(heads[0].embed_tokens.weight, table)
    assert bool((heads[0].layers[0].hidden_norm.weight == 1).all())


def test_a_folder_gives_the_same_head_back(tmp_path: Path) -> None:
    head = toy_head()
    save_head(tmp_path, head)
    again = load_head(tmp_path, torch.float64)
    assert again.config == head.config
    for (name, a), (_, b) in zip(head.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a.to(b.dtype), b), name
    data = bytearray((tmp_path / "head.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "head.safetensors").write_bytes(bytes(data))
    with pytest.raises(CorruptError, match="checksum"):
        load_head(tmp_path)
    (tmp_path / "head.json").unlink()
    with pytest.raises(CorruptError, match=r"no head\.json"):
        load_head(tmp_path)
