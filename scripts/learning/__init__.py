"""What the comparisons of learning share: a training by the clock, our side of it, and acceptance by prompt.

clock.py        a training stops when its process has spent its CPU-seconds
ours.py         first weights, step and optimizer of `peagle train`
acceptance.py   drafts and accepted tokens by prompt, and bootstrap intervals over prompts
process.py      how such a process is started: one thread, no GPU, no network
"""
