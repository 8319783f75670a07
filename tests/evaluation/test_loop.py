"""The speculative loop: lossless whatever the head says, and it counts what the offline measure counts."""

from __future__ import annotations

import pytest
import torch

from peagle_train.evaluation.loop import first_difference, gap_after, greedy, speculate
from peagle_train.head.acceptance import offline_acceptance
from peagle_train.head.config import HeadConfig, Method
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.session import DraftSession
from peagle_train.store.documents import Documents
from tests.training.conftest import AUX_LAYERS, Made, made

__all__ = ["made"]


def head_for(made: Made, seed: int, layers: int = 1, method: Method = "peagle") -> DrafterHead:
    """A head that starts as the target's continuation, so that some drafts hold and some do not."""
    from peagle_train.head.initialise import initialise_from_target

    facts = made.target.facts
    config = HeadConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_layers=layers,
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=facts.vocab_size,
        target_hidden_size=facts.hidden_size,
        aux_layers=tuple(AUX_LAYERS),
        mask_token_id=3 if method == "peagle" else None,
        rms_norm_eps=facts.rms_norm_eps,
        rope=Rope(facts.rope_theta),
        max_position_embeddings=facts.max_position_embeddings,
        own_embeddings=True,
        method=method,
    )
    head = DrafterHead(config)
    initialise_from_target(
        head,
        embeddings=made.target.embedding_table(),
        output_rows=made.target.head_table(),
        final_norm=made.target.final_norm_weight(),
        layers=made.target.last_layers(head.config.num_layers),
        mean_aux=made.store.read(0).aux.mean(0),
        seed=seed,
    )
    return head


@pytest.mark.parametrize(
    ("method", "layers", "k"),
    [
        *(("peagle", layers, k) for layers in (1, 3) for k in (1, 4, 7)),
        # k passes a round on a target that is as small as the head: slow, hence fewer.
        ("eagle3", 1, 4),
        ("eagle3", 3, 3),
    ],
)
def test_lossless_and_equal_to_the_offline_measure(made: Made, method: Method, layers: int, k: int) -> None:
    head = head_for(made, seed=1, layers=layers, method=method)
    documents = Documents(made.store, k)
    accepted = 0
    for row in range(10):
        stored = made.store.read(row)
        prompt = stored.token_ids[: stored.prompt_length].tolist()
        answer = stored.token_ids[stored.prompt_length :].tolist()
        plain = greedy(made.target, prompt, len(answer))
        spoken = speculate(made.target, head, prompt, k, len(answer))
        assert spoken.token_ids == plain.token_ids == answer
        assert gap_after(made.target, [*prompt, *answer[:5]]) == pytest.approx(plain.gaps[5], abs=1e-4)
        (offline,) = offline_acceptance(head, [documents.full(row)], k)
        counts = spoken.acceptance
        assert (counts.num_drafts, counts.accepted_at) == (offline.num_drafts, offline.accepted_at)
        accepted += counts.num_accepted
    assert accepted > 0  # otherwise nothing was tested but rejections


def test_counting_past_the_end_adds_only_to_the_last_round(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is always right, and answers that end in the middle of its drafts."""
    k, prompt = 4, [5, 60, 7, 80, 9]
    truth = [*prompt, *greedy(made.target, prompt, 24).token_ids]

    def oracle(self: DraftSession, next_tokens: torch.Tensor, aux: torch.Tensor, k: int) -> tuple:
        self.length += next_tokens.shape[0]
        return torch.tensor(truth[self.length + 1 : self.length + 1 + k]), None

    monkeypatch.setattr(DraftSession, "draft", oracle)
    head = head_for(made, seed=1)
    for length in (6, 9, 10, 11):
        delivered = speculate(made.target, head, prompt, k, length)
        past = speculate(made.target, head, prompt, k, length, count_past_end=True)
        assert past.token_ids == delivered.token_ids == truth[len(prompt) : len(prompt) + length]
        # After the first token rounds yield 5 each; of the last one only the rest of the answer counts.
        rounds, rest = divmod(length - 1, k + 1)
        assert past.acceptance.num_drafts == rounds + (rest > 0)
        assert past.acceptance.num_accepted == k * past.acceptance.num_drafts
        assert delivered.acceptance.num_accepted == k * rounds + rest


def test_a_head_that_sees_other_states_is_still_lossless(made: Made) -> None:
    """Aux layers off by one cost acceptance, never correctness."""
    head = head_for(made, seed=1)
    with torch.no_grad():
        head.fc.weight.copy_(torch.randn(head.fc.weight.shape))
    stored = made.store.read(3)
    prompt = stored.token_ids[: stored.prompt_length].tolist()
    assert speculate(made.target, head, prompt, 4, 20).token_ids == greedy(made.target, prompt, 20).token_ids


def test_an_answer_of_one_token_drafts_nothing(made: Made) -> None:
    result = speculate(made.target, head_for(made, 1), [5, 6, 7], 4, 1)
    assert len(result.token_ids) == 1 and result.acceptance.num_drafts == 0
    assert result.acceptance.acceptance_length == 1.0


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1
    assert first_difference([1], [1, 2]) == 1
