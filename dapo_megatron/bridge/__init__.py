"""The bridge moves weights from trainer ranks to engine workers, and verifies that they arrived.

It works on tensors and on descriptions of their layout. It imports neither policy nor engine.
"""
