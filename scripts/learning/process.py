"""What a process must be given so that its CPU-seconds count work, not threads that wait for each other."""

from __future__ import annotations

import shutil

from peagle_train.errors import PeagleError

SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # where there is a GPU the peer would compile for it
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


def require_peer(python: str, target: str) -> None:
    """Raises PeagleError if the peer's interpreter is not there. target: of `make`, which makes it."""
    if shutil.which(python) is None:
        raise PeagleError(
            f"--peer-python: found no {python}; expected a python with speculators 0.9.0: run "
            f"`make {target}`, which makes one, or name yours"
        )
