"""The seed of what GPU tests draw at random; CUBIN_RUNTIME_SEED repeats a run."""

from __future__ import annotations

import os

import numpy as np

SEED = int(os.environ.get("CUBIN_RUNTIME_SEED", np.random.SeedSequence().entropy % (1 << 32)))
