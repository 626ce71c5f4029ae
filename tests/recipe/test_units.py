from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconv.recipe.units import BadImages, Duration

VALUES = {
    "ep": st.floats(0, 1e12) | st.integers(0, 10**12).map(float),
    "min": st.floats(0, 1e12) | st.integers(0, 10**12).map(float),
    "step": st.integers(0, 10**12).map(float),
    "%": st.floats(0, 100),
}


@settings(deadline=None)
@given(st.sampled_from(sorted(VALUES)).flatmap(lambda unit: st.builds(Duration, VALUES[unit], st.just(unit))))
@example(Duration(1e6, "ep"))
@example(Duration(5e-324, "%"))
@example(Duration(1.25e-5, "ep"))
@example(Duration(1e12, "step"))
def test_a_printed_duration_parses_to_itself(duration: Duration) -> None:
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "duration"),
    [("90ep", Duration(90, "ep")), (" 5000 step ", Duration(5000, "step")), ("0.5%", Duration(0.5, "%"))],
)
def test_units_are_read(text: str, duration: Duration) -> None:
    assert Duration.parse(text) == duration


@pytest.mark.parametrize(
    "text", ["90", "ep", "-1ep", "1e3ep", "9.5step", "100.1%", "1 epoch", "", 3, None, True, "٣ep"]
)
def test_anything_else_is_rejected(text: object) -> None:
    with pytest.raises(ValueError):
        Duration.parse(text)


def test_the_number_as_typed_is_exact() -> None:
    assert Duration.parse("0.1ep").exact == Fraction(1, 10)


@pytest.mark.parametrize(("text", "limit"), [("stop", 0), ("skip up to 20", 20), (" skip  up to 1 ", 1)])
def test_the_number_of_tolerated_bad_images_is_read_and_printed(text: str, limit: int) -> None:
    parsed = BadImages.parse(text)
    assert parsed == BadImages(limit)
    assert BadImages.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["skip", "skip up to", "skip up to 0", "skip up to -1", "20", 20, None, "stop it"])
def test_an_unlimited_or_unclear_number_of_bad_images_is_rejected(text: object) -> None:
    with pytest.raises(ValueError):
        BadImages.parse(text)
