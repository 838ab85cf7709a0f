"""vLLM in this process: it samples completions, and takes the policy's weights between steps.

`VllmEngine` (engine.py) implements `protocols.RolloutEngine`; importing it imports vLLM."""
