"""The kernel under pytest: first ``nvcc -arch=sm_90a -cubin rms_norm.cu``, then ``pytest test_rms_norm.py``, here."""

import numpy as np
import pytest
from custom_kernel import RMS_NORM


@pytest.mark.cubin("rms_norm.cubin", RMS_NORM)
def test_rms_norm(cubin_under_test, cubin_device):
    x = np.random.default_rng(0).standard_normal((3, 1000), dtype=np.float32)
    weight, out = np.full(1000, 2, dtype=np.float32), cubin_device.poisoned(x.shape, "float32")
    arrays = {"x": cubin_device.array(x), "weight": cubin_device.array(weight), "out": out}
    cubin_device.launch(cubin_under_test, grid=3, block=256, **arrays, columns=1000, epsilon=0.0)
    expected = 2 * x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(cubin_device.numpy(out), expected, rtol=1e-5)
