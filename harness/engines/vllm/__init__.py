"""Stock vLLM 0.28.0 with our plugin (``vllm.general_plugins``): the engine the paper measures. See README.md."""
