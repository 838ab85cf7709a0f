"""Settings of all tests."""

from hypothesis import Phase, settings

# A busy machine is no failure.
settings.register_profile("default", deadline=None)
# The same examples for every mutant, and no search for the smallest that fails.
settings.register_profile(
    "mutations",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("default")
