"""flash-attention's functions on our operators: its parameters, positions and defaults, forward only.

Import these instead of ``flash_attn``. Positions and defaults are those of version 2; what version 3 adds is taken by
name. ``cubin_runtime.compat.flash_attn_interface`` has the positions of version 3. The differences:

- An argument that no kernel honours is an error that names it.
- Nothing has a gradient, and there is no dropout.
- Sinks are taken by their names in later versions, ``s_aux`` and ``learnable_sink``; ``out`` gives the output.
- The output's bits are the same in every run. Of a context they depend on a token's own request alone.
- The log-sum-exp of a token that sees no key is -inf.
- All query tokens lie at one stride; strides are multiples of 16 bytes.

Calls are torch ops where torch traces them, and may be captured.
"""

from __future__ import annotations

from .functions import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
