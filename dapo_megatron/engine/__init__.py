"""vLLM in this process: it samples completions, and receives the policy's weights between steps.

`VllmEngine` (engine.py) implements `protocols.RolloutEngine`. Importing it imports vLLM.
"""
