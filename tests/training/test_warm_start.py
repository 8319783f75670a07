"""Training that goes on from a head starts as that head, and only from the head the recipe describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.export.checks import HeadFault
from peagle_train.export.layout import export_head
from peagle_train.head.io import load_head
from peagle_train.head.model import DrafterHead
from peagle_train.training.warm_start import start_parts
from tests.training.conftest import Made
from tests.training.test_loop import HEAD, log_of, make_loop


def trained(made: Made, directory: Path, **head: Any) -> DrafterHead:
    """The best head of a short training."""
    make_loop(made, directory, head=HEAD.model_copy(update=head)).run()
    return load_head(directory / "best")


def validations(directory: Path) -> dict[int, Any]:
    return {line["step"]: line["validation"] for line in log_of(directory) if "validation" in line}


@pytest.mark.parametrize("token", ["unused", None], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("embeddings", ["own", "shared"])
def test_it_starts_at_the_acceptance_of_the_head(
    made: Made, tmp_path: Path, embeddings: str, token: str | None
) -> None:
    head = trained(made, tmp_path / "first", embeddings=embeddings, mask_token=token)
    export_head(head, tmp_path / "head", target=made.target.facts, dtype="float32")
    changes = {"embeddings": embeddings, "mask_token": token, "start_from": str(tmp_path / "head")}
    section = HEAD.model_copy(update=changes)
    loop = make_loop(made, tmp_path / "second", head=section, seed=1, precision="bf16")
    assert all(parameter.dtype == torch.float32 for parameter in loop.head.parameters())
    for name, tensor in loop.head.state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name]), name
    assert loop.head.embed_tokens.weight.requires_grad is (embeddings == "own")
    best = max(validations(tmp_path / "first").values(), key=lambda score: score["acceptance_length"])
    loop.run()
    assert validations(tmp_path / "second")[0] == best
    assert not torch.equal(loop.head.fc.weight, head.fc.weight)  # and it goes on to learn


def test_the_draft_vocabulary_is_the_heads_not_chosen_anew(made: Made, tmp_path: Path) -> None:
    head = trained(made, tmp_path / "first")
    chosen = head.draft_token_ids
    others = [token for token in range(made.target.facts.vocab_size) if token not in set(chosen.tolist())]
    kept = [token for token in others if token != head.config.mask_token_id][:60]
    head.set_draft_tokens(torch.tensor(sorted(kept)))
    export_head(head, tmp_path / "head", target=made.target.facts, dtype="float32")
    section = HEAD.model_copy(update={"start_from": str(tmp_path / "head")})
    loop = make_loop(made, tmp_path / "second", head=section)
    assert loop.head.draft_token_ids.tolist() == sorted(kept)
    # The target is asked for the same tokens in the same order.
    target_output = loop.wrapped.step_module.draft._target_output[0]
    state = torch.randn(1, made.target.facts.hidden_size)
    assert torch.allclose(target_output(state), made.target.logits(state)[:, sorted(kept)], atol=1e-5)


def test_every_difference_is_told_at_once_with_both_values(made: Made, tmp_path: Path) -> None:
    head = trained(made, tmp_path / "first")
    export_head(head, tmp_path / "head", target=made.target.facts, dtype="float32")
    changes = {"layers": 2, "fc_norm": True, "draft_vocab_size": 70, "embeddings": "own", "rms_norm_eps": 0.5}
    section = HEAD.model_copy(update={"start_from": str(tmp_path / "head"), **changes})
    with pytest.raises(RecipeError) as caught:
        make_loop(made, tmp_path / "second", head=section)
    faults = caught.value.faults
    assert len(faults) == len(changes)
    text = "\n".join(faults)
    for part in (
        "head.layers: found 2; expected 1",
        "write head.layers=1",
        "head.fc_norm: found True; expected False",
        "write head.fc_norm=false",
        "head.draft_vocab_size: found 70; expected 60",
        "head.embeddings: found own; expected shared",
        "head.rms_norm_eps: found 0.5",
    ):
        assert part in text, part


def test_a_head_of_the_other_method_is_refused(made: Made, tmp_path: Path) -> None:
    export_head(
        trained(made, tmp_path / "first"), tmp_path / "head", target=made.target.facts, dtype="float32"
    )
    section = HEAD.model_copy(update={"mask_token": None, "start_from": str(tmp_path / "head")})
    with pytest.raises(RecipeError, match="a head with method peagle; expected eagle3"):
        make_loop(made, tmp_path / "second", head=section)


def test_only_a_sound_head_of_ours(made: Made, tmp_path: Path) -> None:
    head = trained(made, tmp_path / "first")
    directory = tmp_path / "head"
    section = HEAD.model_copy(update={"start_from": str(directory)})
    with pytest.raises(PeagleError, match=r"head: found no export.json.*peagle import"):
        make_loop(made, tmp_path / "second", head=section)
    export_head(head, directory, target=made.target.facts, dtype="float32")
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(HeadFault, match="SHA-256"):
        make_loop(made, tmp_path / "second", head=section)


def test_the_heads_content_is_part_of_what_training_depends_on(made: Made, tmp_path: Path) -> None:
    assert start_parts(HEAD) == {}
    head = trained(made, tmp_path / "first")
    section = HEAD.model_copy(update={"start_from": str(tmp_path / "head")})
    parts = []
    for _ in range(2):
        export_head(head, tmp_path / "head", target=made.target.facts, dtype="float32")
        parts.append(start_parts(section))
        with torch.no_grad():
            head.norm.weight[0] += 1
    assert parts[0] != parts[1] and set(parts[0]["start_from"]) == {"config.json", "model.safetensors"}
