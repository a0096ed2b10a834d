"""Real vLLM engines on a plain CPU: how they are installed (``make vllm``) and started. Needs no GPU and no network."""
