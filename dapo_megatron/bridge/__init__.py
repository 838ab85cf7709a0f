"""The bridge moves weights from policy ranks to engine ranks, and verifies that they arrived.

It works on tensors and on descriptions of their layout. It imports neither policy nor engine.
"""
