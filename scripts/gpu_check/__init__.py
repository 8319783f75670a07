"""Everything that needs a GPU, held against what is known to be right.

    make gpu-check                                            on a machine with CUDA; some minutes
    make gpu-check ARGS="--only backend:flash heads:flash"    some parts alone
    .venv/bin/python -m scripts.gpu_check --plan              the memory plans of the heads; needs no GPU
    .venv/bin/python -m scripts.gpu_check --device cpu --tiny what runs without a GPU, small

Parts:

    kernels        each private kernel against products of tiles (head/kernels.py)
    backend:NAME   sdpa, flash, flex: values and gradients against the rule, in float32 and bfloat16, for
                   several heads and windows; gradients of whole heads against the backend `reference`
    heads:NAME     training steps of heads for GPT-OSS-20B and Qwen3-Coder at 8,192 and 20,000 tokens: memory
                   against the plan, tokens per second
    processes      with several GPUs: DDP, FSDP2 and ZeRO-1/2/3 over NCCL against one process
    vllm           where a vLLM with CUDA is installed: it loads an exported head and drafts our tokens

Each part runs in a process of its own, so that a kernel that crashes takes no other check with it. A table
says of every check ok, failure, or skipped with the reason; OUTPUT gets the same as JSON. The exit status is
0, 1 after any failure, and 2 where there is no CUDA.
"""
