"""Heads for the comparison with vLLM: random ones, ones started from the target, one trained briefly."""

from __future__ import annotations

from typing import Any

import torch

from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document, pack
from peagle_train.head.config import HeadConfig
from peagle_train.head.forward import residuals
from peagle_train.head.initialise import initialise_from_target, initialise_randomly
from peagle_train.head.loss import label_rows
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.sampling import full_depths
from peagle_train.target.adapter import Target

MASK_TOKEN = 3  # <repo_name>, in SmolLM2 and in the twins


def make_head(
    target: Target,
    *,
    layers: int,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int | None,
    own_embeddings: bool,
    initialise: str,
    seed: int,
    must_draft: list[int] | None = None,
    **sizes: Any,
) -> DrafterHead:
    """A head of the given shape.

    initialise: "random" (wide weights and norms away from 1, so that a forgotten norm shows) or "target".
    draft_vocab_size: None for the whole vocabulary; else `must_draft` and a random sample of other tokens.
    sizes: HeadConfig fields that shall differ from the target's, or from a plain P-EAGLE head's.
    """
    facts = target.facts
    fields: dict[str, Any] = {
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope": Rope(facts.rope_theta),
        "max_position_embeddings": facts.max_position_embeddings,
        "mask_token_id": MASK_TOKEN,
        **sizes,
    }
    head = DrafterHead(
        HeadConfig(
            num_layers=layers,
            vocab_size=facts.vocab_size,
            draft_vocab_size=draft_vocab_size or facts.vocab_size,
            target_hidden_size=facts.hidden_size,
            aux_layers=aux_layers,
            own_embeddings=own_embeddings,
            **fields,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    if draft_vocab_size is not None:
        wanted = sorted(set(must_draft or []) - {MASK_TOKEN})
        others = torch.randperm(facts.vocab_size, generator=generator).tolist()
        taken = set(wanted) | {MASK_TOKEN}
        sample = [token for token in others if token not in taken][: draft_vocab_size - len(wanted)]
        head.set_draft_tokens(torch.tensor(sorted(wanted + sample)))
    embeddings = target.embedding_table()
    if initialise == "random":
        initialise_randomly(head, embeddings, seed, std=0.15)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if name.endswith(".bias"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
                elif parameter.ndim == 1:
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    else:
        mean = torch.randn(head.config.aux_width, generator=generator)
        initialise_from_target(
            head,
            embeddings=embeddings,
            output_rows=target.head_table()[head.draft_token_ids],
            final_norm=dict(target.model.get_decoder().norm.named_parameters())["weight"],
            layers=target.last_layers(head.config.num_layers),
            mean_aux=mean,
            seed=seed,
        )
    if own_embeddings:  # away from the target's table, so that vLLM cannot take the one for the other
        with torch.no_grad():
            table = head.embed_tokens.weight
            table.add_(torch.randn(table.shape, generator=generator), alpha=0.1 * float(table.std()))
    return head


def train_briefly(
    head: DrafterHead, target: Target, rows: list[tuple[list[int], list[int]]], positions: int, steps: int
) -> float:
    """Fits the head to prompts and their greedy answers by cross entropy; returns the last loss per element.

    rows: prompt and answer token ids. The head comes to agree with the target on these rows here and
    there, which gives drafts that are accepted, in part accepted, and rejected.
    """
    documents = []
    for prompt, answer in rows:
        tokens = torch.tensor([*prompt, *answer])
        states = target.forward(tokens[None, :-1], aux_layers=head.config.aux_layers)
        generated = torch.arange(len(tokens)) >= len(prompt)
        kept = full_depths(trainable_depths(generated), positions)
        documents.append(Document(tokens, states.aux[0], states.last[0], kept))
    batch = pack(documents)
    labels = label_rows(batch.labels, head.draft_token_ids)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(steps):
        logits = head.logits(residuals(head, batch))
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())
