"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no failure.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
