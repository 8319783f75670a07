"""How much work a training is: steps, epochs, tokens, operations, hours.

Counted are multiplications and additions of matrix products, forward and backward, as `scripts/side_by_side`
counts them for one batch; here for a row of p prompt and n answer tokens, of which the head sees

    T = p + n - 2 real slots, A = n - 1 of them with loss, M = A x (r + r^2 + ... + r^(K-1)) mask slots

Chains that end with their row, and the elements of own chains, are left out of the count: both are small. So
are norms, the loss itself, validation and checkpoints. Hours are operations over a rate; a rate of one's own
machine, in tokens per second as training prints them, is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle_train.head.config import HeadConfig
from peagle_train.head.sampling import kept_shares
from peagle_train.planning.lengths import SetLengths
from peagle_train.recipe.schema import TrainSection
from peagle_train.training.data import Stream

PRODUCT = 2
"""Operations of a multiplication with its addition."""

TRAINED, ATTENTION = 3, 7
"""Products of a weight (forward, two gradients) and of a pair of attention (2 forward, 5 backward)."""

RATES = {
    "cuda": (
        150e12,
        "assumed: 150 TFLOP/s a GPU, 15 % of an H200's 989 in bfloat16; the epoch of UltraChat-200k that "
        "arXiv 2602.01469 trains in 1.8 hours on eight of them is 100 to 210 by this count, for rows of "
        "1,000 to 2,048 tokens. No GPU has measured ours: --rate",
    ),
    "cpu": (
        80e9,
        "measured: 80 GFLOP/s a thread in float32 (docs/engine.md: 88 to 108 for products alone, of which "
        "a step reaches about nine tenths)",
    ),
}
"""Operations per second of one GPU, or of one thread of a CPU, and where the figure comes from."""


@dataclass(frozen=True)
class Work:
    """What training comes to.

    Attributes:
        steps: optimizer steps of the recipe.
        steps_per_epoch: of all training rows; None: their number is unknown.
        tokens_per_step: real slots, over all processes.
        operations_per_step: over all processes.
        longest: real slots of the largest micro-batch that may come.
    """

    steps: int
    steps_per_epoch: float | None
    tokens_per_step: float
    operations_per_step: float
    longest: int

    @property
    def epochs(self) -> float | None:
        return None if self.steps_per_epoch is None else self.steps / self.steps_per_epoch

    @property
    def tokens(self) -> float:
        """Real slots of the whole training."""
        return self.steps * self.tokens_per_step

    def hours(self, *, tokens_per_second: float | None = None, operations_per_second: float) -> float:
        """Of the whole training, at a rate of all processes together."""
        if tokens_per_second is not None:
            return self.tokens / tokens_per_second / 3600
        return self.steps * self.operations_per_step / operations_per_second / 3600


def work_of(rows: SetLengths, config: HeadConfig, section: TrainSection, world: int, *, exact: bool) -> Work:
    """The work of a recipe's training on `world` processes.

    rows: of the training set; exact: whether its sample is the rows themselves.
    """
    slots = [max(prompt + answer - 2, 1) for prompt, answer in rows.sample]
    stream = Stream(range(len(slots)), slots, seed=0, batch_tokens=section.batch_tokens)
    batches = len(stream.epoch(0))  # micro-batches of the sample, packed as the training will pack
    size = section.accumulate * world
    shares = kept_shares(section.positions, section.cod.rate, section.cod.floor)
    each = [operations(config, prompt, answer, shares) for prompt, answer in rows.sample]
    longest = max(slots) if exact else max(rows.longest - 2, 1)
    total = sum(slots) if exact else math.inf if rows.rows is None else rows.rows * longest
    return Work(
        steps=section.steps,
        steps_per_epoch=None if rows.rows is None else batches / len(slots) * rows.rows / size,
        tokens_per_step=sum(slots) / batches * size,
        operations_per_step=sum(each) / batches * size,
        longest=int(max(longest, min(section.batch_tokens, total))),
    )


def operations(config: HeadConfig, prompt: int, answer: int, shares: Sequence[float]) -> float:
    """Operations of one row in one step, forward and backward."""
    slots, labelled = max(prompt + answer - 2, 1), max(answer - 1, 0)
    masks = labelled * sum(shares)
    elements = labelled + masks
    width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    key_values = 2 * config.num_key_value_heads * config.head_dim
    parallel = config.method == "peagle"

    linear = slots * config.aux_width * width * 2 / TRAINED  # the stored states want no gradient
    for layer in range(config.num_layers):
        first, last = layer == 0, layer == config.num_layers - 1
        entering = slots if first and parallel else slots + masks  # mask slots enter layer 0 as one row
        asking = (labelled if first and parallel else elements) if last else entering
        inputs = 2 * width if first else width
        linear += inputs * (asking * queries + entering * key_values)
        going_on = elements if last else slots + masks
        linear += going_on * width * (queries + 3 * config.intermediate_size)
    # The target's output needs no backward, and depths that share a position share it.
    linear += elements * width * config.draft_vocab_size
    linear += labelled * config.target_hidden_size * config.draft_vocab_size / TRAINED

    before = prompt + answer / 2  # what a slot of the answer sees, on average
    causal, causal_last = slots * (slots + 1) / 2, labelled * before
    # In layer 0 the mask slots of one position ask once, whatever their depth.
    prefix, prefix_first = masks * before, min(masks, labelled) * before
    inner = config.num_layers - 1
    pairs = causal * inner + causal_last + prefix * inner + (prefix_first if parallel else prefix)
    return PRODUCT * (TRAINED * linear + ATTENTION * pairs * queries)
