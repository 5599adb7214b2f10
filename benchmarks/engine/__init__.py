"""Parts of ``engine_vllm.py``: models of random weights, a vLLM that takes commands, and a judge in float32."""
