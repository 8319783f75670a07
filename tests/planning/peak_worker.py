"""Trains a recipe whose states are there, and prints the process's peak since its first step, in bytes."""

from __future__ import annotations

import sys

import torch

from peagle_train.training.__main__ import main
from peagle_train.training.memory import peak_bytes

if __name__ == "__main__":
    code = main(sys.argv[1:])
    print(f"peak {peak_bytes(torch.device('cpu'))}")
    sys.exit(code)
