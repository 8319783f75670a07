"""Batches under a memory plan, each in a process of its own: prints the plan and the measured peak as JSON.

`python -m tests.training.memory_worker` reads lines "METHOD TOKENS BUDGET" (bytes; 0: as much as is useful)
and forks for each: imports, which take seconds, are done once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from dataclasses import asdict, replace

import torch
from torch import nn

from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.model import DrafterHead
from peagle_train.head.sampling import kept_shares, sample_depths
from peagle_train.training.memory import peak_bytes, plan_memory, reset_peak, resident_bytes, states_bytes
from peagle_train.training.module import DraftTraining
from tests.head.toys import CONFIG, EAGLE3

HEAD = replace(
    CONFIG,
    hidden_size=192,
    intermediate_size=512,
    num_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=6000,
    draft_vocab_size=4096,
    target_hidden_size=192,
    max_position_embeddings=1 << 20,
)
K = 4
CPU = torch.device("cpu")


RATE = {"peagle": 0.8, "eagle3": 1.0}


def head_of(method: str) -> DrafterHead:
    head = DrafterHead(HEAD if method == "peagle" else replace(HEAD, **EAGLE3))
    head.set_draft_tokens(torch.arange(4096))
    return head


def batch_of(tokens: int, rate: float) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(tokens + 2) >= 4
    kept = sample_depths(trainable_depths(mask), K, rate, 0.0, generator)
    ids = torch.randint(4, HEAD.vocab_size, (tokens + 2,), generator=generator)
    aux = torch.randn(tokens + 1, HEAD.aux_width, generator=generator)
    return pack([Document(ids, aux, torch.randn(tokens + 1, 192, generator=generator), kept)])


def measure(method: str, tokens: int, budget: int) -> None:
    head, rate = head_of(method), RATE[method]
    training = DraftTraining(head, nn.Linear(192, 4096, bias=False), K, "kl")
    optimizer = torch.optim.AdamW(training.parameters(), fused=True)
    training(batch_of(64, rate)).loss.backward()  # libraries and their buffers are part of what is there
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    plan = plan_memory(
        head,
        longest=tokens,
        shares=kept_shares(K, rate),
        device=CPU,
        half=False,
        backend="sdpa",
        budget=budget or 1 << 40,
        resident=resident_bytes(CPU),
        states=states_bytes(head, "one", 1),
    )
    training.engine = plan.settings
    reset_peak(CPU)
    for batch in (batch_of(64, rate), batch_of(tokens, rate)):  # the first makes the moments
        training(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({**asdict(plan), "predicted": plan.peak, "measured": peak_bytes(CPU)}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                method, *sizes = line.split()
                measure(method, *map(int, sizes))
                code = 0
            except BaseException:  # noqa: BLE001 - the loop is the parent's
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
