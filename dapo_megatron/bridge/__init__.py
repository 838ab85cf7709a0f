"""The bridge: who holds which slice of which tensor, read in both directions.

It works on descriptions of layouts and on tensors; it knows neither policy nor engine.
"""
