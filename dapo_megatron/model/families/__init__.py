"""Model families, one file each; `registry.py` lists them."""
