"""The adapter against the models' own answers, on a twin of every supported class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.errors import PeagleError
from peagle_train.target.adapter import Target
from peagle_train.target.families import FAMILIES
from peagle_train.twin.models import TWINS, tiny_llama

# Longer than the twins' sliding window of 8, so that masks of both kinds of layer matter.
LENGTH = 21


@pytest.fixture(scope="module", params=sorted(TWINS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(TWINS[request.param], tmp_path_factory.mktemp(request.param))


def load(twin: Callable[..., Path], folder: Path) -> Target:
    return Target.load(twin(folder), dtype="float32", device="cpu")


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 109, shape, generator=torch.Generator().manual_seed(seed))


def test_every_supported_class_has_a_twin(tmp_path: Path) -> None:
    classes = {load(twin, tmp_path / name).facts.class_name for name, twin in TWINS.items()}
    assert classes == set(FAMILIES)


def test_tapped_states_equal_hidden_states_bit_for_bit(target: Target) -> None:
    ids = tokens(2, LENGTH)
    depth, size = target.facts.num_layers, target.facts.hidden_size
    states = target.forward(ids, aux_layers=range(depth + 1))
    raw: list[torch.Tensor] = []
    handle = (
        target.model.get_decoder()
        .layers[-1]
        .register_forward_hook(
            lambda module, args, output: raw.append(output[0] if isinstance(output, tuple) else output)
        )
    )
    own = target.model(ids, output_hidden_states=True, use_cache=False)
    handle.remove()
    for layer in range(depth):
        assert torch.equal(states.aux[..., layer * size : (layer + 1) * size], own.hidden_states[layer])
    assert torch.equal(states.aux[..., depth * size :], states.last)
    assert torch.equal(states.last, raw[0])
    # transformers' last entry is after the norm: `last` is before it, and the norm leads there.
    assert torch.equal(target.model.get_decoder().norm(states.last), own.hidden_states[depth])
    assert not torch.allclose(states.last, own.hidden_states[depth])


def test_asked_layers_come_in_the_order_asked(target: Target) -> None:
    ids, size = tokens(1, 5), target.facts.hidden_size
    some = target.forward(ids, aux_layers=[3, 0])
    every = target.forward(ids, aux_layers=range(4))
    assert torch.equal(some.aux[..., :size], every.aux[..., 3 * size :])
    assert torch.equal(some.aux[..., size:], every.aux[..., :size])
    assert target.forward(ids, aux_layers=[]).aux.shape == (1, 5, 0)


def test_distribution_is_the_models_own(target: Target) -> None:
    ids = tokens(2, LENGTH)
    last = target.forward(ids, aux_layers=[]).last
    own = target.model(ids, use_cache=False).logits.float().softmax(-1)
    # All of it, to 1e-6: a softcap moves probabilities but never the argmax.
    torch.testing.assert_close(target.distribution(last), own, rtol=1e-5, atol=1e-6)
    chosen = torch.tensor([7, 3, 200])
    part = own[..., chosen] / own[..., chosen].sum(-1, keepdim=True)
    torch.testing.assert_close(target.distribution(last, chosen), part, rtol=1e-4, atol=1e-7)


def test_the_softcap_matters_where_there_is_one(target: Target) -> None:
    last = target.forward(tokens(2, LENGTH), aux_layers=[]).last
    uncapped = torch.nn.functional.linear(target.model.get_decoder().norm(last), target.head_table())
    moved = (target.distribution(last) - uncapped.softmax(-1)).abs().max()
    assert moved > 1e-3 if target.facts.logit_softcap else moved < 1e-6


def test_output_head_is_a_copy_that_stands_alone(target: Target) -> None:
    last = target.forward(tokens(2, LENGTH), aux_layers=[]).last
    chosen = torch.tensor([9, 2, 31])
    for token_ids in (None, chosen):
        head = target.output_head(token_ids)
        torch.testing.assert_close(head(last), target.logits(last, token_ids), rtol=1e-5, atol=1e-5)
        assert not any(parameter.requires_grad for parameter in head.parameters())
        assert head.weight.data_ptr() != target.head_table().data_ptr()


def test_padded_on_the_left_equals_alone(target: Target) -> None:
    rows = [tokens(LENGTH, seed=1), tokens(13, seed=2), tokens(4, seed=3)]
    ids, mask = torch.zeros(3, LENGTH, dtype=torch.long), torch.zeros(3, LENGTH, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, LENGTH - len(row) :], mask[number, LENGTH - len(row) :] = row, 1
    batched = target.forward(ids, aux_layers=[0, 2, 4], attention_mask=mask)
    assert torch.isfinite(batched.aux).all()
    for number, row in enumerate(rows):
        alone = target.forward(row[None], aux_layers=[0, 2, 4])
        torch.testing.assert_close(batched.aux[number, -len(row) :], alone.aux[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batched.last[number, -len(row) :], alone.last[0], rtol=1e-4, atol=1e-4)


def test_padded_on_the_right_equals_alone(target: Target) -> None:
    rows = [tokens(LENGTH, seed=1), tokens(13, seed=2), tokens(4, seed=3)]
    ids = torch.stack([torch.nn.functional.pad(row, (0, LENGTH - len(row))) for row in rows])
    batched = target.forward(ids, aux_layers=[0, 2, 4])
    for number, row in enumerate(rows):
        alone = target.forward(row[None], aux_layers=[0, 2, 4])
        torch.testing.assert_close(batched.aux[number, : len(row)], alone.aux[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batched.last[number, : len(row)], alone.last[0], rtol=1e-4, atol=1e-4)


def test_a_later_token_changes_no_earlier_state(target: Target) -> None:
    ids = tokens(1, LENGTH)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] - 4) % 100 + 5
    before, after = (target.forward(x, aux_layers=[1]).last for x in (ids, other))
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_an_answer_ends_at_each_of_the_familys_end_tokens(target: Target) -> None:
    ends = {
        "<|im_start|>": {"<|im_end|>"},
        "<|begin_of_text|>": {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
        None: {"<|im_end|>", "<|endoftext|>"},
        "<|startoftext|>": {"<|return|>", "<|endoftext|>", "<|call|>"},
        "<bos>": {"<eos>", "<turn|>"},
    }[target.tokenizer.bos_token]
    assert set(target.tokenizer.convert_ids_to_tokens(list(target.end_token_ids))) == ends


def test_end_tokens_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    target = load(tiny_llama, tmp_path)
    assert target.end_token_ids == (2,)
    target.model.generation_config.eos_token_id = [4, 106]
    assert Target(target.model, target.tokenizer, target.facts).end_token_ids == (2, 4, 106)
    target.model.generation_config.eos_token_id = None
    target.tokenizer.eos_token = None
    with pytest.raises(PeagleError, match="no answer would ever end"):
        Target(target.model, target.tokenizer, target.facts)


def test_the_embedding_table_is_unscaled(target: Target) -> None:
    ids = tokens(1, 6)
    looked_up = target.forward(ids, aux_layers=[0]).aux
    scale = target.facts.hidden_size**0.5 if "Gemma" in target.facts.class_name else 1.0
    torch.testing.assert_close(looked_up, target.embedding_table()[ids] * scale)


def test_bfloat16_keeps_its_type_and_logits_are_float32(tmp_path: Path) -> None:
    target = Target.load(tiny_llama(tmp_path), dtype="bfloat16", device="cpu")
    states = target.forward(tokens(1, 5), aux_layers=[1, 2])
    assert states.aux.dtype == states.last.dtype == target.dtype == torch.bfloat16
    own = target.model(tokens(1, 5), use_cache=False).logits.float()
    assert torch.equal(target.logits(states.last), own)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    target = load(tiny_llama, tmp_path)
    with pytest.raises(ValueError, match=r"aux layer 5.*0 \(embeddings\) to 4"):
        target.forward(tokens(1, 5), aux_layers=[5])
    with pytest.raises(ValueError, match="past and new tokens"):
        target.forward(tokens(1, 5), aux_layers=[], attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="every document a row of its own"):
        target.forward(tokens(1, 5), aux_layers=[], position_ids=torch.tensor([[0, 1, 2, 0, 1]]))


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    weights = load_file(tiny_llama(tmp_path) / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PeagleError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        Target.load(tmp_path, dtype="float32", device="cpu")
