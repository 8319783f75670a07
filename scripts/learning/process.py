"""What a process must be given so that its CPU-seconds count work, not threads that wait for each other."""

from __future__ import annotations

SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # where there is a GPU the peer would compile for it
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
