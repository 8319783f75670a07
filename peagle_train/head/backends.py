"""How the two streams compute attention, by name.

    sdpa        torch's own attention: any device
    flash       the package flash-attn: half precision on NVIDIA GPUs (`flash.py`)
    flex        torch's flex_attention, compiled: NVIDIA GPUs (`flex.py`)

`reference`, the rule as one dense mask over all rows, has no streams (`engine.py`): its memory is
quadratic, it is there for comparisons. `choose.py` proves a backend on the device where it is to run, and
picks for `auto`.

Real slots need causal attention per document. All others see a prefix of the real slots and their own chain:
without masks by a kernel with edges (`kernels.py`, `prefix.py`), or by the rule in closed form (`flex.py`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from peagle_train.head.causal import Spans, real_slots
from peagle_train.head.flash import FlashAttn, documents
from peagle_train.head.flex import Plans
from peagle_train.head.kernels import kernel_for
from peagle_train.head.prefix import Own, SharedPrefix, attend


class Backend(Protocol):
    """Attention for the two streams of one batch."""

    name: str

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        """Causal attention within each document: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: SharedPrefix, own: Own | None = None) -> Tensor:
        """See `prefix.attend`."""
        ...


class Sdpa:
    """torch's own attention."""

    name = "sdpa"

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        return real_slots(q, k, v, spans, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: SharedPrefix, own: Own | None = None) -> Tensor:
        return attend(q, k, v, prefix, kernel_for(q.device, q.dtype, q.shape[-1]).kernel, own)


class Flash:
    """flash-attn: real slots of all documents in one call, prefixes by its kernel."""

    name = "flash"

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        return documents(q, k, v, spans, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: SharedPrefix, own: Own | None = None) -> Tensor:
        return attend(q, k, v, prefix, FlashAttn(), own)


class Flex:
    """flex_attention: every row's keys as intervals, one softmax over prefix and own chain together."""

    name = "flex"

    def __init__(self) -> None:
        self.plans = Plans()

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        return self.plans.of_documents(spans, window, q).attend(q, k.transpose(0, 1), v.transpose(0, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: SharedPrefix, own: Own | None = None) -> Tensor:
        own_k, own_v, chains = own or (None, None, None)
        return self.plans.of_prefix(prefix, chains, k.shape[1]).attend(q, k, v, own_k, own_v)


BACKENDS: dict[str, type[Backend]] = {"sdpa": Sdpa, "flash": Flash, "flex": Flex}
"""Those of the two streams."""


def backend_for(name: str) -> Backend:
    """The backend of a name other than `reference` and `auto`, for one batch."""
    return BACKENDS[name]()
