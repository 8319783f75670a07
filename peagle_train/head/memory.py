"""What a step of the engine holds in memory, in bytes, from the sizes of head and batch.

    real slots    their graph stays until the end of the batch: linear in the batch's tokens
    mask slots    the graph of one group; the elements of an eagle3 unroll are all in one graph
    loss          the logits of one chunk, of draft and target
    backward      what passes through a layer on the way back, for whichever stream is larger

Every term counts the tensors that `streams.py`, `prefix.py`, `fused.py` and `loss.py` keep; a test holds the
sum against the measured peak. Nothing grows with the square of anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle_train.head.config import HeadConfig


@dataclass(frozen=True)
class Footprint:
    """Bytes per unit of work; `act` is the width of an activation (2 under bfloat16), `par` of a weight."""

    real_slot: int  # kept per real slot
    mask_slot: int  # kept per mask slot of a group; eagle3: per element behind depth 0
    passing_real: int  # on the way back, per real slot
    passing_mask: int  # on the way back, per mask slot of a group
    element: int  # per element of a loss chunk
    group: int  # gradients of the layers' weights, once per group beside the sums
    output: int  # lm_head's copy in half precision, and what a chunk adds to its gradient
    one_graph: bool  # no groups: all that is kept is there until the end

    def step(self, real_slots: int, group_rows: int, loss_rows: int) -> int:
        """Peak of a batch above weights, gradients and optimizer."""
        kept, masks = self.real_slot * real_slots, self.mask_slot * group_rows + self.group
        group = masks + self.passing_mask * group_rows + self.element * loss_rows
        passing = self.passing_real * real_slots + (masks if self.one_graph else 0)
        return kept + self.output + max(group, passing)


def footprint(config: HeadConfig, act: int, par: int, mean_depth: float = 1.0) -> Footprint:
    """Bytes per unit for a head.

    Args:
        config: of the head.
        act, par: bytes of an activation and of a parameter.
        mean_depth: of the elements behind depth 0; eagle3 keeps a copy of its chain for each.
    """
    h, ff, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q = config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    wide = max(act, 4)  # norms, log-sum-exps and merged outputs are at least float32
    entry = config.aux_width * (par + act) + 4 * h * act + 2 * h * wide  # aux and its copy, inputs of layer 0
    # Two residual streams, two normed inputs, q and output, keys and values, gate and up.
    layer = 2 * h * wide + 2 * h * act + 2 * q * act + kv * act + 2 * ff * act
    angles = 2 * config.head_dim * wide
    # torch's causal attention repeats keys for every query head; leaves are copies of keys and values,
    # and have gradients.
    real_layer = layer + 2 * q * act + 2 * kv * act + kv * act
    passing = 4 * ff * act + 4 * h * wide + 4 * q * wide
    unrolled = config.method == "eagle3"
    # An unroll's element enters layer 0 by itself, and is a row of what the loss reads and sends back.
    entry_of_mask = 5 * h * act + 5 * h * wide if unrolled else h * wide
    chain = int(mean_depth * kv * act) if unrolled else 0
    vocabulary = config.draft_vocab_size
    matrices = h * (q + kv) + q * h + 3 * h * ff
    return Footprint(
        real_slot=entry + layers * real_layer + angles,
        mask_slot=layers * (layer + chain) + angles + entry_of_mask,
        passing_real=passing,
        passing_mask=0 if unrolled else passing,
        # Draft logits as computed and wide, their softmax; the target's row as computed, wide, and gathered.
        element=vocabulary * (2 * act + 5 * wide),
        group=layers * matrices * par,
        output=2 * vocabulary * h * act if act < par else 0,
        one_graph=unrolled,
    )
