"""The number of examples of a property: many in CI, few in `make check`."""

from hypothesis import HealthCheck, settings

LIGHT = "light"
"""The profile of `make check`: the same few examples each time, so that what fails was broken by the change at hand."""


def examples(most: int) -> settings:
    """Return the settings of a property that wants *most* examples; the light profile has fewer."""
    if settings.get_current_profile_name() == LIGHT:
        most = min(most, settings.default.max_examples)
    return settings(max_examples=most, suppress_health_check=list(HealthCheck))
