"""The engine server: vLLM and graders in their own process tree, which rank 0 leads.

server.py obeys the orders of messages.py with the engine of engine.py. extension.py receives
weights in vLLM's workers. Importing engine.py imports vLLM.
"""
