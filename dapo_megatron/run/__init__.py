"""One run: what surrounds it (session), what it is made of (build), its folder, and what is written
down of it (record)."""
