"""Whether vLLM can give all layers of a head one KV cache group beside its target's layers.

vLLM's hybrid KV cache manager sorts the layers of target and head by what they cache (window, KV heads, head
width) and cuts each sort into groups of one size. A drafter needs all of its layers in one group; vLLM 0.32
stops with an AssertionError in `validate_same_kv_cache_group` where they are not. The rule is that of
v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`:

    size      the largest sort's count where it is below 1.5 times the smallest's, else the smallest's
    groups    a sort of n layers gets ceil(n / size) of them; its layers are dealt out like cards

Example, gpt-oss-20b with 12 sliding and 12 full layers: a head of 4 full layers makes 12 and 16, so the size
is 16 and the head's layers share a group. On an 8-layer model of the same kind, 4 and 4 + 4 give size 4, and
two groups to deal the head's layers out to. Serving then needs `--disable-hybrid-kv-cache-manager`, which
costs the memory that sliding layers would save, and works where all sliding layers have one window.

Targets of one kind of layer are never cut. Backends that store blocks outermost pack layers in another way;
none that serves the supported targets asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peagle_train.target.facts import KVLayer

FLAG = "--disable-hybrid-kv-cache-manager"


def groups_of_head(target: Sequence[KVLayer], head: Sequence[KVLayer]) -> int:
    """Over how many KV cache groups vLLM spreads the head's layers; 1 is what it can serve.

    Args:
        target: the target's layers that keep a cache, in order.
        head: the head's layers, in order; vLLM lists them after the target's.
    """
    layers = [*target, *head]
    if len({layer.window for layer in layers}) == 1:
        return 1
    counts = Counter(layers)
    smallest, largest = min(counts.values()), max(counts.values())
    size = largest if largest < 1.5 * smallest else smallest
    seen: Counter[KVLayer] = Counter()
    used = set()
    for index, layer in enumerate(layers):
        groups = -(-counts[layer] // size)
        if index >= len(target):
            used.add((layer, seen[layer] % groups))
        seen[layer] += 1
    return len(used)


def one_group_works(layers: Sequence[KVLayer]) -> bool:
    """Whether vLLM starts with `FLAG`: it then merges all layers, which it can for one width of window."""
    return len({layer.window for layer in layers if layer.window is not None}) <= 1


def needs_flag(head: Sequence[KVLayer], target: Sequence[KVLayer]) -> bool:
    """Whether serving a head with these layers beside a target with those needs `FLAG`.

    Raises:
        ValueError: vLLM cannot serve it beside this target with the flag either, or gives it other windows.
    """
    layers = [*target, *head]
    everywhere = {layer.window for layer in target}
    if len(everywhere) == 1 and None not in everywhere and any(layer.window is None for layer in head):
        # engine/arg_utils.py: such a target's window becomes the default of every layer without its own.
        raise ValueError(
            f"full layers beside a target whose every layer has a window of {everywhere.pop()}: vLLM gives "
            "them that window too"
        )
    if groups_of_head(target, head) == 1:
        return False
    if not one_group_works(layers):
        windows = sorted({layer.window for layer in layers if layer.window is not None})
        raise ValueError(
            f"windows of {' and '.join(map(str, windows))} in head and target, whose layers fall into "
            "several KV cache groups and cannot share one"
        )
    return True
