"""Runs under vLLM's interpreter: drafts and answers of real engines, as JSON. Imports nothing of ours.

    python vllm_runner.py results.json < jobs      one job a line, run as they come

A job names a target folder, a head folder, how the head is served ("plain": target plus speculative
config; "speculators": the head's folder alone), K, whether it drafts in parallel, prompts as token ids,
max_tokens, and whether the hybrid KV cache manager must be off (one_kv_group). Jobs run one after the
other in one process; all prompts of a job run at once.

A result holds, per prompt, the output's token ids; the counters that `llm.get_metrics()` shows; and one
record per request and drafting step: which prompt, the tokens known at that time, the K drafts. The
records are taken at `EagleProposer.propose`, from the tensors it is given, so they show what the drafter
really saw: of every verified row the positions and tokens, how many were rejected, and the next token.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


class Capture:
    """Keeps what every call of the proposer saw and returned."""

    def __init__(self):
        self.records = []
        self.known = {}  # request id -> tokens known so far
        self.runner = None
        original_runner, original_proposer = GPUModelRunner.propose_draft_token_ids, EagleProposer.propose

        def from_runner(runner, *args, **kwargs):
            self.runner = runner
            return original_runner(runner, *args, **kwargs)

        def from_proposer(proposer, *args, **kwargs):
            rows = self.rows(**kwargs)
            drafts = original_proposer(proposer, *args, **kwargs)
            for (prompt, known), tokens in zip(rows, drafts.tolist(), strict=True):
                self.records.append({"prompt": prompt, "known": known, "drafts": tokens})
            return drafts

        GPUModelRunner.propose_draft_token_ids = from_runner
        EagleProposer.propose = from_proposer

    def reset(self):
        self.records, self.known = [], {}

    def rows(
        self,
        *,
        target_token_ids,
        target_positions,
        next_token_ids,
        common_attn_metadata,
        num_rejected_tokens_gpu=None,
        **_,
    ):
        """Per row of the batch: the request's prompt, and all tokens known to the drafter."""
        starts = common_attn_metadata.query_start_loc.tolist()
        tokens, positions = target_token_ids.tolist(), target_positions.tolist()
        rejected = (
            [0] * (len(starts) - 1) if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu.tolist()
        )
        rows = []
        for row, request in enumerate(self.runner.input_batch.req_ids):
            prompt = list(self.runner.requests[request].prompt_token_ids)
            known = self.known.setdefault(request, prompt)
            verified = range(starts[row], starts[row + 1] - rejected[row])
            known = known[: positions[verified[0]]] + [tokens[index] for index in verified]
            known.append(int(next_token_ids[row]))
            self.known[request] = known
            rows.append((prompt, known))
        return rows


def counters(llm):
    """The speculation counters, summed over engines."""
    found = {name: 0 for name in COUNTERS}
    for metric in llm.get_metrics():
        for name, key in COUNTERS.items():
            if metric.name == key:
                found[name] = metric.values if name == "accepted_per_position" else found[name] + metric.value
    return found


def minus(after, before):
    """Counters are kept per process: what a job added."""
    result = {name: after[name] - before[name] for name in COUNTERS if name != "accepted_per_position"}
    later, earlier = after["accepted_per_position"], before["accepted_per_position"] or []
    earlier = earlier + [0] * len(later or [])
    result["accepted_per_position"] = [a - b for a, b in zip(later or [], earlier, strict=False)]
    return result


def engine(job):
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 256,
        "disable_log_stats": False,
        "disable_hybrid_kv_cache_manager": job["one_kv_group"],
    }
    if job["format"] == "speculators":
        return LLM(model=job["head"], **options)
    speculative = {
        "method": "eagle3",
        "model": job["head"],
        "num_speculative_tokens": job["k"],
        "parallel_drafting": job["parallel"],
    }
    return LLM(model=job["target"], speculative_config=speculative, **options)


def run(job, capture):
    began = time.monotonic()
    llm = engine(job)
    started = time.monotonic()
    capture.reset()
    before = counters(llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    speculative = config.speculative_config
    result = {
        "name": job["name"],
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "records": capture.records,
        "counters": minus(counters(llm), before),
        "target": config.model_config.model,
        "method": speculative.method,
        "parallel_drafting": speculative.parallel_drafting,
        "k": speculative.num_speculative_tokens,
        "seconds": {"start": started - began, "generate": time.monotonic() - started},
    }
    return result


def main():
    # vLLM looks at each new class in a process of its own, half a minute each, to keep CUDA out of this one.
    registry._run_in_subprocess = lambda look: look()
    capture = Capture()
    results = []
    for line in sys.stdin:
        job = json.loads(line)
        results.append(run(job, capture))
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
