"""Which rows a step trains on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from peagle_train.head.batch import PackedBatch, pack
from peagle_train.head.loss import LossSums
from peagle_train.store.documents import Documents, slot_counts, trainable_rows
from peagle_train.training.data import Draw, Stream, cost, in_order
from peagle_train.training.module import DraftTraining
from peagle_train.training.schedule import learning_rate_at
from tests.head.toys import CONFIG, toy_document, toy_head
from tests.training.conftest import Made

LENGTHS = {
    "even": [100] * 50,
    "short and long": [10] * 60 + [900, 1000, 1500],
    "one": [7],
    "longer than the budget": [3000, 20, 5000, 30],
    **{
        f"drawn {seed}": torch.randint(
            1, top, (count,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed, (top, count) in enumerate([(200, 300), (1000, 77), (1500, 1200), (3, 40)])
    },
}
BUDGET = 1000
SHAPES = [(1, 1), (3, 1), (1, 2), (2, 3)]
"""(accumulate, world)"""


def make(lengths: list[int], accumulate: int = 1, world: int = 1, seed: int = 0) -> Stream:
    # Rows are named from 10 on: a place in the list is no row.
    rows = range(10, 10 + len(lengths))
    return Stream(rows, lengths, seed, batch_tokens=BUDGET, accumulate=accumulate, world=world)


def taken(stream: Stream, step: int) -> list[list[list[Draw]]]:
    return [stream.step(step, rank) for rank in range(stream.world)]


@pytest.mark.parametrize(("accumulate", "world"), SHAPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_once_an_epoch_within_the_budget_and_shared_evenly(
    name: str, accumulate: int, world: int
) -> None:
    stream = make(LENGTHS[name], accumulate, world)
    step = 0
    for epoch in range(3):
        seen: Counter[int] = Counter()
        while stream.locate(step)[0] == epoch:
            shares = taken(stream, step)
            assert len({len(batches) for batches in shares}) == 1  # collectives count calls
            assert 1 <= len(shares[0]) <= accumulate
            last = stream.locate(step + 1)[0] > epoch
            for batches in shares:
                for batch in batches:
                    assert {draw.epoch for draw in batch} <= {epoch}
                    slots = [stream.lengths[draw.row] for draw in batch]
                    assert sum(slots) <= BUDGET or len(slots) == 1
                    assert slots or last
                    seen.update(draw.row for draw in batch)
            step += 1
        assert seen == Counter(stream.rows)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_step_is_a_pure_function_of_its_number(name: str) -> None:
    forwards, backwards = make(LENGTHS[name], 2, 2), make(LENGTHS[name], 2, 2)
    steps = range(2 * len(forwards.epoch(0)) + 1)
    ahead = [taken(forwards, s) for s in steps]
    back = [taken(backwards, s) for s in reversed(steps)]
    assert ahead == back[::-1]


@pytest.mark.parametrize("name", ["drawn 0", "short and long"])
def test_shuffles_differ_by_epoch_and_by_seed(name: str) -> None:
    stream = make(LENGTHS[name])
    orders = [[batch for step in stream.epoch(e) for batch in step] for e in range(3)]
    orders.append([batch for step in make(LENGTHS[name], seed=1).epoch(0) for batch in step])
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    together = [{frozenset(batch) for batch in order} for order in orders]
    assert together[0] != together[1]  # not only their order: the company of a row changes too


@pytest.mark.parametrize("name", LENGTHS)
def test_a_step_holds_the_same_rows_however_processes_and_accumulation_share_it(name: str) -> None:
    def rows(accumulate: int, world: int, step: int) -> list[list[int]]:
        stream = make(LENGTHS[name], accumulate, world)
        return sorted([d.row for d in b] for batches in taken(stream, step) for b in batches if b)

    for step in range(4):
        assert rows(6, 1, step) == rows(1, 6, step) == rows(2, 3, step)


@pytest.mark.parametrize("name", ["drawn 0", "drawn 1", "drawn 2"])
def test_micro_batches_are_full(name: str) -> None:
    stream = make(LENGTHS[name])
    batches = len([batch for step in stream.epoch(0) for batch in step])
    least = sum(LENGTHS[name]) / BUDGET
    best = {"drawn 0": 0.96, "drawn 1": 0.91, "drawn 2": 0.9}[name]
    assert best < stream.fill() <= 1
    if name != "drawn 2":  # which has rows over the budget
        assert stream.fill() == pytest.approx(least / batches)


@pytest.mark.parametrize(("accumulate", "world"), [(1, 2), (1, 8), (4, 2)])
def test_processes_of_a_step_pay_about_the_same(accumulate: int, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (10 ** (1 + 3.2 * torch.rand(3000, generator=generator))).long().tolist()  # 10 to 16,000
    rows = range(len(lengths))
    stream = Stream(rows, lengths, 0, batch_tokens=16384, accumulate=accumulate, world=world)
    waited = paid = 0.0
    for step in range(len(stream.epoch(0))):
        sums = [
            sum(cost([lengths[d.row] for d in batch]) for batch in batches) for batches in taken(stream, step)
        ]
        waited += max(sums) * world
        paid += sum(sums)
    # Micro-batches taken in any order keep 8 processes waiting for a quarter of the time.
    assert paid / waited > 0.92


def test_cost_grows_with_the_square_of_a_document_not_of_a_micro_batch() -> None:
    assert cost([100, 100]) == 2 * cost([100])
    assert cost([8192]) == 2 * 8192
    assert cost([20_000]) > 3 * cost([100] * 200)


def test_packing_is_told_with_rows_over_the_budget() -> None:
    said = make(LENGTHS["longer than the budget"]).describe()
    assert "2 rows are longer than train.batch_tokens" in said and "4 rows of 8,050 slots" in said
    assert (
        "longer" not in make(LENGTHS["even"]).describe() and "100 % full" in make(LENGTHS["even"]).describe()
    )


def test_neighbours_for_measuring() -> None:
    assert in_order([4, 5, 6, 7], [600, 400, 1, 2000], BUDGET) == [[4, 5], [6], [7]]
    assert in_order([], [], BUDGET) == []


def test_an_empty_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="no training row"):
        make([])


def test_lengths_are_those_of_the_packed_rows(made: Made) -> None:
    rows, documents = trainable_rows(made.store, "train"), Documents(made.store, positions=4)
    assert len(rows) > 20
    for row, slots in zip(rows, slot_counts(made.store, rows), strict=True):
        sampled = documents.sampled(row, 0, seed=0, rate=0.5, floor=0.0)
        assert pack([sampled]).num_slots == slots < made.store.read(row).token_ids.numel()


def gradients(batches: list[PackedBatch | None]) -> tuple[LossSums, dict[str, torch.Tensor]]:
    """Loss sums and gradients of the float64 toy over some micro-batches."""
    head = toy_head()
    output = torch.nn.Linear(CONFIG.target_hidden_size, CONFIG.draft_vocab_size, bias=False).double()
    with torch.no_grad():
        output.weight.copy_(torch.randn(output.weight.shape, generator=torch.Generator().manual_seed(9)))
    module = DraftTraining(head, output, 4, "kl")
    sums = [module(batch) for batch in batches]
    total = sums[0].loss
    for other in sums[1:]:
        total = total + other.loss
    total.backward()
    whole = LossSums(
        total.detach(), *(sum(getattr(s, n) for s in sums) for n in ("count", "correct", "elements"))
    )
    return whole, {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}


def test_packed_equals_unpacked() -> None:
    documents = [
        toy_document(seed, length=length, turns=turns)
        for seed, (length, turns) in enumerate(
            [(14, ((5, 14),)), (9, ((2, 5), (6, 9))), (30, ((4, 12), (15, 30))), (6, ((3, 6),))]
        )
    ]
    alone, by_row = gradients([pack([d]) for d in documents])
    for batches in (
        [pack(documents)],
        [pack(documents[:1]), pack(documents[1:])],
        [pack(documents[::-1]), None],
    ):
        together, packed = gradients(batches)
        assert torch.allclose(alone.loss, together.loss, rtol=1e-12)
        assert alone.count == together.count and torch.equal(alone.elements, together.elements)
        assert torch.equal(alone.correct, together.correct)
        assert by_row.keys() == packed.keys()
        for name, gradient in by_row.items():
            assert torch.allclose(gradient, packed[name], rtol=1e-10, atol=1e-10), name


def test_a_micro_batch_of_nothing_costs_nothing() -> None:
    sums, grads = gradients([None])
    head = toy_head()
    assert sums.loss == 0 and sums.count == 0 and not sums.elements.any()
    assert grads.keys() == {name for name, p in head.named_parameters() if p.requires_grad}
    assert not any(g.any() for g in grads.values())


def test_learning_rate() -> None:
    def rates(decay: str) -> list[float]:
        return [
            learning_rate_at(s, peak=1.0, warmup_steps=2, total_steps=6, decay=decay)  # type: ignore[arg-type]
            for s in range(6)
        ]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
